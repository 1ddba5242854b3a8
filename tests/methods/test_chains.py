"""Runs that go on from one another are one curve; old checkpoints go, and nothing else."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.config import resolve
from trailmark.errors import DataError, RunBusy, RunError
from trailmark.methods import get_method
from trailmark.methods.reflect import chains as upkeep
from trailmark.methods.reflect import method as reflect
from trailmark.runs.checkpoints import prune_run
from trailmark.runs.launch import launch
from trailmark.runs.store import Run, read_metrics

SMALL = {
    "method": "reflect", "steps": 6, "teacher": {"prompts": 4}, "sft": {"reflector": 1, "policy": 1, "batch": 4},
    "task": {"name": "taxi", "options": {"mode": "pickup", "history": "none", "menu": False, "walls": False}},
    "rl": {"prompts_per_step": 3, "replay_batch": 2}, "thought": 24, "final": {"n": 4}, "eval": {"every": 3, "n": 5},
    "model": {"name": "tiny", "shape": {"layers": 1, "width": 16, "heads": 2, "context": 128}},
    "engine": {"max_num_seqs": 8, "max_len": 128}, "checkpoint": {"every": 2, "keep_last": 9, "keep_best": 0},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """a stage (1 step) -> first (6 steps) -> second, from its step 4 (5 steps) -> third, from the second's end (3
    steps)."""
    folder = tmp_path_factory.mktemp("chain")
    for name, steps, start in (
        ("first", 6, None),
        ("second", 5, folder / "first/checkpoints/000004"),
        ("third", 3, folder / "second"),
    ):
        more = {} if start is None else {"load": {"policy": str(start), "reflector": str(start)},
                                         "sft": {"reflector": 0, "policy": 0}}  # fmt: skip
        config = resolve({**SMALL, **more, "steps": steps, "out": str(folder / name)}, reflect.ReflectRecipe)
        launch(get_method("reflect"), config)
    return folder


def test_steps_are_counted_through(folder):
    links = upkeep.chain(folder / "third")
    assert [(x.run.name, x.offset, x.until) for x in links] == [
        ("policy", 0, 1), ("first", 1, 4), ("second", 5, 5), ("third", 10, None)]  # fmt: skip
    rows = upkeep.merged(folder / "third")
    assert [r["step"] for r in rows] == list(range(1, 14))
    assert [(r["run"], r["own_step"]) for r in rows[4:7]] == [("first", 4), ("second", 1), ("second", 2)]
    own = read_metrics(folder / "second")
    assert rows[5]["success"] == own[0]["success"] and rows[9]["reward"] == own[4]["reward"]
    assert [r["step"] for r in upkeep.merged(folder / "first")] == list(range(1, 8))


def test_the_moving_average_ignores_gaps():
    assert upkeep.smooth([1, 2, 3, 10], [0.0, 1.0, 5.0, 7.0], 3) == [0.5, 2.0, 3.0, 7.0]
    assert upkeep.smooth([1, 2], [1.0, 3.0], 1) == [1.0, 3.0]
    rows = [{"step": 1, "policy/loss": 2.0}, {"step": 2, "rl/loss": 1.0, "loss": 9.0}, {"step": 3}]
    assert upkeep.curve(rows, "loss") == ([1, 2], [2.0, 1.0])


def test_pictures_and_logs(folder, tmp_path):
    out = upkeep.draw_curves([folder / "third", folder / "first"], tmp_path / "deep" / "c.png", width=3)
    assert out.read_bytes().startswith(b"\x89PNG")
    assert upkeep.write_merged(folder / "third", tmp_path / "log.jsonl") == 13
    assert json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])["own_step"] == 3
    with pytest.raises(RunError, match="exists"):
        upkeep.write_merged(folder / "third", tmp_path / "log.jsonl")
    with pytest.raises(DataError, match="no run logged 'sucess'. Logged: "):
        upkeep.draw_curves([folder / "third"], tmp_path / "d.png", ["sucess"])
    with pytest.raises(RunError, match="is no run"):
        upkeep.chain(tmp_path)


def test_a_picture_of_no_known_kind_is_refused(folder, tmp_path):
    with pytest.raises(DataError, match="'.zzz' is no kind of picture. Known: .*pdf, .*png"):
        upkeep.draw_curves([folder / "first"], tmp_path / "x.zzz", ["reward"])


def test_a_circle_is_refused(tmp_path):
    for a, b in (("x", "y"), ("y", "x")):
        (tmp_path / a / "checkpoints" / "000001").mkdir(parents=True)
        (tmp_path / a / "checkpoints" / "000001" / "state.json").write_text("{}")
        (tmp_path / a / "recipe.yaml").write_text(f"method: sft\nmodel: {{name: {tmp_path / b}/checkpoints/000001}}\n")
    with pytest.raises(DataError, match="goes on from itself"):
        upkeep.chain(tmp_path / "x")


def test_eval_seats_every_player(folder, tmp_path):
    """`eval RUN` of two seats is the run's own evaluation; several configurations are rows of one table."""
    shell = CliRunner()
    first, second = str(folder / "first"), str(folder / "second")
    done = shell.invoke(app, ["eval", first, second, "--json", "--out", str(tmp_path / "played.jsonl")])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert [r["name"] for r in result["rows"]] == [first, second] and result["seats"] == ["policy", "reflector"]
    for run, row in zip(("first", "second"), result["rows"]):
        own = read_metrics(folder / run)[-1]
        assert row["metrics"]["success"]["value"] == own["eval/success"] and row["episodes"] == 5
        assert row["metrics"]["reward"]["value"] == pytest.approx(own["eval/reward"], abs=1e-12)
    other = json.loads(shell.invoke(app, ["eval", first, "--n", "3", "--temperature", "0", "--json"]).stdout)
    assert other["rows"][0]["episodes"] == 3
    alone = shell.invoke(app, ["eval", first, "--task", "taxi", "mode=pickup", "history=none", "--n", "2", "--json"])
    assert alone.exit_code == 0, alone.output


