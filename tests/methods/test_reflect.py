"""Reflect-RL: prompts to the letter, a reflector that stays frozen, and a run that resumes to the same bytes."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.config import ModelConfig, resolve
from trailmark.data.lessons import get_teacher
from trailmark.engines.scripted import ScriptedEngine
from trailmark.methods import get_method
from trailmark.methods import reflect as method
from trailmark.models.load import load_model
from trailmark.models.tiny import tiny_tokenizer
from trailmark.rollout.play import Seat, play
from trailmark.runs import checkpoints
from trailmark.runs.diff import diff_runs
from trailmark.runs.launch import launch
from trailmark.runs.store import read_metrics, read_segment
from trailmark.tasks import get_task
from trailmark.tasks import taxi as world
from trailmark.types import Scored

TASK = {"name": "taxi", "options": {"mode": "pickup", "history": "none", "menu": False, "walls": False}}
SMALL = {
    "method": "reflect", "steps": 14, "task": TASK, "teacher": {"starts": 6}, "sft": {"reflector": 5, "policy": 5, "batch": 4},
    "rl": {"starts": 4, "replay_batch": 2, "entropy": 0.01, "baseline": "batch"}, "reflect_prob": 0.75, "thought": 12,
    "model": {"name": "tiny", "shape": {"layers": 1, "width": 16, "heads": 2, "context": 128}},
    "engine": {"slots": 32, "max_len": 128}, "checkpoint": {"every": 3, "keep_last": 2, "keep_best": 0},
}  # fmt: skip


def run(out, **more):
    config = resolve({**SMALL, "out": str(out), **more}, method.ReflectRecipe)
    launch(get_method("reflect"), config)
    return config


def test_prompts_to_the_letter():
    """state + Analyze -> reflection; state + Analyze + reflection + menu + Action -> label; the world is told the label."""
    source = get_task("taxi", mode="pickup", history="none", walls=False)
    heard = []

    def player(answer):
        def say(prompt, draw):
            heard.append(prompt)
            return answer(prompt)

        return say

    tokenizer = tiny_tokenizer()
    seats = [
        Seat("reflector", ScriptedEngine(player(lambda p: "go on # Action: not this"), tokenizer), max_tokens=64),
        Seat("policy", ScriptedEngine(player(lambda p: "4"), tokenizer)),
    ]
    task = source.tasks("all")[0]
    (e,) = play(source, [task], seats, method.two_players(method.Talk(True)))
    seen = source.make().reset(task)
    assert heard[0] == seen.state + " # Analyze:\n"
    assert heard[1] == seen.state + " # Analyze:\n" + "go on " + seen.menu + " # Action:\n"
    assert e.turns[1].action == "4" and e.turns[0].action is None and isinstance(e.outcome, Scored)
    heard.clear()
    play(source, [task], seats[1:], method.two_players(method.Talk(False)))
    assert heard[0] == seen.state + seen.menu + " # Action:\n"


def test_the_teacher_knows_the_way():
    source = get_task("taxi", **TASK["options"])
    lessons = get_teacher("bfs").lessons(source, 300, 0.0, 0)
    assert len(lessons) == sum(world.optimal_length(s, "pickup") for s in world.starts())  # never a step too many
    strayed = get_teacher("bfs").lessons(source, 50, 0.9, 0)
    other = np.mean([x.action != x.oracle for x in strayed])
    assert 0.5 < other < 0.9 and all(x.reflection.endswith(world.ACTIONS[int(x.oracle)]) for x in strayed)


def test_the_reflector_stays_frozen_and_is_the_one_saved(tmp_path):
    run(tmp_path / "run")
    last = checkpoints.listed(tmp_path / "run" / "checkpoints")[-1]
    state = json.loads((last / "state.json").read_text())
    saved = load_model(ModelConfig(name=str(last / "reflector")))
    assert saved.fingerprint() == state["method"]["frozen"] != ""
    assert state["optimiser_steps"]["reflector"] == 5 and state["optimiser_steps"]["policy"] > 5
    rows = read_metrics(tmp_path / "run")
    assert "reflector/nll" in rows[4] and "policy/nll" in rows[9] and "rl/policy" in rows[13]
    for name in ("reflect-sft", "reflect-rl"):
        episodes = read_segment(tmp_path / "run" / "evaluation" / f"{name}.jsonl")
        assert len(episodes) == 300 and {e.players["reflector"].kind for e in episodes} == {"frozen"}
        assert all(t.law.allowed and len(t.tokens) == 1 for e in episodes for t in e.turns if t.seat == "policy")


@pytest.mark.parametrize("reflect", [True, False])
def test_killed_between_any_two_stages_it_resumes(tmp_path, reflect):
    whole = run(tmp_path / "whole", reflect=reflect)
    short = resolve({**SMALL, "out": str(tmp_path / "parts"), "reflect": reflect}, method.ReflectRecipe)
    own = method.ReflectMethod.updates

    for stop in (4, 8, 12):

        def dies(self, step, stop=stop):
            if step == stop:
                raise KeyboardInterrupt
            yield from own(self, step)

        method.ReflectMethod.updates = dies
        try:
            with pytest.raises(KeyboardInterrupt):
                launch(get_method("reflect"), short, resume=True)
        finally:
            method.ReflectMethod.updates = own
    launch(get_method("reflect"), short, resume=True)
    assert diff_runs(whole.out, short.out) == []
    for path in (tmp_path / "whole" / "evaluation").iterdir():
        assert path.read_bytes() == (tmp_path / "parts" / "evaluation" / path.name).read_bytes()


def test_the_quickstart_from_end_to_end(tmp_path, monkeypatch):
    """The same commands at toy size: the table, the page, one JSON line, and the same numbers from the episodes."""
    monkeypatch.setattr("trailmark.commands.quickstart._recipe", lambda file, out, seed, reflecting: {
        **SMALL, "out": str(out), "seed": seed, "reflect": reflecting, "steps": 14 if reflecting else 9})  # fmt: skip
    shell = CliRunner()
    done = shell.invoke(app, ["quickstart", "--out", str(tmp_path / "q")])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert [r["name"] for r in result["rows"]][:2] == ["random", "SFT only"] and all(
        r["episodes"] == 300 for r in result["rows"]
    )
    assert (tmp_path / "q" / "reflect" / "report.html").is_file()
    for row in result["rows"]:
        again = shell.invoke(app, ["eval", "--episodes", result["files"][row["name"]], "--json"])
        assert json.loads(again.stdout)["rows"][0]["metrics"] == row["metrics"]
    refused = shell.invoke(app, ["quickstart", "--out", str(tmp_path / "q")])
    assert refused.exit_code == 2 and "--resume" in refused.output
    assert shell.invoke(app, ["quickstart", "--method", "refect"]).exit_code == 2
    quiet = shell.invoke(app, ["quickstart", "--out", str(tmp_path / "q"), "--resume", "--json"])
    assert json.loads(quiet.stdout)["rows"] == result["rows"]


@pytest.mark.parametrize("critic", ["linear", "mlp"])
def test_a_run_with_critic_and_shuffled_labels_is_verified(tmp_path, critic):
    """`trailmark verify` repeats every prompt of a run, new labels included; a critic's folder is a model like any other."""
    task = {"name": "taxi", "options": {**TASK["options"], "menu": True}}
    more = {"task": task, "shuffle": "permute", "rl": {**SMALL["rl"], "critic": {"kind": "separate", "head": critic}}}
    more |= {
        "final": {"n": 4},
        "model": {"name": "tiny", "shape": {"layers": 1, "width": 16, "heads": 2, "context": 256}},
    }
    run(tmp_path / "run", **more, engine={"slots": 32, "max_len": 256})
    done = CliRunner().invoke(app, ["verify", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    last = checkpoints.listed(tmp_path / "run" / "checkpoints")[-1]
    assert list(load_model(ModelConfig(name=str(last / "critic"))).heads) == (["value"] if critic == "linear" else [])
    assert any(
        e.turns[1].text != e.turns[1].action for e in read_segment(tmp_path / "run" / "evaluation" / "reflect-rl.jsonl")
    )
