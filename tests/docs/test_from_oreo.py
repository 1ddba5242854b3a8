"""Every command of docs/from/oreo.md is run, the large ones with --dry-run; every key of its tables is one of ours."""

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from from_pages import ROOT, commands, first_cell, keys_of, load_the_study, serve_up_to_the_port, shell, table, value_at
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.commands.serve import serving
from trailmark.config import ModelConfig, load_recipe, resolve
from trailmark.engines.local import LocalEngine
from trailmark.methods import get_method
from trailmark.models.load import load_model
from trailmark.score.value_models import load_values

PAGE = (ROOT / "docs/from/oreo.md").read_text()
SHAPE = {"family": "llama", "layers": 1, "width": 32, "heads": 2, "context": 4096}
FEW = {"--n": "2", "--samples": "2", "--max-tokens": "4"}

sys.path.insert(0, str(ROOT / "tests/tasks/alfworld"))


def made_run(name, task):
    """A run of both models after one step, as the page's commands find it."""
    Path("row.jsonl").write_text('{"prompt": "1+1=?\\n", "response": "#### 2", "reward": 1}\n' * 2)
    words = [
        "model.name=tiny", f"model.shape={json.dumps(SHAPE)}", "data=row.jsonl", "format=trajectories", "steps=1",
        "batch=1", "eval.every=0", "sampling.max_tokens=4", f"out={name}", f"task={json.dumps(task)}",
        "engine.max_len=4096",
    ]
    done = CliRunner().invoke(app, ["train", str(ROOT / "recipes/oreo-arith.yaml"), *words])
    assert done.exit_code == 0, done.output


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    from small_home import ERRANDS, names, write_download

    here = tmp_path_factory.mktemp("from-oreo")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        shutil.copytree(ROOT / "recipes", "recipes")
        write_download(here / "data/alfworld", ["train", "valid_seen", "valid_unseen"])
        Path("data/math").mkdir()
        for split in ("train", "test"):
            problem = {"question": "One and one?", "answer": "Two of them.\n#### 2"}
            Path(f"data/math/gsm8k_{split}.jsonl").write_text(f"{json.dumps(problem)}\n" * 3)
        task, trial = next(iter(names().values())).split("/")
        talk = [{"from": "human", "value": "Your task is to: put a mug in cabinet."}]
        for command in next(iter(ERRANDS.values()))[3]:
            talk += [{"from": "gpt", "value": command}, {"from": "human", "value": "So it is."}]
        Path("experts.json").write_text(json.dumps([{"task": task, "trial": trial, "conversations": talk}]))
        Path("trajectories.jsonl").write_text('{"prompt": "1+1=?\\n", "response": "#### 2", "reward": 1}\n')
        Path("rollouts").mkdir()
        said = [
            {"role": "user", "content": "Do it."},
            {"role": "assistant", "content": "Action: look"},
            {"role": "user", "content": "So."},
        ]
        for name, reward in (("10_0", True), ("3_1", False), ("3_0", True)):
            play = {
                "meta": {"reward": reward, "invalid": False},
                "conversations": [{**said[0], "content": name}, *said[1:]],
            }
            Path(f"rollouts/{name}.json").write_text(json.dumps(play, indent=1))
        shell(
            "convert",
            "trajectories.jsonl",
            "episodes.jsonl",
            "--from",
            "trajectories",
            "--to",
            "episodes",
            "--tokenizer",
            "tiny",
        )
        made_run("runs/oreo-qwen-math", {"name": "arith", "options": {"level": 2}})
        for name in ("runs/arith-sft-careless", "runs/oreo-arith"):
            shutil.copytree("runs/oreo-qwen-math", name)
        games = {"games": "data/alfworld", "mode": "text", "dialect": "put", "opening": "apart", "horizon": 2}
        made_run("runs/oreo-alfworld", {"name": "alfworld", "options": games})
        yield here