def test_models_of_no_run_play_the_starts_of_the_run_beside_them(folder, tmp_path):
    """`eval RUN oracle random`: the same task, options, split and stages, so the rows can be compared."""
    out = str(tmp_path / "all.jsonl")
    done = CliRunner().invoke(app, ["eval", str(folder / "first"), "oracle", "random", "--json", "--out", out])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert [r["episodes"] for r in rows] == [5, 5, 5] and rows[1]["metrics"]["success"]["value"] == 1.0
    starts = [json.loads(line)["task"]["id"] for line in Path(out).read_text().splitlines()]
    assert starts[:5] == starts[5:10] == starts[10:]
    config = resolve(
        {**SMALL, "curriculum": {"kind": "modes"}, "steps": 3, "out": str(tmp_path / "stages")}, reflect.ReflectRecipe
    )
    launch(get_method("reflect"), config)
    staged = CliRunner().invoke(app, ["eval", str(tmp_path / "stages"), "oracle", "--n", "2", "--json"])
    names = [r["name"].partition(", ")[2] for r in json.loads(staged.stdout)["rows"]]
    assert names == ["", "pickup", "dropoff", "full"] * 2
    out = tmp_path / "said.jsonl"
    said = ["eval", str(tmp_path / "stages"), "--task", "taxi", "mode=pickup", "history=none", "--n", "2", "--json"]
    done = CliRunner().invoke(app, [*said, "--out", str(out)])  # a task that is named is played as it is named
    assert done.exit_code == 0 and [r["episodes"] for r in json.loads(done.stdout)["rows"]] == [2]
    played = [json.loads(line)["task"]["data"] for line in out.read_text().splitlines()]
    assert {task["mode"] for task in played} == {"pickup"}


def test_old_checkpoints_go(folder):
    run = folder / "first"
    kept = {p.name: p.read_bytes() for p in run.iterdir() if p.is_file()}
    with Run.open(run, lock=True), pytest.raises(RunBusy):
        prune_run(run)
    assert prune_run(run, 2) > 0 and [p.name for p in sorted((run / "checkpoints").iterdir())] == [
        "000004",
        "000006",
    ]
    assert prune_run(run, 2) == 0
    assert {p.name: p.read_bytes() for p in run.iterdir() if p.is_file() and p.name != ".lock"}.items() <= kept.items()
