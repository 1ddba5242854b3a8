"""Plays of the taxi with reflections: how often actions were random, what is stored, and how it is read."""

import json
import os
import sys

import forked
import pytest
from data_fixtures import rows, teaching, tree
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.errors import DataError, RecipeError
from trailmark.methods.reflect.decisions import Decision, read_decisions, write_decisions
from trailmark.methods.reflect.lessons import Bfs, Lesson, get_teacher
from trailmark.methods.reflect.plays import Last
from trailmark.methods.reflect.taxi_guide import spoiler
from trailmark.tasks import taxi
from trailmark.tasks.taxi import Taxi


def make(out, *words):
    done = CliRunner().invoke(app, ["data", "taxi", "--out", str(out), *map(str, words)])
    assert done.exit_code == 0, done.output
    return read_decisions(out)


def test_chance_and_oracle(tmp_path):
    """500 steps and more: chance chooses nine tenths, among all six; the oracle's label is a shortest way's first
    step."""
    decisions = make(tmp_path, "--starts", "250", "--perturb", "0.9", "--fatal")
    assert len(decisions) > 500
    share = sum(d.perturbed for d in decisions) / len(decisions)
    assert abs(share - 0.9) < 0.05
    assert all(d.action == d.oracle for d in decisions if not d.perturbed)
    by_chance = [d.action for d in decisions if d.perturbed]
    assert all(abs(by_chance.count(x) / len(by_chance) - 1 / 6) < 0.06 for x in "012345")
    assert {d.oracle for d in decisions} >= set("01234") and {d.model for d in decisions} == {"offline"}


def test_every_row_replays(tmp_path):
    """The same actions in the world give the states on record; steps after a detour are not positive, and say so."""
    decisions = make(tmp_path, "--starts", "12", "--perturb", "0.4", "mode=full", "history=actions")
    source = Taxi(horizon=20, history="actions")
    starts, detours, south = {t.id: t for t in source.tasks("train", 12, 0)}, 0, 0
    world, last = source.make(), None
    for d in decisions:
        if d.step == 0:
            seen, last = world.reset(starts[d.task]), None
        assert (d.state, d.menu, d.labels) == (seen.state, seen.menu, seen.labels)
        assert d.oracle == str(taxi.optimal_action(world.state)) and d.command() == taxi.ACTIONS[int(d.action)]
        words = Bfs().reflect(world, int(d.oracle))
        assert d.positive == (last is None or last[1])
        assert d.reflection == (words if d.positive else f"{taxi.ACTIONS[last[0]]} was a detour; {words}")
        detours, south = detours + (not d.positive), south + (d.oracle == "0" and "go south" in d.reflection)
        last = int(d.action), int(d.action) in taxi.optimal_actions(world.state)
        seen = world.step(d.action).observation
    assert detours > 10 and south > 10
    for wanted in ("oracle", "behaviour"):
        got = rows(tmp_path / wanted / "sft_policy.jsonl")
        assert [r["text"][-1] for r in got] == [d.oracle if wanted == "oracle" else d.action for d in decisions]


def test_a_server_hears_the_spoiler_and_nobody_reads_it(tmp_path):
    with teaching(lambda messages: "That was fine; keep going.") as server:
        make(tmp_path, "--starts", "4", "--teacher", server.url, "--model", "m")
        asked = [body["messages"][-1]["content"] for _, _, body in server.asked]
    assert all("the best next action is " in text for text in asked)
    assert any("the best next action is south." in text for text in asked)  # action 0 is an action
    assert any("was not a best one" in text for text in asked)
    for name, data in tree(tmp_path, but=["answers.jsonl"]).items():
        assert b"spoiler" not in data.lower() and b"best next action" not in data, name
    assert {d.reflection for d in read_decisions(tmp_path)} == {"That was fine; keep going."}
    assert spoiler("0", Last("south", True)) == "the best next action is south. The last action, south, was a best one."


def test_steps_without_an_answer_are_counted(tmp_path):
    with teaching(lambda messages: "Well.") as server:
        server.faults = ["fine", 400, "fine", 400]
        words = ["--starts", "3", "--teacher", server.url, "--model", "m", "--at-once", "1", "--failures", "0.1"]
        decisions = make(tmp_path, *words)
    report = json.loads((tmp_path / "reports" / "plays.json").read_text())
    assert report["left_out"] == {"rest of a play: status 400 from the server": 2}
    assert [sum(d.task.endswith(f"-{k}") for d in decisions) for k in (0, 1)] == [1, 1]


