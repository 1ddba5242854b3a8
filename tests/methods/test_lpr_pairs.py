"""LPR's pairs against tables that were worked out by hand.

Right answers a to d, wrong ones w to z, in the order in which they were written:

    id       a     w     b     x     c     d     y     z
    reward   0.2   0.6   0.9   0.1   0.4   0.9   0.8   -
    steps    3     2     5     4     2     6     1     3
"""


import pytest

from trailmark.methods.lpr.config import LprPairs
from trailmark.methods.lpr.pairs import Answer, counts, distinct, question_pairs, state_pairs, step_pairs

TABLE = [
    Answer("a", True, 0.2, 3),
    Answer("w", False, 0.6, 2),
    Answer("b", True, 0.9, 5),
    Answer("x", False, 0.1, 4),
    Answer("c", True, 0.4, 2),
    Answer("d", True, 0.9, 6),
    Answer("y", False, 0.8, 1),
    Answer("z", False, None, 3),
]


def names(question="q", barred=(), answers=TABLE, **switches):
    return " ".join(
        p.chosen.id + p.rejected.id for p in question_pairs(question, answers, LprPairs(**switches), barred)
    )


OUTCOME = "aw ax ay az bw bx by bz cw cx cy cz dw dx dy dz"
HARD = "ay aw ax by bw bx cy cw cx dy dw dx"  # y 0.8, w 0.6, x 0.1; z has no score


@pytest.mark.parametrize(
    ("switches", "wanted"),
    [
        ({"process": False}, OUTCOME),  # every right one with every wrong one, scores or not
        ({"right_pairs": "none"}, HARD),
        ({}, f"{HARD} ba da"),  # 0.9 - 0.2 > 0.5; 0.9 - 0.4 = 0.5 is not more than 0.5
        ({"margin": 0.4999}, f"{HARD} ba bc da dc"),
        ({"margin": 0.7}, HARD),  # 0.9 - 0.2 = 0.7 is not more than 0.7
        ({"margin": 0.19}, f"{HARD} ba bc ca da dc"),
        ({"right_pairs": "before"}, f"ba da {HARD}"),
        ({"right_pairs": "only"}, "ba da"),
        ({"right_pairs": "only", "up_sampling": 3}, "ba da ba da ba da"),
        ({"up_sampling": 2}, f"{HARD} ba da ba da"),
        ({"best_of": 1}, "by bw bx ba"),  # of b and d, which are equal, the first
        ({"best_of": 2, "max_wrong": 1}, "by dy ba da"),
        ({"best_of": 3, "max_wrong": 2, "margin": 0.0}, "by bw cy cw dy dw ba bc ca da dc"),
        ({"min_right_steps": 4}, "by bw bx dy dw dx"),  # a and c are too short on either side
        ({"min_right_steps": 3, "best_of": 2}, "by bw bx dy dw dx ba da"),
        ({"min_wrong_steps": 2, "max_wrong": 1}, "aw bw cw dw ba da"),  # y is too short, so w is the hardest
        ({"process": False, "min_wrong_steps": 4, "min_right_steps": 5}, "bx dx"),
        ({"barred": ["q"]}, HARD),
        ({"barred": ["p"]}, f"{HARD} ba da"),
    ],
)
def test_every_switch(switches, wanted):
    barred = switches.pop("barred", ())
    assert names(barred=barred, **switches) == wanted


def test_right_answers_without_a_wrong_one():
    right = [a for a in TABLE if a.right]
    assert names(answers=right) == "ba da"
    assert names(answers=[]) == ""


def test_fewer_pairs_with_a_larger_margin():
    sizes = [len(names(margin=s, right_pairs="only").split()) for s in (0.0, 0.1, 0.3, 0.5, 0.6, 0.8)]
    assert sizes == sorted(sizes, reverse=True) == [5, 5, 4, 2, 2, 0]


def test_distinct_pairs_in_distinct_pairs_out():
    made = question_pairs("q", TABLE, LprPairs(margin=0.19))
    assert len(made) == distinct(made) == 17
    assert all(p.chosen.id != p.rejected.id for p in made)
    found = counts(made, {"q": TABLE})
    assert found == {
        "pairs": 17,
        "distinct pairs": 17,
        "outcome pairs": 12,
        "process pairs": 5,
        "questions": 1,
        "unscored answers": 1,
    }


def test_states_and_steps():
    states = [
        Answer("a", True, 0.9, end=3),
        Answer("a", True, 0.8, end=7),
        Answer("b", False, 0.3, end=4),
        Answer("b", False),
    ]
    (one, two) = state_pairs(states, 10, 0.4)
    assert one.line() == {
        "chosen": "a",
        "rejected": "b",
        "kind": "state",
        "chosen_end": 3,
        "chosen_reward": 0.9,
        "rejected_end": 4,
        "rejected_reward": 0.3,
    }
    assert two.chosen.end == 7 and [p.chosen.end for p in state_pairs(states, 1, 0.4)] == [3]
    assert [(p.chosen.end, p.rejected.end) for p in state_pairs(states[:2], 10, 0.05)] == [(3, 7)]  # of one answer
    ways = [Answer("s/0", True, 0.6, end=2), Answer("s/1", False, 0.9, end=3), Answer("s/2", False, 0.1, end=2)]
    assert [p.chosen.id + p.rejected.id for p in step_pairs(ways, None)] == ["s/0s/1", "s/0s/2"]
    shares = {"s/0": 0.5, "s/1": 1.0, "s/2": 0.5}  # several wrote the step of s/0, and half of them are right
    assert [p.chosen.id + p.rejected.id for p in step_pairs(ways, None, shares)] == ["s/1s/0", "s/1s/2"]
    assert [p.chosen.id + p.rejected.id for p in step_pairs(ways, 0.45)] == ["s/0s/2", "s/1s/2"]
