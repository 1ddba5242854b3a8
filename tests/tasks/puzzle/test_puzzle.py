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
from trailmark.rollout.play import Seat, play, play_starts
from trailmark.steps import mark_steps, react_steps, split_steps
from trailmark.tasks import get_task
from trailmark.tasks.check import check_task
from trailmark.tasks.logic.clean import STRICT, clean
from trailmark.tasks.puzzle.orders import (
    LEVELS,
    Puzzle,
    make_puzzle,
    read_lines,
    read_puzzle,
    true_step_values,
    written,
)
from trailmark.tasks.puzzle.policies import Walker, careless, exact_value, player
from trailmark.tasks.puzzle.source import puzzle_of

TEXT = "ab. bfa cD. dC. ebc fBd\ne?\n"
HAND = read_puzzle(TEXT)[0]


def test_a_puzzle_by_hand():
    assert HAND.start == "e" and HAND.options == tuple("ABCD") and HAND.label == 1 and HAND.text == TEXT
    assert HAND.path == ("e", "b", "f", "B") and HAND.after["e"] == frozenset("bfB")
    assert HAND.clues == tuple(tuple(pair) for pair in ("ab", "bf", "cD", "dC", "eb", "ce", "fB", "df"))
    truth = lambda text, **more: true_step_values(HAND, text, **more)
    assert truth("eb\nbf\nfB\nFinish[B]") == ((1, 1, 1, 1), 1.0)
    assert truth("eb\nba\nab\nbf\nfB\nFinish[B]") == ((1, 0, 1, 1, 1, 1), 5 / 6)  # right, by a wrong step
    assert truth("eb\nbf\nfB\nFinish[C]") == ((1, 1, 1, 0), 0.75)  # wrong, after right steps
    assert truth("ec\ncD\nFinish[D]") == ((0, 1, 0), 1 / 3)
    assert truth("Finish[B]") == ((1,), 1.0) and truth("Finish[B]", direct=True) == ((0,), 0.0)  # a guess
    assert truth("eB\nFinish[B]") == ((1, 1), 1.0) and truth("eB\nFinish[B]", direct=True) == ((0, 0), 0.0)
    assert truth("eb\nbf\nfB\nFinish[B]", direct=True).mean == 1.0
    assert truth("bB\neb\neB\nFinish[B]", direct=True) == ((1, 1, 1, 1), 1.0)
    assert truth("eb\nfB\nFinish[B]", direct=True) == ((1, 1, 0), 2 / 3)  # the lines do not meet
    assert truth("be\nhello\nez\nee\nFinish[X]\nFinish[A or B]") == ((0,) * 6, 0.0)
    assert truth("") == ((), None) and truth("\n\n") == ((), None)


def orders(puzzle):
    """Every order of the items in which all clues hold."""
    items = sorted({x for pair in puzzle.clues for x in pair} | set(puzzle.options))
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
    for level, length in LEVELS.items():
        for seed in range(20):
            puzzle = make_puzzle(random.Random(seed), level)
            assert len(puzzle.path) == length + 1 and len(puzzle.entries) == 2 * length
            assert read_puzzle(puzzle.text + "eb\n") == (puzzle, "eb\n")
            assert sum(puzzle.entails(puzzle.start, x) for x in puzzle.options) == 1
            way = Walker().draw(puzzle, random.Random(0))
            assert len(way) == length + 1 and true_step_values(puzzle, "\n".join(way), direct=True).mean == 1.0
    with pytest.raises(TaskError, match="no order puzzle"):
        read_puzzle("eb")
    with pytest.raises(TaskError, match="item 'c' has no clues of its own"):
        read_puzzle("abc bA.\na?\n")
    with pytest.raises(TaskError, match="2 options come after 'a'"):
        _ = Puzzle("a", ("aA.", "bBa", "cC.")).label


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


RATES = {"errors": 0.3, "leaps": 0.05, "slips": 0.05}


