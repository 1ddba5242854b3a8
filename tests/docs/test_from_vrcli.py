"""Every command of docs/from/vrcli.md is run, the large ones with --dry-run; every key of its tables is one of ours,
and every option that it names exists."""

import contextlib
import gzip
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from from_pages import (
    ROOT,
    answering,
    commands,
    first_cell,
    keys_of,
    load_the_study,
    prefers_more_words,
    serve_up_to_the_port,
    shell,
    table,
    value_at,
)
from test_vrcli_page import chapter
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.config import ModelConfig, load_recipe
from trailmark.methods import resolve_recipe
from trailmark.methods.vrcli.pairwise import read_comparisons, score
from trailmark.models.load import load_model
from trailmark.runs.store import read_metrics

sys.path.insert(0, str(ROOT / "tests/models"))

PAGE = (ROOT / "docs/from/vrcli.md").read_text()
SMALL = {"family": "llama", "layers": 1, "width": 32, "heads": 2, "context": 2048}
VOTES = ("7b_pairwise_annotations.csv", "3b_pairwise_annotations.csv", "raw_automated_metrics.csv.gz")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """What the page takes as given: books, conversations, a base model, a fine-tuned one, and DeepSpeed's shards."""
    here = tmp_path_factory.mktemp("from-vrcli")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        shutil.copytree(ROOT / "recipes", "recipes")
        made = [chapter(book, k) for book in ("one", "two", "three") for k in range(6)]
        Path("novels.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in made).encode()))
        (rows,) = re.findall(r"```json\n(.*?)```", (ROOT / "docs/vrcli.md").read_text(), re.S)
        Path("talks.jsonl").write_text(rows)
        for name in ("base", "runs/sft"):
            lm = load_model(ModelConfig.model_validate({"name": "tiny", "shape": SMALL}))
            lm.model.save_pretrained(name)
            lm.tokenizer.save_pretrained(name)
        shutil.copytree(ROOT / "tests/models/zero_shards/zero3", "ckpt/_actor")
        for name in VOTES if "TRAILMARK_DATA" in os.environ else ():
            shutil.copy(Path(os.environ["TRAILMARK_DATA"]) / "stories_votes" / name, name)
        yield here


def model_of_the_books(text):
    """A stand-in for the large model: short answers, and the best mark where a number is asked for."""
    return "5" if "Rate from 1 to 5" in text else "Ann met Bob."


def train(words):
    """The laptop's runs go two steps. The others are checked up to the first step."""
    if words[1] == "recipes/vrcli-laptop.yaml":
        own = [] if "model.shape=null" in words else [f"model.shape={json.dumps(SMALL)}"]
        shell(*words, *own, "steps=2", "n=2", "prompts_per_step=2", "eval.every=2", "sampling.max_tokens=8")
        out = next((w.removeprefix("out=") for w in words if w.startswith("out=")), "runs/vrcli-laptop")
        metrics = list(read_metrics(Path(out)))
        assert [m["step"] for m in metrics if "reward" in m] == [1, 2] and "eval/improvement" in metrics[-1]
    else:
        assert "# model: " in shell(*words, "--dry-run")


def upload(words):
    from hub_stand_in import FILES, MADE, hub_at

    with hub_at():
        assert "uploaded to http://127.0.0.1" in shell(*words)
        assert "me/story-model" in MADE and "model.safetensors" in FILES


of_data = lambda command: [pytest.mark.data] if VOTES[0] in command else []


@pytest.mark.parametrize("command", [pytest.param(c, marks=of_data(c), id=c[:60]) for c in commands(PAGE)])
def test_command(place, monkeypatch, command):
    monkeypatch.chdir(place)
    program, *words = shlex.split(command)
    assert program == "trailmark"
    if words[0] == "train":
        return train(words)
    if words[0] == "study":
        return load_the_study(words)
    if words[0] == "serve":
        return serve_up_to_the_port(words)
    if "--push" in words:
        return upload(words)
    reply = prefers_more_words if words[0] == "judge" else model_of_the_books
    with answering(reply) if any("http://" in w for w in words) else contextlib.nullcontext("") as url:
        said = shell(*(w.replace("http://127.0.0.1:8000", url) for w in words))
    made = next(look for start, look in FLOORS.items() if " ".join(words).startswith(start))(said)
    assert made, said


def count(pattern, said):
    return int(re.search(pattern, said)[1])


def lines(*files):
    return [len(Path(f).read_text().splitlines()) for f in files]


def released(said):
    s = score(read_comparisons(Path(VOTES[0])), "trained_7b", "base7b", "overall_quality")
    shown = "76.47" in said and "65.0" in said and "columns are in the file twice" in said
    return shown and round(100 * s.preference.value, 2) == 76.47 and s.win_rate.value == 0.65


# The least that a command must have done.
FLOORS = {
    "data books": lambda said: count(r"rows: (\d+) rows", said) == 6,
    "data hints": lambda said: lines("hints/train.jsonl")[0] >= 64,
    "data stories": lambda said: count(r"train: (\d+) rows", said) == 2,
    "improvement stories/train.jsonl": lambda said: lines("baselines.jsonl") == [3],  # two rows and a fingerprint
    "improvement stories/test.jsonl": lambda said: all(word in said for word in ("br", "rl", "gold", "empty", "mean")),
    "write": lambda said: lines(*(f"written/{n}.jsonl" for n in ("b", "br", "sft", "rl", "rl.plans"))) == [1] * 5,
    "chapters": lambda said: {x.split(",")[0] for x in Path("metrics.csv").read_text().splitlines()}
    == {"key", "b", "br", "sft", "rl", "reas"},
    "judge": lambda said: len(read_comparisons(Path("votes.csv"))) == 6,  # six pairs of four variants, one row
    "votes votes.csv": lambda said: "Bradley-Terry" in said and "unseen_trigrams_percent" in said,
    "votes 7b": released,
    "convert": lambda said: "DeepSpeed ZeRO 3, 2 files" in said and load_model(ModelConfig(name="story-model")).context,
}


@pytest.mark.parametrize("line", table(PAGE, "Flags of the trainer") + table(PAGE, "Flags of SFT"), ids=first_cell)
def test_every_key_is_a_key_of_a_recipe(place, monkeypatch, line):
    monkeypatch.chdir(place)
    Path("my_reward.py").write_text("def score(answers):\n    return [0.0 for _ in answers]\n")
    Path("my_eval.py").write_text("def words(answers):\n    return [0.0 for _ in answers]\n")
    ours, noted = keys_of(line)
    recipe = "vrcli-novels-sft-gpu" if line in table(PAGE, "Flags of SFT") else "vrcli-laptop"
    for group in (ours, noted):
        loaded = load_recipe(ROOT / f"recipes/{recipe}.yaml", [k.replace("FILE", "b.jsonl") for k in group])
        config = resolve_recipe(loaded)
        for key in (k.split("=")[0] for k in group):
            if key.split(".")[0] not in ("reward", "data", "objective", "task"):  # these are moved, or are free
                assert value_at(config, key) is not None


def options_of(*command):
    said = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "250", "TERM": "dumb"}).output
    return set(re.findall(r"--[a-z][\w-]*", said))