def smaller(words):
    """The same command for a model of 1 layer: as many starts and tokens as it takes to see it work."""
    out = list(words)
    for option, few in FEW.items():
        if option in out:
            out[out.index(option) + 1] = few
    if out[0] == "eval":
        out += [] if "--n" in out else ["--n", "2"]
        out += [] if "--max-tokens" in out else ["--max-tokens", "4"]
        out += ["horizon=2"] if "alfworld" in out else []
    return out


def run_served(words):
    """The two commands against a server: one that really runs, with the value model of the run that the page serves."""
    lm = load_model(ModelConfig(name="runs/oreo-alfworld/checkpoints/000001/policy"))
    values = load_values("runs/oreo-alfworld", lm.tokenizer)
    with serving(LocalEngine(lm, 4, 4096), "runs/oreo-alfworld", values=values) as url:
        said = shell(*smaller([w.replace("http://127.0.0.1:8000", url) for w in words]))
    (row,) = json.loads(said.splitlines()[-1])["rows"]
    assert row["scored"] == 2 and row["failed"] == 0


@pytest.mark.parametrize("command", commands(PAGE), ids=lambda c: c[:60])
def test_command(place, monkeypatch, command):
    monkeypatch.chdir(place)
    program, *words = shlex.split(command)
    assert program == "trailmark"
    if words[0] == "train":
        assert "# model: " in shell(*words, "--dry-run")
    elif words[0] == "study":
        load_the_study(words)
    elif words[0] == "serve":
        serve_up_to_the_port(words)
    elif any("http://" in w for w in words):
        run_served(words)
    else:
        shell(*smaller(words))


def test_rollouts_are_merged_in_order(place, monkeypatch, tmp_path):
    monkeypatch.chdir(place)
    out = tmp_path / "merged.jsonl"
    assert shell("data", "rollouts", "rollouts", "--out", str(out)).endswith("2 of 3 plays were won (0.667)\n")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["conversations"][0]["content"], r["reward"]) for r in rows] == [("3_0", 1), ("3_1", 0), ("10_0", 1)]
    assert {len(r["conversations"]) for r in rows} == {2}  # what nobody answered is gone
    lost = tmp_path / "lost.jsonl"
    shell("data", "rollouts", "rollouts", "--out", str(lost), "--failures")
    assert [json.loads(x)["reward"] for x in lost.read_text().splitlines()] == [0]


@pytest.mark.parametrize("line", table(PAGE, "Flags of the trainer"), ids=first_cell)
def test_every_key_is_a_key_of_a_recipe(line):
    ours, noted = keys_of(line)
    recipe = "arith-sft" if "chat=false" in ours + noted else "oreo-arith"
    needed = ["model.lora.rank=64"] if any("dropout" in k for k in ours + noted) else []
    for group in (ours, noted):
        loaded = load_recipe(ROOT / f"recipes/{recipe}.yaml", [*needed, *group])
        config = resolve(loaded, get_method(loaded.method).Config)
        assert all(value_at(config, key.split("=")[0]) is not None for key in group)


def test_the_page_knows_every_flag_of_the_paper_runs():
    for flag in ("dro_actor_loss", "traj_actor_loss", "single_step_actor_loss", "step_level", "token_level_agent",
                 "period_as_delimiter", "padding_side", "max_len", "clip_log", "kl_reg", "unbiased_kl", "forward_kl",
                 "kl_targ", "kl_coeff_lr", "init_log_kl_coeff", "critic_only", "actor_freeze_ratio", "enable_ema",
                 "ema_beta", "importance_sampling", "importance_sampling_2", "hinge_coeff", "plot_weights", "rew_mul",
                 "rew_add", "load_actor", "load_critic", "load_critic_adapter", "only_critic_lora", "load_in_4bit",
                 "fix_max_steps", "no_bos", "add_eos", "n_generate_actions"):  # fmt: skip
        assert re.search(rf"--{flag}\b", PAGE), flag
