"""What steps earn, by loops over steps, and what must not change it."""

import itertools
import math
import random

import numpy as np
import pytest

from trailmark.credit.steps import against_greedy, group_steps, step_rewards


def plainly(scores, running, alpha, outcome, clip):
    out = []
    for n in range(len(scores)):
        so_far = scores[: n + 1]
        whole = {"none": scores[n], "sum": sum(so_far), "min": min(so_far), "product": math.prod(so_far)}[running]
        paid = alpha * whole if n < len(scores) - 1 or outcome is None else outcome
        out.append(paid if clip is None else max(-clip, min(clip, paid)))
    return out


def test_every_mixture_is_that_of_a_loop():
    rng = random.Random(0)
    kinds = ("none", "sum", "min", "product")
    for running, alpha, outcome, clip in itertools.product(kinds, (0.0, 0.5, 2.0), (None, -3.0, 1.0), (None, 0.7)):
        scores = [rng.uniform(-2, 2) for _ in range(rng.randint(1, 6))]
        wanted = plainly(scores, running, alpha, outcome, clip)
        assert step_rewards(scores, running, alpha, outcome, clip).tolist() == pytest.approx(wanted, abs=1e-12)


def test_the_scores_stay_as_they_were():
    scores = np.array([0.5, 0.25])
    assert step_rewards(scores, outcome=9.0).tolist() == [0.5, 9.0] and scores.tolist() == [0.5, 0.25]
    assert step_rewards([0.5, 0.25], "product", clip=0.2).tolist() == [0.2, 0.125]


def test_a_later_score_moves_no_earlier_reward():
    for running in ("none", "sum", "min", "product"):
        one, two = step_rewards([0.9, 0.5, 0.8], running), step_rewards([0.9, 0.5, 0.1], running)
        assert one[:2].tolist() == two[:2].tolist() and one[2] != two[2]


def grouped(rewards, groups, **more):
    return [r.tolist() for r in group_steps(rewards, groups, **more)]


def test_groups_are_compared_with_nobody_else():
    """Worth 0, 2 | 4 in g: mean 2, deviation 2. Worth 1 | 2 in h: mean 1.5, deviation sqrt(1/2)."""
    got = grouped([[0.0, 2.0], [1.0], [4.0], [2.0]], ["g", "h", "g", "h"])
    half = 0.5 / math.sqrt(0.5)
    assert sum(got, []) == pytest.approx([-1.0, 0.0, -half, 1.0, half], abs=1e-8)
    assert grouped([[0.0, 2.0], [4.0]], ["g", "g"]) == [got[0], got[2]]


def test_a_shift_and_a_scale_of_all_rewards_move_nothing():
    rewards = [[0.1, 0.7], [0.3], [0.9, 0.2, 0.4]]
    base = np.concatenate(grouped(rewards, "ggg"))
    for scale, shift in ((1.0, 5.0), (30.0, -2.0)):
        moved = [[scale * x + shift for x in r] for r in rewards]
        assert np.concatenate(grouped(moved, "ggg")) == pytest.approx(base, abs=1e-6)
    assert base.mean() == pytest.approx(0.0, abs=1e-12) and base.std(ddof=1) == pytest.approx(1.0, abs=1e-6)
    assert grouped(rewards[::-1], "ggg") == [pytest.approx(r) for r in grouped(rewards, "ggg")[::-1]]


def test_the_guard_and_groups_without_a_difference():
    assert grouped([[1.0], [1.0 + 5e-7]], "gg") == [[0.0], [0.0]]
    low, high = grouped([[1.0], [1.0 + 5e-7]], "gg", guard=1e-9)
    assert low[0] < -0.5 and high[0] > 0.5
    assert grouped([[3.0]], "g") == [[0.0]] and grouped([], []) == []


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: step_rewards([[1.0]]), "scores must be one vector, but has shape (1, 1)"),
        (lambda: step_rewards([1.0], "mean"), "running must be none, sum, min or product, not 'mean'"),
        (lambda: group_steps([[1.0]], ["g", "h"]), "1 plays, but 2 groups"),
        (lambda: group_steps([1.0], ["g"]), "rewards must be one vector, but has shape ()"),
        (lambda: against_greedy(1, 0, [0.0, 0.0], [0.0], [True, True], 1, 0), "ref has 1 entries, but logp has 2"),
        (lambda: against_greedy(1, 0, [0.0], [0.0], [True, True], 1, 0), "written has shape (2,), not (1,)"),
    ],
)
def test_what_is_no_input(call, why):
    with pytest.raises(ValueError) as found:
        call()
    assert str(found.value) == why


def test_remax_by_a_loop_over_written_tokens():
    rng = np.random.default_rng(0)
    for _ in range(10):
        n, gamma, coef = int(rng.integers(1, 7)), rng.uniform(0.3, 1), rng.uniform(0, 1)
        logp, ref, written = rng.normal(size=n), rng.normal(size=n), rng.random(n) < 0.6
        got = against_greedy(0.75, 0.5, logp, ref, written, gamma, coef)
        for t in range(n):
            behind = sum(bool(w) for w in written[t + 1 :])
            wanted = gamma**behind * 0.25 - coef * (logp[t] - ref[t]) if written[t] else 0.0
            assert got[t] == pytest.approx(wanted, abs=1e-12)
