"""Reflect-RL: prompts to the letter, a reflector that stays frozen, and a run that resumes to the same bytes."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.config import ModelConfig, resolve
from trailmark.engines.scripted import ScriptedEngine
from trailmark.errors import RunError
from trailmark.methods import get_method
from trailmark.methods.base import Method
from trailmark.methods.quickstart import packaged_recipe
from trailmark.methods.reflect import method
from trailmark.methods.reflect.imitation import ImitationMethod
from trailmark.methods.reflect.lessons import get_teacher
from trailmark.methods.reflect.play import Talk, two_players
from trailmark.models.load import load_model
from trailmark.models.tiny import tiny_tokenizer
from trailmark.rollout.play import Seat, play, start_all
from trailmark.runs import checkpoints
from trailmark.runs.diff import diff_runs
from trailmark.runs.launch import launch
from trailmark.runs.store import read_metrics, read_segment
from trailmark.tasks import get_task
from trailmark.tasks import taxi as world
from trailmark.types import Scored

TASK = {"name": "taxi", "options": {"mode": "pickup", "history": "none", "menu": False, "walls": False}}
SMALL = {
    "method": "reflect", "steps": 4, "task": TASK, "teacher": {"prompts": 6},
    "sft": {"reflector": 5, "policy": 5, "batch": 4},
    "rl": {"prompts_per_step": 4, "replay_batch": 2, "entropy": 0.01, "baseline": "batch"}, "reflect_prob": 0.75,
    "thought": 12,
    "model": {"name": "tiny", "shape": {"layers": 1, "width": 16, "heads": 2, "context": 128}},
    "engine": {"max_num_seqs": 32, "max_len": 128}, "checkpoint": {"every": 3, "keep_last": 2, "keep_best": 0},
}  # fmt: skip


def run(out, **more):
    config = resolve({**SMALL, "out": str(out), **more}, method.ReflectRecipe)
    launch(get_method("reflect"), config)
    return config


def test_prompts_to_the_letter():
    """state + Analyze -> reflection; state + Analyze + reflection + menu + Action -> label; the world is told the
    label."""
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
    (e,) = play(source, [task], seats, two_players(Talk(True)))
    seen = source.make().reset(task)
    assert heard[0] == seen.state + " # Analyze:\n"
    assert heard[1] == seen.state + " # Analyze:\n" + "go on " + seen.menu + " # Action:\n"
    assert e.turns[1].action == "4" and e.turns[0].action is None and isinstance(e.outcome, Scored)
    heard.clear()
    play(source, [task], seats[1:], two_players(Talk(False)))
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
    last, taught = (checkpoints.listed(tmp_path / p / "checkpoints")[-1] for p in ("run", "run/reflector"))
    assert (last / "reflector/model.safetensors").read_bytes() == (taught / "reflector/model.safetensors").read_bytes()
    state = json.loads((last / "state.json").read_text())
    assert list(state["optimiser_steps"]) == ["policy"] and state["optimiser_steps"]["policy"] >= 4
    for stage in ("reflector", "policy"):
        rows = read_metrics(tmp_path / "run" / stage)
        assert len(rows) == 5 and "nll" in rows[4]
    assert "rl/policy" in read_metrics(tmp_path / "run")[3]
    for name, version in (("reflect-sft", 0), ("reflect-rl", 4)):
        episodes = read_segment(tmp_path / "run" / "evaluation" / f"{name}.jsonl")
        assert len(episodes) == 300 and {e.players["reflector"].kind for e in episodes} == {"frozen"}
        assert {e.players["policy"].version for e in episodes} == {version}
        assert all(t.law.allowed and len(t.tokens) == 1 for e in episodes for t in e.turns if t.seat == "policy")


@pytest.fixture(scope="module", params=[True, False], ids=["reflecting", "plain"])
def whole(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return Path(run(folder / "run", reflect=request.param, final={"n": 20}).out), request.param


def same(one, two):
    assert diff_runs(one, two) == []
    for path in (one / "evaluation").iterdir():
        assert path.read_bytes() == (two / "evaluation" / path.name).read_bytes()
    for stage in one.glob("*/metrics.jsonl"):
        assert stage.read_bytes() == (two / stage.parent.name / "metrics.jsonl").read_bytes()


def test_killed_in_any_stage_it_resumes(tmp_path, whole, monkeypatch):
    one, reflect = whole
    short = resolve(
        {**SMALL, "out": str(tmp_path / "parts"), "reflect": reflect, "final": {"n": 20}}, method.ReflectRecipe
    )
    places = [(ImitationMethod, "updates", 4), (method.ReflectMethod, "final", 1), (method.ReflectMethod, "updates", 4),
              (method.ReflectMethod, "final", 1)]  # fmt: skip
    places[1:1] = [(ImitationMethod, "updates", 5)] if reflect else []  # in the policy's third step
    for home, name, call in places:
        own, calls = getattr(home, name), []

        def dies(self, *args, own=own, calls=calls, call=call):
            calls.append(1)
            if len(calls) == call:
                raise KeyboardInterrupt
            return own(self, *args)

        monkeypatch.setattr(home, name, dies)
        with pytest.raises(KeyboardInterrupt):
            launch(get_method("reflect"), short, resume=True)
        monkeypatch.undo()
    launch(get_method("reflect"), short, resume=True)
    same(one, tmp_path / "parts")


def test_another_number_of_lessons_makes_the_stage_again_and_what_follows(tmp_path, whole, capsys):
    one, reflect = whole
    shutil.copytree(one, tmp_path / "run")
    more = {"reflect": reflect, "final": {"n": 20}, "sft": {**SMALL["sft"], "policy": 6}}
    changed = resolve({**SMALL, "out": str(tmp_path / "run"), **more}, method.ReflectRecipe)
    launch(get_method("reflect"), changed, resume=True)
    said = capsys.readouterr().err
    assert "stage 'policy' is made again: key 'steps' was 5 and is 6." in said and "stage 'reflector'" not in said
    assert "the run begins again: its stage 'policy' is another one." in said
    same(Path(run(tmp_path / "fresh", **more).out), tmp_path / "run")
    old = tmp_path / "run/replaced/run-1"
    assert (old / "metrics.jsonl").read_bytes() == (one / "metrics.jsonl").read_bytes()
    assert {p.name for p in (old / "evaluation").iterdir()} == {p.name for p in (one / "evaluation").iterdir()}
    other = resolve({**SMALL, "out": str(tmp_path / "run"), **more, "thought": 13}, method.ReflectRecipe)
    with pytest.raises(RunError, match="belongs to another recipe"):
        launch(get_method("reflect"), other, resume=True)


def test_imitation_alone_has_a_checkpoint_and_can_be_gone_on_from(tmp_path):
    run(tmp_path / "first", steps=0, final={"n": 4})
    assert [p.name for p in checkpoints.listed(tmp_path / "first/checkpoints")] == ["000000"]
    assert [p.name for p in (tmp_path / "first/evaluation").iterdir()] == ["reflect-sft.jsonl"]
    for name in ("first", "first/policy", "first/reflector"):
        for words in (["verify"], ["report", "--no-plots"], ["eval", "--n", "2", "--json"]):
            done = CliRunner().invoke(app, [words[0], str(tmp_path / name), *words[1:]])
            assert done.exit_code == 0, done.output
    load = {"policy": str(tmp_path / "first"), "reflector": str(tmp_path / "first/reflector")}
    run(tmp_path / "second", load=load, sft={"reflector": 0, "policy": 0}, steps=1, final={"n": 4})
    assert not (tmp_path / "second/stages").exists()
    a, b = (
        tmp_path / p / "reflector/model.safetensors" for p in ("first/checkpoints/000000", "second/checkpoints/000001")
    )
    assert a.read_bytes() == b.read_bytes()


def test_the_quickstart_from_end_to_end(tmp_path, monkeypatch):
    """The same commands at toy size: the table, the page, one JSON line, and the same numbers from the episodes."""
    assert resolve(packaged_recipe("reflect-taxi", tmp_path, 0), method.ReflectRecipe).final.n is None  # all 300 starts
    small = lambda name, out, seed: {**SMALL, "out": str(out), "seed": seed, "final": {"n": 40}}
    monkeypatch.setattr("trailmark.methods.reflect.quickstart.packaged_recipe", small)
    monkeypatch.setattr("trailmark.report.plots._save", lambda figure, path: path)  # drawing takes a second
    # advice that is left on, off or shuffled would be played from all 300 starts
    monkeypatch.setattr(method, "start_all", lambda tasks, *how: start_all(tasks[:40], *how))
    shell = CliRunner()
    done = shell.invoke(app, ["quickstart", "--out", str(tmp_path / "q")])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert [r["name"] for r in result["rows"]][:2] == ["random", "SFT only"]
    assert [r["episodes"] for r in result["rows"]] == [300, 40, 40, 40, 40, 40, 40]
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
    """`trailmark verify` repeats every prompt of a run, new labels included; a critic's folder is a model like any
    other."""
    task = {"name": "taxi", "options": {**TASK["options"], "menu": True}}
    more = {"task": task, "shuffle": "permute", "rl": {**SMALL["rl"], "critic": {"kind": "separate", "head": critic}}}
    more |= {
        "final": {"n": 4},
        "model": {"name": "tiny", "shape": {"layers": 1, "width": 16, "heads": 2, "context": 256}},
    }
    run(tmp_path / "run", **more, engine={"max_num_seqs": 32, "max_len": 256})
    done = CliRunner().invoke(app, ["verify", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    last = checkpoints.listed(tmp_path / "run" / "checkpoints")[-1]
    assert list(load_model(ModelConfig(name=str(last / "critic"))).heads) == (["value"] if critic == "linear" else [])
    assert any(
        e.turns[1].text != e.turns[1].action for e in read_segment(tmp_path / "run" / "evaluation" / "reflect-rl.jsonl")
    )


def test_a_recipe_of_before_that_names_no_old_key_is_told_what_steps_counts(tmp_path, monkeypatch, capsys):
    """`steps` counted imitation too. No key shows this, so `train` says at once, and once, what it will do."""
    trained = []
    monkeypatch.setattr(Method, "train", classmethod(lambda cls, config, run, resume: trained.append(resume)))
    monkeypatch.setattr(method, "Players", lambda *_: None)
    config = run(tmp_path / "run", steps=14)
    said = "stages: 5 steps of the reflector, 5 steps of the policy, 14 steps of play (`steps` counts play alone)"
    assert capsys.readouterr().err.splitlines() == [said]
    launch(get_method("reflect"), config, resume=True)
    assert capsys.readouterr().err == "" and trained == [False, True]