@pytest.mark.parametrize(
    "begun", [[], ["eb"], ["eb", "ba"], ["ec"], ["ec", "cD"], ["ef"], ["nonsense"]]
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


def test_values_by_hand():
    policy = Walker(errors=0.2, slips=0.1, free=2)
    # From the second line on only the slip is left. From a the way leads back, from c to D.
    assert exact_value(HAND, ["eb", "bf"], policy)[0] == pytest.approx(0.9)
    assert exact_value(HAND, ["eb", "ba"], policy)[0] == pytest.approx(0.9)
    assert exact_value(HAND, ["eb", "bf", "fd"], policy)[0] == pytest.approx(0.1 / 3)
    assert exact_value(HAND, ["ec"], policy)[0] == pytest.approx(0.1 / 3)
    assert exact_value(HAND, ["eb"], policy)[0] == pytest.approx(0.9)
    assert exact_value(HAND, [], policy)[0] == pytest.approx(0.8 * 0.9 + 0.2 * 0.1 / 3)
    free = Walker(errors=0.2, slips=0.1, free=3)  # one more line: at f the wrong step leads to C
    assert exact_value(HAND, ["eb", "bf"], free)[0] == pytest.approx(0.8 * 0.9 + 0.2 * 0.1 / 3)
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


def test_draws_and_splits(monkeypatch):
    source = get_task("puzzle", level=1)
    parts = {s: {t.data["puzzle"] for t in source.tasks(s, 60, 5)} for s in ("train", "val", "test")}
    assert all(len(p) == 60 for p in parts.values()) and len(set().union(*parts.values())) == 180
    assert source.tasks("val", 5, 1) == source.tasks("val", 5, 1) != source.tasks("val", 5, 2)
    for options, says in (({"level": 9}, "levels 1 to 5"), ({"form": "long"}, "no form"), ({"slips": 2}, "rates")):
        with pytest.raises(TaskError, match=says):
            get_task("puzzle", **options)
    with pytest.raises(TaskError, match="no split"):
        source.tasks("dev", 1)
    monkeypatch.setattr("trailmark.tasks.puzzle.source.make_puzzle", lambda rng, level: HAND)
    with pytest.raises(TaskError, match="hardly more than [01] different puzzles"):
        source.tasks("train", 2)


def test_completions_from_states_come_to_the_exact_values():
    source, tokenizer = get_task("puzzle", level=2, form="short"), tiny_tokenizer()
    seat = Seat("policy", ScriptedEngine(player(**RATES), tokenizer), max_tokens=200)
    episodes = play(source, source.tasks("train", 6, 0), [seat], seed=3)
    episodes = [mark_steps(e, "policy", tokenizer, "newline") for e in episodes]
    points = [Point(e, 0, e.turns[0].steps[1][1]) for e in episodes if len(e.turns[0].steps) > 3]
    k = 150
    made = play_starts(source, branch_starts(points, k, 7), [seat])
    for n, point in enumerate(points):
        mine = made[n * k : (n + 1) * k]
        begun = tokenizer.decode(point.episode.turns[0].tokens[: point.token])
        exact = source.true_value(point.episode.task, begun, Walker(**RATES))
        mean = sum(e.outcome.reward for e in mine) / k
        assert all(e.turns[0].text.startswith(begun) for e in mine)
        assert abs(mean - exact) <= 4 * (exact * (1 - exact) / k) ** 0.5 + 1e-9
    assert len(points) >= 3, [e.turns[0].text for e in episodes]


def test_a_state_in_react_goes_on_with_the_next_number():
    said = player("react")(TEXT + "Thought 1: eb\nThought 2: bf", random.Random(0))
    assert said == "\nThought 3: fB\nAction 4: Finish[The answer is B.]"
    assert player("react")(TEXT + "Thought 1:", random.Random(0)).startswith(" eb\nThought 2: bf\n")
    assert careless(TEXT + "eb\n", random.Random(1)).split("\n")[-1].startswith("Finish[")


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
    for level, length in LEVELS.items():
        assert f"| {level} | {length} | {2 * length} |" in page
