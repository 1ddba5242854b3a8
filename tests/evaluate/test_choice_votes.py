"""Choices among samples against plain loops over all votes, scores and orders."""

import math
import random
from itertools import permutations, product

import pytest

from trailmark.errors import DataError
from trailmark.evaluate.choices import best_of, by_start, choose_row, steps_of, vote
from trailmark.tasks.logic.choices import chosen_option, order_row, predictions
from trailmark.types import Annotation, Episode, Invalid, Scored, Task, Turn

RULES = {
    "product": math.prod, "min": min, "sum": sum, "mean": lambda s: sum(s) / len(s), "last": lambda s: s[-1],
    "geomean": lambda s: math.prod(s) ** (1 / len(s)),
}  # fmt: skip


def play(start, k, letter, right="A", **data):
    text = f"Action 1: Finish[The answer is {letter}.]" if letter else "well"
    said = {"question": f"Q {start}", "options": ["w", "x", "y"], **data}
    turns = (Turn("policy", (1,), (2,), text=text),)
    return Episode(f"{start}:{k}", Task(start, data=said), start, turns, {"self": Scored(float(letter == right),
                                                                                         letter == right)})  # fmt: skip


def test_votes_over_all_samples_of_four():
    for letters in product(("", "A", "B"), repeat=4):
        samples = [play("s", k, letter) for k, letter in enumerate(letters)]
        said = [x for x in letters if x]
        most = max((said.count(x) for x in said), default=0)
        first = next((k for k, x in enumerate(letters) if x and said.count(x) == most), None)
        found = vote(samples)
        assert found is None if first is None else found is samples[letters.index(letters[first])]


@pytest.mark.parametrize("over", RULES)
def test_the_best_of_n_by_a_plain_loop(over):
    draw = random.Random(f"best {over}")
    for _ in range(20):
        samples = [play(start, k, draw.choice(["A", "B", ""])) for start in "st" for k in range(4)]
        steps = [[draw.randint(1, 4) / 4 for _ in range(draw.randint(0, 3))] for _ in samples]
        chosen, unscored = best_of(samples, steps, over)
        assert unscored == sum(not s for s in steps) and list(chosen) == ["s", "t"]
        for start, want in chosen.items():
            rated = [(RULES[over](s), e) for e, s in zip(samples, steps) if e.group == start and s]
            if not rated:
                assert want is None
                continue
            top = max(r for r, _ in rated)
            close = [e for r, e in rated if r == pytest.approx(top, abs=1e-12)]
            assert want in close and (over == "geomean" or want is close[0])


def test_a_row_counts_starts_of_different_sizes():
    samples = [play("s", 0, "A"), play("s", 1, "B"), play("t", 0, "B"), play("t", 1, "B"), play("t", 2, "A")]
    lost = Episode("u:0", Task("u"), "u", (), {"self": Invalid("gone")})
    row = choose_row([*samples, lost], [[0.5]] * 4 + [[0.9], [1.0]], "last", "mine")
    assert {k: v["value"] for k, v in row["metrics"].items()} == {
        "single": pytest.approx(2 / 5), "sc@2-3": 0.5, "best@2-3 (last)": 1.0, "pass@2-3": 1.0,
    }  # fmt: skip
    assert [row[k] for k in ("episodes", "scored", "invalid", "failed", "tasks")] == [6, 5, 1, 0, 2]
    assert "warning" not in row
    assert list(by_start([*samples, lost])) == ["s", "t"]


def test_step_scores_are_joined_in_the_order_of_the_turns():
    notes = [Annotation("s:0", "q", "step", (0.3,), 1, "m"), Annotation("s:0", "q", "step", (0.1, 0.2), 0, "m"),
             Annotation("s:1", "q", "episode", (9.0,), None, "m")]  # fmt: skip
    assert steps_of([play("s", 0, "A"), play("s", 1, "A")], notes, "q") == [[0.1, 0.2, 0.3], []]
    with pytest.raises(DataError, match=r"there is no annotation of steps 'z' \(found: none\)."):
        steps_of([], [], "z")


def test_a_constant_choice_agrees_in_every_order():
    """Who always takes the text x agrees with itself; who always says A agrees where A is the same option."""
    orders = ["".join(o) for o in permutations("ABC")]
    letter = {o: "ABC"[o.index("B")] for o in orders}
    plays = lambda say: {o: [play("s", 0, say(o), right=letter[o], order=o)] for o in orders}
    same = {k: v["value"] for k, v in order_row(plays(letter.get))["metrics"].items()}
    assert same == {"agreement": 1.0, "constant": 1.0, "always right": 1.0, "ever right": 1.0}
    first = {k: v["value"] for k, v in order_row(plays(lambda o: "A"))["metrics"].items()}
    # six orders, each option first in two of them: 3 of 15 pairs agree
    assert first == {"agreement": pytest.approx(3 / 15), "constant": 0.0, "always right": 0.0, "ever right": 1.0}
    blank = {k: v["value"] for k, v in order_row(plays(lambda o: ""))["metrics"].items()}
    assert blank == {"agreement": 0.0, "constant": 0.0, "always right": 0.0, "ever right": 0.0}
    for o in orders:
        assert [chosen_option(play("s", 0, x, order=o)) for x in "ABC"] == ["ABC".index(y) for y in o]
    for bad in ({}, {"a": [play("s", 0, "A")], "b": [play("t", 0, "A")]}):
        with pytest.raises(DataError, match="at least two must have played the same questions"):
            order_row(bad)


def test_predictions_do_not_depend_on_the_order_of_questions():
    samples = [play(f"s{k}", 0, "ABC"[k % 3] if k != 4 else "", row=k) for k in range(6)]
    for mixed in (samples, samples[::-1], random.Random(0).sample(samples, 6)):
        found, blank = predictions(mixed, 6)
        assert found.tolist() == [0, 1, 2, 0, 0, 2] and blank == 1
    assert chosen_option(Episode("e", Task("t"), "g", (), {})) is None
    for row in (7, -1, "2", None):
        with pytest.raises(DataError, match="task 's' has no row among the 7 of the file: a leaderboard is for logic."):
            predictions([play("s", 0, "A", row=row)], 7)
