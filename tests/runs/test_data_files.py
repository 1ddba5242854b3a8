"""A run reads the same files from its first to its last step. If one was edited, an error names its key and path."""

import hashlib
import json
import os
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.config import resolve
from trailmark.methods.configs import SftRecipe
from trailmark.methods.online_configs import PolicyGradientRecipe
from trailmark.methods.pipeline import training_stage
from trailmark.runs import data_files
from trailmark.runs.data_files import known_files, named_files
from trailmark.runs.stages import run_stages

TINY = {"name": "tiny", "shape": {"layers": 1, "width": 32, "heads": 2, "context": 128}}
SFT = {"method": "sft", "data": "rows.jsonl", "eval_data": "held.jsonl", "out": "run", "steps": 2, "batch": 2,
       "chat": False, "model": TINY, "checkpoint": {"every": 1, "metric": "eval/nll", "mode": "min"},
       "eval": {"every": 1}}  # fmt: skip


def rows(n, word="say"):
    return "".join(json.dumps({"prompt": f"{word} {i}: ", "response": str(i)}) + "\n" for i in range(n))


@pytest.fixture
def shell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(rows(4))
    Path("held.jsonl").write_text(rows(2))
    Path("sft.yaml").write_text(yaml.safe_dump(SFT))

    def call(*words, code=0):
        done = CliRunner().invoke(app, list(words))
        assert done.exit_code == code and "Traceback" not in done.output, done.output
        return done.output

    return call


def held(run="run"):
    return {p: p.read_bytes() for p in Path(run).rglob("*") if p.is_file() and p.name != ".lock"}


