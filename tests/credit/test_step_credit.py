"""Rewards at the ends of steps, by hand and by brute force."""

import math

import numpy as np
import pytest

from trailmark.credit.gae import gae
from trailmark.credit.returns import discounted
from trailmark.credit.shaping import kl_shaped, place
from trailmark.credit.steps import against_greedy, group_steps, step_rewards

SCORES = [0.9, 0.5, 0.8]


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ({}, [0.9, 0.5, 0.8]),
        ({"running": "sum"}, [0.9, 1.4, 2.2]),
        ({"running": "min"}, [0.9, 0.5, 0.5]),
        ({"running": "product"}, [0.9, 0.45, 0.36]),
        ({"running": "product", "alpha": 0.5}, [0.45, 0.225, 0.18]),
        ({"running": "product", "alpha": 0.5, "outcome": 2.0}, [0.45, 0.225, 2.0]),
        ({"alpha": 10.0, "outcome": -7.0, "clip": 6.0}, [6.0, 5.0, -6.0]),
        ({"outcome": 0.0}, [0.9, 0.5, 0.0]),
    ],
)
def test_what_steps_earn(more, wanted):
    """The aggregate comes first, then alpha, then the outcome in the place of the last one, then the clip."""
    assert step_rewards(SCORES, **more).tolist() == pytest.approx(wanted, abs=1e-12)
    assert step_rewards([], **more).tolist() == []


def test_a_running_of_no_name():
    with pytest.raises(ValueError, match="none, sum, min or product"):
        step_rewards(SCORES, "last")


def test_steps_of_a_group():
    """Three plays of one start, zeros included: 1, 3, 0, 4 have mean 2 and variance 10/3 with n - 1."""
    a, b, c, other = group_steps([[1.0, 3.0], [0.0], [4.0], [5.0]], ["g", "g", "g", "h"])
    std = math.sqrt(10 / 3)
    assert [*a, *b, *c] == pytest.approx([-1 / std, 1 / std, -2 / std, 2 / std], abs=1e-8)
    assert sum([*a, *b, *c]) == pytest.approx(0.0, abs=1e-12) and other.tolist() == [0.0]
    same, none = group_steps([[0.1, 0.1], []], ["g", "g"])
    assert same.tolist() == [0.0, 0.0] and none.tolist() == []


def test_normalised_steps_have_mean_zero_and_their_sums_from_behind_do_not():
    """Steps worth 1 and 3: -r and r with r = 1 / sqrt 2. On three tokens the credit is 0, r, r."""
    (normed,) = group_steps([[1.0, 3.0]], ["g"])
    credit = discounted(place(normed, [(0, 1), (1, 3)], 3), 1.0)
    assert credit.tolist() == pytest.approx([0.0, math.sqrt(0.5), math.sqrt(0.5)], abs=1e-8)


def test_gae_of_step_rewards_is_the_sum_of_its_definition():
    """Rewards at step ends and a price of the KL on each token; A_t = sum_k (gamma lam)^k delta_{t+k}, written out."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        n, gamma, lam = int(rng.integers(2, 9)), rng.uniform(0.5, 1), rng.uniform(0, 1)
        cut = int(rng.integers(1, n))
        logp, ref, v = rng.normal(size=(3, n))
        end = float(rng.normal())
        earned = place(step_rewards(rng.normal(size=2), "sum"), [(0, cut), (cut, n)], n)
        r = kl_shaped(earned, logp, ref, np.ones(n, bool), 0.1)
        a, target = gae(r, v, gamma, lam, end)
        after = [*v[1:], end]
        delta = [r[t] + gamma * after[t] - v[t] for t in range(n)]
        brute = [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)]
        assert a.tolist() == pytest.approx(brute, abs=1e-12) and target.tolist() == pytest.approx([*(a + v)], abs=1e-12)
        whole, _ = gae(r, v, 1.0, 1.0, 0.0)  # lam = gamma = 1: the return of what was paid
        assert whole.tolist() == pytest.approx([r[t:].sum() - v[t] for t in range(n)], abs=1e-12)


def test_remax():
    """The exponent is 0 at the last written token. A reward that the greedy answer earns too gives nothing."""
    nan = math.nan
    written, logp, ref = [False, True, True, True], [nan, -1.0, -2.0, -0.5], [nan, -1.5, -1.0, -0.5]
    got = against_greedy(1.0, -1.0, logp, ref, written, 0.5, 0.1)
    assert got.tolist() == pytest.approx([0.0, 0.5 - 0.05, 1.0 + 0.1, 2.0], abs=1e-12)
    assert against_greedy(3.0, 3.0, logp, logp, written, 0.9, 0.1).tolist() == [0.0, 0.0, 0.0, 0.0]
