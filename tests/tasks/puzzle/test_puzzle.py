"""Order puzzles: what is true in them is checked against all orders, and exact values against all solutions."""

import json
import random
import re
from itertools import permutations
from pathlib import Path

import pytest

from trailmark.data import gold
from trailmark.engines.scripted import ScriptedEngine
from trailmark.errors import TaskError
from trailmark.evaluate.run import evaluate, value_of
from trailmark.models.tiny import tiny_tokenizer
from trailmark.rollout.branch import Point, branch_starts
from trailmark.rollout.play import Seat, play, play_all
from trailmark.run_async import wait
from trailmark.steps import mark_steps, react_steps, split_steps
from trailmark.tasks import get_task
from trailmark.tasks.check import check_task
from trailmark.tasks.logic import STRICT, clean
from trailmark.tasks.puzzle import (
    Puzzle,
    Walker,
    careless,
    exact_soundness,
    exact_value,
    make_puzzle,
    player,
    puzzle_of,
    read_lines,
    read_puzzle,
    true_step_values,
)
from trailmark.tasks.puzzle.orders import LEVELS, written

TEXT = "mq gm gC km mu qB hq hA im iD\nk?\n"
HAND = read_puzzle(TEXT)[0]


def test_a_puzzle_by_hand():
    assert HAND.start == "k" and HAND.options == tuple("ABCD") and HAND.label == 1 and HAND.text == TEXT
    assert HAND.path == ("k", "m", "q", "B") and HAND.after["k"] == frozenset("mqBu")
    truth = lambda text, **more: true_step_values(HAND, text, **more)
    assert truth("km\nmq\nqB\nFinish[B]") == ((1, 1, 1, 1), 1.0)
    assert truth("km\nmu\nmq\nqB\nFinish[B]") == ((1, 1, 1, 1, 1), 1.0)  # a detour
    assert truth("km\nmg\ngm\nmq\nqB\nFinish[B]") == ((1, 0, 1, 1, 1, 1), 5 / 6)  # right, by a wrong step
    assert truth("km\nmq\nqB\nFinish[C]") == ((1, 1, 1, 0), 0.75)  # wrong, after right steps
    assert truth("km\nmg\ngC\nFinish[C]") == ((1, 0, 1, 0), 0.5)
    assert truth("Finish[B]") == ((1,), 1.0) and truth("Finish[B]", direct=True) == ((0,), 0.0)  # a guess
    assert truth("kB\nFinish[B]") == ((1, 1), 1.0) and truth("kB\nFinish[B]", direct=True) == ((0, 0), 0.0)
    assert truth("km\nmq\nqB\nFinish[B]", direct=True).mean == 1.0
    assert truth("mB\nkm\nkB\nFinish[B]", direct=True) == ((1, 1, 1, 1), 1.0)
    assert truth("km\nqB\nFinish[B]", direct=True) == ((1, 1, 0), 2 / 3)  # the lines do not meet
    assert truth("qm\nhello\nkz\nkk\nFinish[X]\nFinish[A or B]") == ((0,) * 6, 0.0)
    assert truth("") == ((), None) and truth("\n\n") == ((), None)


def orders(puzzle):
    """Every order of the items in which all clues hold."""
    items = sorted({x for pair in puzzle.clues for x in pair})
    for order in permutations(items):
        at = {x: k for k, x in enumerate(order)}
        if all(at[a] < at[b] for a, b in puzzle.clues):
            yield at


@pytest.mark.parametrize("seed", range(2))
def test_sound_is_what_holds_in_every_order(seed):
    puzzle = make_puzzle(random.Random(seed), 1)
    known, items = list(orders(puzzle)), sorted(puzzle.after)
    assert len(known) > 1
    for a in items:
        for b in items:
            assert puzzle.entails(a, b) == all(at[a] < at[b] for at in known)
    right = [k for k, x in enumerate(puzzle.options) if all(at[puzzle.start] < at[x] for at in known)]
    assert right == [puzzle.label]


def test_puzzles_of_every_level():
    for level, (length, ups) in LEVELS.items():
        for seed in range(20):
            puzzle = make_puzzle(random.Random(seed), level)
            assert len(puzzle.path) == length + 1 and len(puzzle.clues) == length + ups + 6
            assert read_puzzle(puzzle.text + "km\n") == (puzzle, "km\n")
            assert sum(puzzle.entails(puzzle.start, x) for x in puzzle.options) == 1
            way = Walker().draw(puzzle, random.Random(0))
            assert len(way) == length + 1 and true_step_values(puzzle, "\n".join(way), direct=True).mean == 1.0
    with pytest.raises(TaskError, match="no order puzzle"):
        read_puzzle("km")
    with pytest.raises(TaskError, match="2 options come after 'k'"):
        _ = Puzzle("k", (("k", "A"), ("k", "B"), ("C", "k"))).label