def test_every_option_exists():
    checked = 0
    for line in table(PAGE, "Flags of the data steps"):
        ours = line.split("|")[2]
        for words in re.findall(r"`((?:data \w+|write|improvement|chapters|eval|convert) --[^`]+)`", ours):
            parts = words.split(" --")
            known = options_of(*parts[0].split())
            for option in parts[1:]:
                assert f"--{option.split()[0]}" in known, words
                checked += 1
    assert checked == 30


def test_the_page_knows_every_flag_of_the_paper_runs():
    for flag in ("pretrain", "n_samples_per_prompt", "rollout_batch_size", "train_batch_size", "micro_train_batch_size",
                 "micro_rollout_batch_size", "max_epochs", "num_episodes", "prompt_max_len", "generate_max_len",
                 "actor_learning_rate", "adam_betas", "lr_warmup_ratio", "max_norm", "eps_clip", "gamma",
                 "advantage_estimator", "use_kl_loss", "kl_estimator", "init_kl_coef", "bf16", "gradient_checkpointing",
                 "adam_offload", "zero_stage", "vllm_num_engines", "seed", "eval_steps", "save_steps", "max_ckpt_num",
                 "load_checkpoint", "ckpt_path", "save_path", "save_hf_ckpt", "use_wandb", "eval_split", "data_dir",
                 "tokenizer_name", "dataset_name", "model_name", "nice_model_name", "use_system_role"):  # fmt: skip
        assert re.search(rf"--{flag}\b", PAGE), flag
