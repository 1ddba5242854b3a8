"""Every command of docs/from/lpr.md is run, the large ones with --dry-run; every key of its table is one of ours; and
the paper's recipes hold the paper's numbers."""

import json
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from from_pages import ROOT, commands, first_cell, keys_of, own_questions, serve_up_to_the_port, shell, table

from trailmark.config import load_recipe, resolve
from trailmark.methods import get_method
from trailmark.methods.lpr.round import Round

PAGE = (ROOT / "docs/from/lpr.md").read_text()
SOLVER = ROOT / "tests/methods/lpr_careless.py"
QUESTION = {"text": "Max is a cat.", "question": "What follows?", "options": ["a", "b", "c", "d"], "answer": 1}
SMALL = {
    "teacher": {"prompts": 4},
    "sft": {"steps": 1, "batch": 2},
    "sample": {"prompts": 6, "n": 4},
    "states": {"shards": 2},
    "prm": {"steps": 1, "batch": 4},
    "preference": {"steps": 1, "batch": 2},
    "pairs": {"margin": 0.0},
    "model": {"shape": {"layers": 1, "width": 16, "heads": 2, "context": 96}},
    "engine": {"max_num_seqs": 8},
    "eval": {"n": 2},
}


def smaller_recipe():
    """The recipe of the laptop's road for a model of one layer, whose solutions a script writes."""
    recipe = yaml.safe_load((ROOT / "recipes/lpr-arith.yaml").read_text())
    for key, value in SMALL.items():
        recipe[key] = {**recipe[key], **value}
    recipe["seats"] = {**recipe["seats"], "policy": {"kind": "scripted", "function": f"{SOLVER}:careless"}}
    return yaml.safe_dump(recipe)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    here = tmp_path_factory.mktemp("from-lpr")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        shutil.copytree(ROOT / "recipes", "recipes")
        Path("recipes/lpr-arith.yaml").write_text(smaller_recipe())
        shell("train", "recipes/lpr-arith.yaml")
        Path("row.jsonl").write_text('{"prompt": "1?\\n", "response": "2", "reward": 1}\n')
        shape = {"layers": 1, "width": 16, "heads": 2, "context": 1024}
        shell("train", "recipes/preference-arith.yaml", "model.name=tiny", f"model.shape={json.dumps(shape)}",
              "steps=1", "data=row.jsonl", "format=trajectories", "objective=rejection", "batch=1", "eval.every=0",
              "engine.max_len=1024", "out=runs/lpr-logiqa2/policy-1")  # fmt: skip
        Path("logic").mkdir()
        for name in ("logiqa2_dev", "logiqa2_train"):
            Path(f"logic/{name}.jsonl").write_text(f"{json.dumps(QUESTION)}\n" * 3)
        for name, label in (("reclor_val", {"label": 1}), ("reclor_train", {"label": 0}), ("reclor_test", {})):
            row = {"context": "Max is a cat.", "question": "What follows?", "answers": ["a", "b", "c", "d"], **label}
            Path(f"logic/{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
        Path("more.json").write_text('[{"text": "q", "label": 1, "response": "x", "pred": "A", "id": "another"}]')
        Path("steps.jsonl").write_text('{"question": "1+1?", "steps": ["1+1=2", "#### 2"], "labels": [1, 0]}\n')
        shell("data", "tokenizer", "steps.jsonl", "prontoqa-words", "--size", "300")
        yield here


def smaller(words):
    """The same command with as few starts and tokens as it takes to see it work."""
    out = list(words)
    for option, few in (("--n", "2"), ("--samples", "2"), ("--max-tokens", "4")):
        if option in out:
            out[out.index(option) + 1] = few
    out = [w.replace("best_of:8", "best_of:2").replace("path=data/logic", "path=logic") for w in out]
    if out[0] == "eval":
        out += [] if "--n" in out or "--leaderboard" in out else ["--n", "2"]
        out += [] if "--max-tokens" in out else ["--max-tokens", "4"]
    return out


@pytest.mark.parametrize("command", commands(PAGE), ids=lambda c: c[:70])
def test_command(place, monkeypatch, command):
    monkeypatch.chdir(place)
    program, *words = shlex.split(command)
    assert program == "trailmark"
    if words[0] == "train":
        assert "# model: " in shell(*words, "--dry-run")
    elif words[0] == "serve":
        serve_up_to_the_port(words)
    else:
        shell(*smaller(words))


def test_the_stages_of_the_page_are_those_of_a_recipe(place, monkeypatch):
    monkeypatch.chdir(place)
    listed = [line.split()[0] for line in shell("stages", "recipes/lpr-arith.yaml").splitlines()]
    run = [shlex.split(c)[4] for c in commands(PAGE) if c.startswith("trailmark stages") and "--only" in c]
    assert [name.removesuffix("-1") for name in listed] == run
    told = "".join(table(PAGE, "The stages"))
    assert all(f"`{name}`" in told for name in listed) and "`rl-1`" in told


def test_what_is_exported_and_cut(place, monkeypatch):
    monkeypatch.chdir(place)
    for name in ("solutions", "pairs"):
        Path(f"{name}-x.json").unlink(missing_ok=True)
        shell("lpr", "export", name, "recipes/lpr-arith.yaml", f"{name}-x.json")
    rows = json.loads(Path("solutions-x.json").read_text())
    assert len(rows) == 6 and all(len(r["response"]) == 4 for r in rows)
    pairs = json.loads(Path("pairs-x.json").read_text())
    assert pairs and {p["id"] for p in pairs} <= {r["id"] for r in rows}


def value_at(config, name):
    """The value of a key; sections of trainings are plain mappings."""
    for part in name.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


@pytest.mark.parametrize("line", table(PAGE, "Keys"), ids=first_cell)
def test_every_key_is_a_key_of_a_recipe(line):
    for group in keys_of(line):
        loaded = load_recipe(ROOT / "recipes/lpr-arith.yaml", group)
        config = resolve(loaded, get_method(loaded.method).Config)
        assert all(value_at(config, key.split("=")[0]) is not None for key in group)


@pytest.mark.parametrize("heading", ["Scripts"])
def test_every_key_in_the_other_tables_is_one(heading):
    keys = re.findall(r"`((?:pairs|preference)\.[\w.]+=[^`]+)`", "".join(table(PAGE, heading)))
    assert len(keys) >= 5
    for key in keys:
        loaded = load_recipe(ROOT / "recipes/lpr-arith.yaml", [key])
        assert value_at(resolve(loaded, get_method("lpr").Config), key.split("=")[0]) is not None


def test_the_page_knows_what_the_reference_has():
    for name in ("service_api_caller_v1.py", "openai_api_caller_v1.py", "vllm_inference.py", "trainer_base_ds_mul.py",
                 "main.py", "-cp", "-cn", "_self_", "_target_", "${sft_model_dir}", "deepspeed@ds_cfg", "--local_rank",
                 "best_of_filter", "sample_react_inter_states", "construct_dpo_data_from_react_response",
                 "merge_response.py",
                 "split_train_dev.py", "--ratio_s", "--ratio_e", "--split_num", "--min_step", "--remove_action",
                 "--best_of", "--max_neg_num", "--pos_margin", "--prob_labels", "--reduction", "--up_sampling",
                 "--min_pos_step", "--min_neg_step", "--exclude_file", "flush_file", "split_id", "max_data_num",
                 "replay_ratio", "kl_ctl", "process_reward_alpha", "PAD_TOKEN"):  # fmt: skip
        assert name in PAGE, name


def test_the_page_says_which_recipe_is_which_config_of_the_readme():
    rows = {line.split("|")[1].strip(): line for line in table(PAGE, "The stages") if line.count("|") == 4}
    for name, config, ours in (
        ("SFT, ReClor", "llama2_7b_gpt35_dpo_sft_v2_0", "lpr-reclor.yaml"),
        ("DPO, LogiQA-v2", "llama2_7b_70bdistil_dpo_v1_0_th_test", "lpr-logiqa2.yaml pairs.process=false"),
        ("Reward Modeling, LogiQA-v2", "llama2_7b_70bdistil_prm_v1_0", "lpr-logiqa2.yaml"),
        ("Step DPO, ReClor", "llama2_7b_gpt351106_distil_step_dpo_v5_0", "lpr-reclor.yaml"),
        ("Step DPO, LogiQA-v2", "llama2_7b_70bdistil_step_dpo_v1_0_th", "lpr-logiqa2.yaml"),
        ("Step PPO, LogiQA-v2", "logiqav2_prm_v2_1", "lpr-logiqa2-ppo.yaml"),
    ):
        assert f"/{config}.yaml`" in rows[name] and f"`{ours}`" in rows[name]
        assert (ROOT / "recipes" / ours.split()[0]).is_file()
    assert '"Step DPO" in the README is the paper\'s process DPO (pDPO)' in PAGE


def resolved(name):
    loaded = load_recipe(ROOT / f"recipes/{name}.yaml")
    return resolve(loaded, get_method(loaded.method).Config)


@pytest.mark.parametrize(
    ("name", "sft", "prm", "dpo", "margin", "sampled", "completed"),
    [
        # (lr, batch, epochs, warmup), as in the reference's configs
        ("lpr-reclor", (2e-6, 24, 3, 0.01), (1e-6, 64, 4, 200), (1e-6, 64, 2, 200), 0.4, (10, 0.7, 3072), (0.8, 1.0)),
        ("lpr-logiqa2", (1e-5, 24, 6, 0.01), (1e-6, 64, 2, 200), (2e-6, 64, 2, 200), 0.5, (10, 0.8, 2048), (0.7, 0.8)),
    ],
)  # fmt: skip
def test_the_papers_recipes_hold_the_papers_numbers(name, sft, prm, dpo, margin, sampled, completed):
    c = resolved(name)
    for section, wanted in ((c.sft, sft), (c.prm, prm), (c.preference, dpo)):
        optim = section["learner"]["optim"]
        assert (optim["lr"], section["batch"], section["epochs"], optim["warmup"]) == wanted
    o = c.learner.optim
    assert (o.betas, o.eps, o.weight_decay, o.clip, o.schedule) == ((0.9, 0.95), 1e-6, 0.01, 1.0, "linear")
    lengths = [section["max_len"] for section in (c.sft, c.prm, c.preference)]
    assert c.preference["beta"] == 0.1 and lengths == [2048, 4096, 2048]
    assert (c.sample.n, c.sampling.temperature, c.sampling.max_tokens) == sampled and c.complete.n == 3
    assert (c.complete.sampling.temperature, c.complete.sampling.top_p) == completed
    read = Round(c, SimpleNamespace(path=None)).read()
    assert (c.pairs.margin, c.pairs.best_of, c.pairs.max_wrong, read.classes, read.over) == (
        margin, 10, 10, [2, 3], "product",
    )  # fmt: skip
    assert c.seed == 42 and c.model.name == "meta-llama/Llama-2-7b-chat-hf" and c.teacher.options == {"shots": 1}
    logiqa = name == "lpr-logiqa2"
    assert (c.states.start, c.states.ratio, c.states.min_steps, c.states.remove_action) == (
        (0.2, 0.3, 0, False) if logiqa else (0.2, 0.5, 8, True)
    )
    assert (c.read.skip, c.pairs.right_pairs) == (([], "after") if logiqa else (["Action"], "before"))
    assert (c.eval.split, c.eval.n) == (("dev", None) if logiqa else ("val", 500))  # no question is asked twice


def test_recipes_with_strict_solutions_count_equal_ones_once():
    strict = [c for p in (ROOT / "recipes").glob("lpr-*.yaml") if (c := resolved(p.stem)) and
              getattr(getattr(c, "clean", None), "react", None) == "strict"]  # fmt: skip
    assert {c.name for c in strict} == {"lpr-reclor", "lpr-logiqa2-round2"} and all(c.clean.distinct for c in strict)


def test_questions_of_one_s_own(tmp_path, monkeypatch):
    """The files of docs/lpr.md fit each other; tests/docs/test_floors.py trains on them."""
    monkeypatch.chdir(tmp_path)
    own_questions(tmp_path)
    said = shell("train", "my-lpr.yaml", "--dry-run")
    assert "seat teacher: my_teacher.py:solve" in said and "# stages: written, lessons, sft, " in said
    rows = [(tmp_path / f"ages/{split}.jsonl").read_text().splitlines() for split in ("train", "test")]
    assert [len(r) for r in rows] == [520, 200] and not set(rows[0]) & set(rows[1])


def test_the_papers_second_round_and_step_ppo():
    c = resolved("lpr-logiqa2-round2")
    assert (c.pairs.margin, c.labels.replay, c.preference["epochs"], c.states.ratio) == (0.9, 0.1, 1, 0.5)
    assert c.preference["learner"]["optim"] == {"lr": 2e-6, "warmup": 0.05} and c.sampling.temperature == 1.0
    p = resolved("lpr-logiqa2-ppo")
    assert (p.kl, p.gamma, p.lam, p.clip, p.value_clip, p.rewards.clip, p.passes) == (0.1, 1.0, 0.95, 0.2, 0.2, 5.0, 2)
    assert (p.learner.optim.lr, p.critic.optim.lr, p.sampling.top_p, p.prompts_per_step * p.n) == (1e-6, 5e-7, 0.8, 64)
    assert p.steps == 5 * 12567 // 64