def test_plays_are_kept_as_they_finish(tmp_path):
    """Killed in the fourth play: three are kept, only the rest is played, and the files are those of an unbroken
    command."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    make(whole, "--starts", "5")
    words = [sys.executable, "-m", "trailmark", "data", "taxi", "--out", str(killed), "--starts", "5"]
    died = forked.run(words, env={**os.environ, "TRAILMARK_KILL_AT": "play.after#3"}, capture_output=True)
    assert died.returncode == -9 and len((killed / "plays.partial.jsonl").read_text().splitlines()) == 3
    done = forked.run(
        words, env={**os.environ, "TRAILMARK_KILL_AT": "play.after#3"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr  # two were left, so there is no third
    assert tree(killed, but=[".lock"]) == tree(whole, but=[".lock"])


def test_the_method_reads_it(tmp_path):
    decisions = make(tmp_path, "--starts", "6", "--perturb", "0.5")
    teacher, world = get_teacher("file", tmp_path), Taxi(horizon=20)
    lessons = teacher.lessons(world, 99, 0.5, 0)
    d = decisions[0]
    assert len(lessons) == len(decisions)
    assert lessons[0] == Lesson(d.state, d.menu, d.reflection, d.oracle, d.action, d.labels, d.actions)
    assert len(teacher.lessons(world, 99, 0.0, 0)) == sum(d.positive for d in decisions) < len(decisions)
    three = teacher.lessons(world, 3, 1.0, 5)
    assert three == get_teacher("file", str(tmp_path / "steps.jsonl")).lessons(world, 3, 1.0, 5) and 0 < len(
        three
    ) < len(lessons)
    assert {"taxi", "goal", "passenger"} <= {w.strip() for w in teacher.words}
    with pytest.raises(RecipeError, match="needs a path"):
        get_teacher("file")
    with pytest.raises(RecipeError, match="reads no file"):
        get_teacher("bfs", tmp_path)
    with pytest.raises(RecipeError, match="Did you mean 'file'"):
        get_teacher("fil")


GOOD = Decision("t", "positive0", 0, "s", "m", ("0", "1"), ("up", "down"), "r", "1", "0", "x")


@pytest.mark.parametrize("change, said", [
    ({"action": "7"}, "key 'action': '7' is none of the listed labels"),
    ({"labels": ["0"]}, "key 'labels': are 1 for 2 actions"),
    ({"step": "0"}, "key 'step': must be a whole number"), ({"positive": 1}, "key 'positive': must be true or false"),
    ({"state": None}, "key 'state': must be text"), ({"oracle": ...}, "key 'oracle': is missing"),
])  # fmt: skip
def test_broken_files(tmp_path, change, said):
    write_decisions(tmp_path, [GOOD])
    assert read_decisions(tmp_path) == [GOOD] and GOOD.command() == "down" and GOOD.command("oracle") == "up"
    row = {**rows(tmp_path / "steps.jsonl")[0], **change}
    (tmp_path / "steps.jsonl").write_text(json.dumps({k: v for k, v in row.items() if v is not ...}) + "\n")
    with pytest.raises(DataError, match=rf"steps.jsonl:1: {said}"):
        read_decisions(tmp_path)


def test_nothing_to_write(tmp_path):
    with pytest.raises(DataError, match="no positive step"):
        write_decisions(tmp_path, [])
    with pytest.raises(DataError, match="cannot be read"):
        read_decisions(tmp_path / "gone")
    bad = CliRunner().invoke(app, ["data", "taxi", "--out", str(tmp_path / "x"), "mode=fly"])
    assert bad.exit_code == 2 and "no mode 'fly'" in bad.stderr


def test_gold(tmp_path):
    words = ["data", "gold", "arith", str(tmp_path / "a.jsonl"), "level=1", "--n", "5"]
    assert CliRunner().invoke(app, words).output.endswith("a.jsonl: 5 rows\n")
    assert all(set(r) == {"prompt", "response"} for r in rows(tmp_path / "a.jsonl"))
    assert "exists" in CliRunner().invoke(app, words).stderr
    words = ["data", "gold", "taxi", str(tmp_path / "t.jsonl")]
    assert "has no gold answers" in CliRunner().invoke(app, words).stderr
