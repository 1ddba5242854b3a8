"""The versions of the reference implementation (the table in docs/lpr.md) against pairs that were worked out by hand,
and every mixture of switches against plain loops.

    id       a     x     b     y      c     z        a, b, c are right
    reward   0.9   0.5   0.3   0.95   0.6   0.2
"""

import random

import pytest

from trailmark.methods.lpr.config import LprPairs
from trailmark.methods.lpr.pairs import (
    Answer,
    Chosen,
    best,
    chosen_right,
    counts,
    distinct,
    question_pairs,
    some_of,
    step_pairs,
)

REWARDS = {"a": 0.9, "x": 0.5, "b": 0.3, "y": 0.95, "c": 0.6, "z": 0.2}
TABLE = [Answer(name, name in "abc", reward, 3) for name, reward in REWARDS.items()]
HARD = "ay ax az cy cx cz"  # the two best right ones, in the order in which they were written; the hardest wrong first


def said(pairs):
    return " ".join(p.chosen.id + p.rejected.id for p in pairs)


@pytest.mark.parametrize(
    ("version", "switches", "wanted"),
    [
        ("vanilla", {"process": False}, "ax ay az bx by bz cx cy cz"),
        ("1.1", {"best_of": 2, "max_wrong": 3, "right_pairs": "none"}, HARD),
        ("1.2", {"best_of": 2}, f"{HARD} ab"),
        ("2.2.1", {"best_of": 2, "right_pairs": "before"}, f"ab {HARD}"),
        ("2.2 positives only", {"right_pairs": "only"}, "ab"),
        ("one above the others", {"best_of": 1, "margin": 0.25}, "ay ax az ab ac"),
    ],
)  # fmt: skip
def test_versions(version, switches, wanted):
    assert said(question_pairs("q", TABLE, LprPairs(**switches))) == wanted, version


def plainly(answers, s):
    """The pairs again, by loops that know nothing of the other code."""
    right = [a for a in answers if a.right and a.reward is not None]
    wrong = [a for a in answers if not a.right and a.reward is not None]
    top = list(right)
    while s.best_of is not None and len(top) > s.best_of:  # leave out the worst; of equals the last
        worst = top[0]
        for a in top:
            if a.reward <= worst.reward:
                worst = a
        top.remove(worst)
    ranked = []
    for c in top:
        for r in right:
            if c is not r and c.reward - r.reward > s.margin:
                ranked.append(c.id + r.id)
    left, rejected = list(wrong), []
    while left and (s.max_wrong is None or len(rejected) < s.max_wrong):
        hardest = left[0]
        for a in left:
            if a.reward > hardest.reward:
                hardest = a
        left.remove(hardest)
        rejected.append(hardest)
    outcome = []
    for c in top:
        outcome += [c.id + r.id for r in rejected]
    ranked = ranked * s.up_sampling
    made = {"after": outcome + ranked, "before": ranked + outcome, "only": ranked, "none": outcome}[s.right_pairs]
    return made


def test_every_mixture_of_switches_is_that_of_plain_loops():
    rng, tried = random.Random(0), 0
    for _ in range(32):
        for side in ("after", "before", "only", "none"):
            rewards = [rng.choice([None, 0.1, 0.2, 0.4, 0.4, 0.8]) for _ in range(8)]
            answers = [Answer("abcdefgh"[i], rng.random() < 0.6, r) for i, r in enumerate(rewards)]
            limits = {"best_of": rng.choice([None, 1, 2]), "max_wrong": rng.choice([None, 1, 2])}
            s = LprPairs(right_pairs=side, margin=rng.choice([0.0, 0.15, 0.3]),
                         up_sampling=rng.choice([1, 2]), **limits)  # fmt: skip
            assert said(question_pairs("q", answers, s)).split() == plainly(answers, s)
            tried += bool(plainly(answers, s))
    assert tried > 80


def test_the_order_of_writing_decides_the_order_of_pairs_alone():
    """Without equal rewards the same pairs are made, whatever the order; a shift of all rewards moves nothing."""
    s = LprPairs(best_of=2, max_wrong=2, margin=0.25)
    base = sorted(said(question_pairs("q", TABLE, s)).split())
    assert base == ["ab", "ac", "ax", "ay", "cb", "cx", "cy"]
    for seed in range(5):
        mixed = random.Random(seed).sample(TABLE, len(TABLE))
        assert sorted(said(question_pairs("q", mixed, s)).split()) == base
    moved = [Answer(a.id, a.right, a.reward - 7, a.steps) for a in TABLE]
    assert sorted(said(question_pairs("q", moved, s)).split()) == base


def test_who_is_best():
    same = [Answer("a", True, 0.5), Answer("b", True, 0.7), Answer("c", True, 0.5), Answer("d", True, 0.7)]
    assert [a.id for a in best(same, None)] == ["b", "d", "a", "c"] and [a.id for a in best(same, 3)] == ["b", "d", "a"]
    assert [a.id for a in chosen_right(same, LprPairs(best_of=3))] == ["a", "b", "d"]


def test_a_line_says_only_what_there_is():
    whole = Chosen(Answer("a", True), Answer("b", False, 0.0), "outcome")
    assert whole.line() == {"chosen": "a", "rejected": "b", "kind": "outcome", "rejected_reward": 0.0}
    given = Chosen(Answer("a", True, start=2, end=5), Answer("b", False, start=2, end=0), "step").line()
    assert given == {"chosen": "a", "rejected": "b", "kind": "step", "chosen_prefix": 2, "chosen_end": 5,
                     "rejected_prefix": 2, "rejected_end": 0}  # fmt: skip


def test_some_pairs_in_their_order():
    made = question_pairs("q", TABLE, LprPairs(process=False))
    assert some_of(made, None, random.Random(0)) == some_of(made, 9, random.Random(0)) == made
    assert some_of(made, 0, random.Random(0)) == []
    few = some_of(made, 4, random.Random(0))
    places = [made.index(p) for p in few]
    assert len(few) == 4 and places == sorted(set(places)) and few == some_of(made, 4, random.Random(0))


def test_counts_of_kinds():
    made = question_pairs("q", TABLE, LprPairs(best_of=2, up_sampling=3))
    assert len(made) == 9 and distinct(made) == 7
    told = counts([*made, *step_pairs(TABLE[:2], None)], {"q": TABLE, "p": [Answer("u", True)]})
    assert told == {"pairs": 10, "distinct pairs": 8, "outcome pairs": 6, "process pairs": 3, "step pairs": 1,
                    "questions": 2, "unscored answers": 1}  # fmt: skip
    assert counts([], {}) == {"pairs": 0, "distinct pairs": 0, "questions": 0, "unscored answers": 0}