def all_solutions(puzzle, policy, lines=()):
    """Every whole solution with its probability, one after the other."""
    if lines and lines[-1].startswith("Finish"):
        yield lines, 1.0
        return
    found = policy.next(puzzle, lines)
    assert sum(found.values()) == pytest.approx(1) and min(found.values()) > 0
    for line, p in found.items():
        for whole, q in all_solutions(puzzle, policy, (*lines, line)):
            yield whole, p * q


RATES = {"errors": 0.2, "detours": 0.15, "leaps": 0.05, "slips": 0.05}


@pytest.mark.parametrize(
    "begun", [[], ["km"], ["km", "mg"], ["km", "mg", "gC"], ["kq"], ["km", "mu"], ["nonsense"]]
)
def test_exact_values_are_sums_over_all_solutions(begun):
    policy = Walker(**RATES, free=4)
    made = list(all_solutions(HAND, policy, tuple(begun)))
    assert sum(p for _, p in made) == pytest.approx(1)
    right = sum(p for lines, p in made if lines[-1] == "Finish[B]")
    assert exact_value(HAND, begun, policy) == (pytest.approx(right, abs=1e-12), 0.0)
    low, unseen = exact_value(HAND, begun, policy, floor=0.02)
    assert low <= right + 1e-12 and right <= low + unseen + 1e-12 and (unseen > 0 or low == pytest.approx(right))
    short = sum(p for lines, p in made if lines[-1] == "Finish[B]" and len(lines) <= 5)
    assert exact_value(HAND, begun, policy, most=5)[0] == pytest.approx(short)
    sound = sum(p for line, p in policy.next(HAND, begun).items()
                if true_step_values(HAND, line).steps == (1.0,))  # fmt: skip
    assert exact_soundness(HAND, begun, policy) == pytest.approx(sound)


def test_values_by_hand():
    policy = Walker(errors=0.2, slips=0.1, free=2)
    # From the second line on nothing goes wrong any more: only the slip is left, and at g the way is a coin.
    assert exact_value(HAND, ["km", "mq"], policy)[0] == pytest.approx(0.9)
    assert exact_value(HAND, ["km", "mg"], policy)[0] == pytest.approx((0.9 + 0.1 / 3) / 2)
    assert exact_value(HAND, ["km", "mg", "gC"], policy)[0] == pytest.approx(0.1 / 3)
    assert exact_value(HAND, ["km"], policy)[0] == pytest.approx(0.8 * 0.9 + 0.2 * (0.9 + 0.1 / 3) / 2)
    # At k the wrong step is free too: to g, h or i, then (the second line) back to the chain or to a wrong option.
    astray = (exact_value(HAND, ["kg"], policy)[0] + exact_value(HAND, ["kh"], policy)[0]
              + exact_value(HAND, ["ki"], policy)[0]) / 3  # fmt: skip
    assert exact_value(HAND, ["kh"], policy)[0] == pytest.approx((0.9 + 0.1 / 3) / 2)
    assert exact_value(HAND, [], policy)[0] == pytest.approx(0.8 * exact_value(HAND, ["km"], policy)[0] + 0.2 * astray)
    assert exact_value(HAND, ["Finish[B]"], policy)[0] == 1 and exact_value(HAND, ["Finish[A]"], policy)[0] == 0
    for wrong in ({"errors": 1.2}, {"errors": 0.6, "leaps": 0.6}, {"free": -1}):
        with pytest.raises(TaskError, match="a walker needs rates"):
            Walker(**wrong)


@pytest.mark.parametrize("form", ["short", "react"])
def test_forms_say_the_same(form):
    source = get_task("puzzle", level=[2, 3], form=form, **RATES)
    plain = get_task("puzzle", level=[2, 3], **RATES)
    world = source.make()
    for task, other in zip(source.tasks("train", 40, 1), plain.tasks("train", 40, 1)):
        text, prompt = task.meta["gold"], world.reset(task).text
        step = world.step(text)
        lines = other.meta["gold"].split("\n")
        assert read_lines(text, form) == lines and written(lines, form) == text
        assert source.true_step_values(task, text) == plain.true_step_values(other, other.meta["gold"])
        assert step.info["sound"] == source.true_step_values(task, text).mean
        assert (step.reward == 1) == (lines[-1] == f"Finish[{'ABCD'[task.data['label']]}]")
        cut = split_steps(text) if form == "short" else react_steps(text, prompt)
        assert len(cut) == len(lines)  # a value for every step that is cut
        if form == "react":
            assert clean(text, STRICT).text == text.strip()
    assert check_task(source).ok, check_task(source)


