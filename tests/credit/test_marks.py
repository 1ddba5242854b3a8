"""Marks of turns and an outcome become rewards and weights: by hand, and by the rows of EPO's specification."""

import numpy as np
import pytest

from trailmark.credit.groups import leave_one_out_turns
from trailmark.credit.marks import marked_rewards, turn_weights
from trailmark.credit.returns import discounted


@pytest.mark.parametrize(
    ("turns", "marked", "outcome", "g", "w"),
    [
        (3, [], 0.7, (0.6861, 0.693, 0.7), (0.9801, 0.99, 1)),
        (3, [1], 0.7, (1.6761, 1.693, 0.7), (0.99, 1, 0.4135)),
        (3, [0], 0.1, (1.098, 0.099, 0.1), (1, 0.0902, 0.0911)),
        (3, [], 0.1, (0.098, 0.099, 0.1), (0.9801, 0.99, 1)),
        (4, [0, 1, 2, 3], 0.3, (3.9404, 2.9701, 1.99, 1), (1, 0.7538, 0.505, 0.2538)),
        (3, [], 0.0, (0, 0, 0), (0, 0, 0)),
    ],
)
def test_the_six_golden_rows(turns, marked, outcome, g, w):
    returns = discounted(marked_rewards(turns, marked, outcome), 0.99)
    np.testing.assert_allclose(returns, g, atol=6e-5)
    np.testing.assert_allclose(turn_weights([returns], "trajectory")[0], w, atol=6e-5)


def test_what_a_turn_earns():
    assert marked_rewards(3, [2], 0.4).tolist() == [0, 0, 1]  # the mark takes the place of the outcome
    assert marked_rewards(3, [2], 0.4, add=True).tolist() == [0, 0, 1.4]
    assert marked_rewards(3, [1], 0.4, add=True).tolist() == [0, 1, 0.4]
    assert marked_rewards(3, [], 0.4, first=True).tolist() == [1, 0, 0.4]
    assert marked_rewards(1, [], 0.4, first=True).tolist() == [0.4]  # the first turn is the last one
    assert marked_rewards(2, [0], -3.0, first=True).tolist() == [1, -3]
    assert discounted([1, 2, 4], 0).tolist() == [1, 2, 4] and discounted([1, 2, 4], 1).tolist() == [7, 6, 4]
    for turns, marked, outcome, why in (
        (0, [], 1.0, "without turns"), (2, [2], 1.0, "turn 2 is marked, and the turns are 0 to 1"),
        (2, [-1], 1.0, "turn -1"), (2, [], float("nan"), "the outcome is nan"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=why):
            marked_rewards(turns, marked, outcome)


def test_normalisers_by_hand():
    low, high = [0.0, 0.1], [0.5, 1.0, 0.7]
    assert [w.tolist() for w in turn_weights([low, high], "trajectory")] == [[0, 1], [0.5, 1, 0.7]]
    assert [w.tolist() for w in turn_weights([low, high], "dataset")] == [[0, 0.1], [0.5, 1, 0.7]]
    same = turn_weights([low, high], "group", ["g", "g"])
    np.testing.assert_allclose(same[0], [-0.5, -0.4])
    np.testing.assert_allclose(same[1], [0.5, 1.0, 0.7])
    np.testing.assert_allclose(turn_weights([low, high], "baseline", baseline=0.2)[0], [-0.2, -0.1])
    np.testing.assert_allclose(turn_weights([low, high], "baseline")[0], same[0])
    turns = turn_weights([low, high], "turns", ["g", "g"])
    np.testing.assert_allclose(turns[0], [-0.5, -0.9])
    np.testing.assert_allclose(turns[1], [0.5, 0.9, 0.7])  # the other one had stopped: 0
    assert [w.tolist() for w in turn_weights([[0.0], [0.0, 0.0]], "dataset")] == [[0], [0, 0]]
    three = turn_weights([[1.0], [2.0], [6.0]], "group", ["a", "a", "a"])
    np.testing.assert_allclose([w[0] for w in three], [-3, -1.5, 4.5])


def test_what_cannot_be_normalised_is_refused():
    for kind in ("group", "turns"):
        with pytest.raises(ValueError, match="group 'b' has one trajectory"):
            turn_weights([[1.0], [1.0], [2.0]], kind, ["a", "a", "b"])
    with pytest.raises(ValueError, match="2 trajectories, but 1 groups"):
        turn_weights([[1.0], [1.0]], "group", ["a"])
    with pytest.raises(ValueError, match="trajectory 0 has no turn"):
        turn_weights([[], [1.0]], "trajectory")


def test_turns_of_groups_are_compared_apart():
    a = leave_one_out_turns([[1.0, 2.0], [5.0], [3.0], [7.0, 8.0]], ["x", "y", "x", "y"])
    assert [x.tolist() for x in a] == [[-2, 2], [-2], [2], [2, 8]]
    assert leave_one_out_turns([[5.0, 1.0]], ["alone"])[0].tolist() == [0, 0]
    with pytest.raises(ValueError, match="1 plays, but 2 groups"):
        leave_one_out_turns([[1.0]], ["a", "b"])