def test_data_that_was_edited_is_refused_with_its_key(shell):
    shell("train", "sft.yaml", "steps=1")
    about = json.loads(Path("run/data.json").read_text())
    text = rows(4).encode()
    assert about["data"] == {"path": "rows.jsonl", "size": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    before = held()
    for key, file in (("data", "rows.jsonl"), ("eval_data", "held.jsonl")):
        old = Path(file).read_text()
        Path(file).write_text(old.replace("say 1", "sat 1"))  # as long as before
        said = shell("train", "sft.yaml", "--resume", code=2)
        assert said.startswith(
            f"error: {key}: {file} has changed ({len(old)} bytes, now {len(old)}) since this run began"
        )
        assert "remove run/data.json to go on" in said and said.count("\n") == 1 and held() == before
        Path(file).write_text(old)
    shell("train", "sft.yaml", "--resume")
    shell("train", "sft.yaml", "out=whole")
    assert "identical" in shell("diff", "run", "whole")
    Path("rows.jsonl").write_text(rows(5))
    assert "rows.jsonl has changed" in shell("train", "sft.yaml", "--resume", "steps=3", code=2)
    note = f"note: data: rows.jsonl has changed ({len(rows(4))} bytes, now {len(rows(5))}) since the run began"
    assert note in " ".join(shell("verify", "run").split())
    Path("run/data.json").unlink()  # told so
    shell("train", "sft.yaml", "--resume", "steps=3")
    assert json.loads(Path("run/data.json").read_text())["data"]["size"] == len(rows(5))


def test_a_file_may_be_mended_until_something_was_learnt_from_it(shell):
    Path("rows.jsonl").write_text(rows(3) + '{"prompt": "x"}\n')
    assert "rows.jsonl:4" in shell("train", "sft.yaml", code=2) and not Path("run/recipe.yaml").exists()
    Path("rows.jsonl").write_text(rows(4))
    shell("train", "sft.yaml", "steps=1")
    for p in sorted(Path("run/checkpoints").rglob("*"), reverse=True):  # as if it had been killed before its end
        p.unlink() if p.is_file() else p.rmdir()
    Path("rows.jsonl").write_text(rows(5))
    shell("train", "sft.yaml", "--resume")
    assert json.loads(Path("run/data.json").read_text())["data"]["size"] == len(rows(5))


def test_prompts_are_called_data_as_the_person_wrote_it(shell):
    Path("my_file.py").write_text("def score(answer):\n    return float(len(answer))\n")
    Path("pg.yaml").write_text(yaml.safe_dump({
        "method": "policy_gradient", "data": "rows.jsonl", "reward": "my_file.py:score", "out": "run", "steps": 1,
        "prompts_per_step": 2, "n": 2, "model": TINY, "sampling": {"max_tokens": 4}, "engine": {"max_num_seqs": 4,
        "max_len": 64},
        "objective": {"kind": "weighted_logp"},
    }))  # fmt: skip
    shell("train", "pg.yaml")
    Path("rows.jsonl").write_text(rows(6))
    assert "error: data: rows.jsonl has changed" in shell("train", "pg.yaml", "--resume", "steps=2", code=2)


def test_the_function_of_a_seat_is_a_file_too(shell, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "rollout")
    Path("advised.py").write_text(
        "from trailmark.methods.policy_gradient import PolicyGradientMethod\n\n\n"
        "async def speak(desk):\n    while not desk.over:\n        hint = await desk.ask('adviser', text='hint: ')\n"
        "        await desk.act((await desk.ask('actor', text=hint.text + '.')).text)\n\n\n"
        "class Advised(PolicyGradientMethod):\n    @classmethod\n"
        "    def protocol(cls, config, source):\n        return speak\n"
    )
    monkeypatch.syspath_prepend(Path.cwd())
    sys.modules.pop("advised", None)
    Path("words.py").write_text("def answer(prompt, draw):\n    return 'yes'\n")
    Path("two.yaml").write_text(yaml.safe_dump({
        "method": "advised:Advised", "task": {"name": "rollout_talk:Talk"}, "steps": 1, "prompts_per_step": 2, "n": 2,
        "credit": "returns", "out": "run", "objective": {"kind": "weighted_logp"}, "sampling": {"max_tokens": 4},
        "engine": {"max_num_seqs": 4, "max_len": 128}, "model": TINY,
        "seats": {"adviser": {"kind": "local", "trained": True},
                  "actor": {"kind": "scripted", "function": "words.py:answer"}},
    }))  # fmt: skip
    shell("train", "two.yaml")
    before = held()
    Path("words.py").write_text("def answer(prompt, draw):\n    return 'no'\n")
    said = shell("train", "two.yaml", "--resume", "steps=2", code=2)
    assert "error: seats.actor.function: words.py has changed" in said and held() == before


def test_which_keys_name_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("games").mkdir()
    Path("games/a.json").write_text("{}")
    task = {
        "name": "mine:Make",
        "options": {"games": "games", "mode": "x" * 5000, "n": 3, "reward": {"kind": "function", "path": "x.py:f"}},
    }
    seat = {"kind": "scripted", "function": "json.decoder:JSONDecoder"}
    raw = {
        "method": "policy_gradient",
        "task": task,
        "seats": {"it": {"kind": "local", "trained": True}, "guest": seat},
    }
    found = known_files(named_files(resolve(raw, PolicyGradientRecipe)))
    assert {k: v["path"] for k, v in found.items()} == {
        "task.options.games": "games", "seats.guest.function": json.decoder.__file__,
    }  # fmt: skip
    assert found["task.options.games"]["files"] == 1 and found["task.options.games"]["size"] == 2
    assert "seats.guest.function" not in named_files(resolve(raw, PolicyGradientRecipe), ("seats",))


def test_folders_and_pipes(tmp_path, monkeypatch):
    folder = tmp_path / "games"
    folder.mkdir()
    (folder / "a").write_text("12")
    mark = lambda: known_files({"games": folder})["games"]["sha256"]
    first = mark()
    (folder / "a").write_text("21")
    assert mark() != first
    monkeypatch.setattr(data_files, "WHOLE", 1)  # too large to be read whole: names and sizes
    second = mark()
    (folder / "a").write_text("12")
    assert mark() == second
    (folder / "a").rename(folder / "b")
    assert mark() != second
    os.mkfifo(tmp_path / "pipe")  # nobody writes: opening it would wait for ever
    assert known_files({"data": tmp_path / "pipe", "gone": tmp_path / "gone"}) == {}


def test_a_run_refuses_a_pipe_before_it_opens_it(shell):
    """Nobody writes here: opening the pipe would wait for ever."""
    os.mkfifo("pipe")
    for words in (["train"], ["train", "--dry-run"], ["plan"]):
        said = shell(words[0], "sft.yaml", "eval_data=pipe", *words[1:], code=2)
        assert "pipe: key 'eval_data': is a pipe, which can be read only once" in said
    assert not Path("run").exists()


def test_a_stage_is_made_again_where_a_file_of_its_recipe_has_changed(shell):
    config = lambda: resolve({**SFT, "steps": 1}, SftRecipe)
    said = []
    stage = lambda: training_stage("policy", config(), Path.cwd())
    run_stages("pipe", [stage()], said.append)
    weights = Path("pipe/policy/checkpoints/000001/policy/model.safetensors").read_bytes()
    run_stages("pipe", [stage()], said.append)
    assert said == []
    Path("rows.jsonl").write_text(rows(4, "tell"))
    run_stages("pipe", [stage()], said.append)
    assert said == [
        "stage 'policy' is made again: the file of key 'data' has changed. What was there lies in "
        "pipe/replaced/policy-1"
    ]
    assert Path("pipe/policy/checkpoints/000001/policy/model.safetensors").read_bytes() != weights


def test_a_damaged_note_says_what_to_do(shell):
    shell("train", "sft.yaml", "steps=1")
    for text in ("{", "[1]", '{"data": 3}'):
        Path("run/data.json").write_text(text)
        said = shell("train", "sft.yaml", "--resume", code=2)
        assert said.startswith("error: run/data.json cannot be used (") and "remove it and go on" in said