def test_draws_and_splits():
    source = get_task("puzzle", level=1)
    parts = {s: {t.data["puzzle"] for t in source.tasks(s, 60, 5)} for s in ("train", "val", "test")}
    assert all(len(p) == 60 for p in parts.values()) and len(set().union(*parts.values())) == 180
    assert source.tasks("val", 5, 1) == source.tasks("val", 5, 1) != source.tasks("val", 5, 2)
    for options, says in (({"level": 9}, "levels 1 to 5"), ({"form": "long"}, "no form"), ({"slips": 2}, "rates")):
        with pytest.raises(TaskError, match=says):
            get_task("puzzle", **options)
    with pytest.raises(TaskError, match="no split"):
        source.tasks("dev", 1)


def test_completions_from_states_come_to_the_exact_values():
    source, tokenizer = get_task("puzzle", level=2, form="short"), tiny_tokenizer()
    seat = Seat("policy", ScriptedEngine(player(**RATES), tokenizer), max_tokens=200)
    episodes = play(source, source.tasks("train", 6, 0), [seat], seed=3)
    episodes = [mark_steps(e, "policy", tokenizer, "newline") for e in episodes]
    points = [Point(e, 0, e.turns[0].steps[1][1]) for e in episodes if len(e.turns[0].steps) > 3]
    k = 150
    made = wait(play_all(source, branch_starts(points, k, 7), [seat]))
    for n, point in enumerate(points):
        mine = made[n * k : (n + 1) * k]
        begun = tokenizer.decode(point.episode.turns[0].tokens[: point.token])
        exact = source.true_value(point.episode.task, begun, Walker(**RATES))
        mean = sum(e.outcome.reward for e in mine) / k
        assert all(e.turns[0].text.startswith(begun) for e in mine)
        assert abs(mean - exact) <= 4 * (exact * (1 - exact) / k) ** 0.5 + 1e-9
    assert len(points) >= 3, [e.turns[0].text for e in episodes]


def test_a_state_in_react_goes_on_with_the_next_number():
    said = player("react")(TEXT + "Thought 1: km\nThought 2: mq", random.Random(0))
    assert said == "\nThought 3: qB\nAction 4: Finish[The answer is B.]"
    assert player("react")(TEXT + "Thought 1:", random.Random(0)).startswith(" km\nThought 2: mq\n")
    assert careless(TEXT + "km\n", random.Random(1)).split("\n")[-1].startswith("Finish[")


def test_evaluation_has_the_mean_true_value(tmp_path):
    source = get_task("puzzle", level=2)
    seat = Seat("policy", ScriptedEngine(careless, tiny_tokenizer()), max_tokens=200)
    report = evaluate(source, [seat], split="test", n=50)
    means = [source.true_step_values(e.task, e.turns[0].text).mean for e in report.episodes]
    assert report.row["metrics"]["sound"]["value"] == pytest.approx(sum(means) / 50)
    assert [value_of(e, "sound") for e in report.episodes] == means
    arith = get_task("arith")
    other = evaluate(arith, [Seat("policy", ScriptedEngine(lambda p, d: "#### 1", tiny_tokenizer()))], n=3)
    assert "sound" not in other.row["metrics"] and value_of(other.episodes[0], "sound") is None
    assert gold.make("puzzle", tmp_path / "g.jsonl", {"level": 2}, 3, "train", 0) == 3
    rows = [json.loads(line) for line in (tmp_path / "g.jsonl").read_text().splitlines()]
    assert [r["prompt"] for r in rows] == [puzzle_of(t).text for t in source.tasks("train", 3, 0)]


def test_the_example_of_the_docs(capsys):
    page = (Path(__file__).parents[3] / "docs" / "logic.md").read_text()
    code, printed = re.search(r"```python\n(.*?)```\n```\n(.*?)```", page, re.S).groups()
    exec(compile(code, "docs/logic.md", "exec"), {})
    assert capsys.readouterr().out == printed
    for level, (length, ups) in LEVELS.items():
        assert f"| {level} | {length} | {ups} | {length + ups + 7} |" in page
