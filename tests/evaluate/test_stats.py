"""Intervals: hand values, an independent implementation, and coverage on simulated data whose truth is known."""

import math

import numpy as np
import pytest
from scipy import special, stats

from trailmark.stats.distributions import incomplete_beta, normal_quantile, t_cdf, t_quantile
from trailmark.stats.intervals import (
    Interval,
    bootstrap,
    crossed,
    paired,
    proportion,
    sign_test,
    t_interval,
    welch,
    wilson,
)


def covers(found: list[Interval], truth: float) -> float:
    return float(np.mean([i.low <= truth <= i.high for i in found]))


def test_quantiles_equal_scipy():
    for df in (1, 2, 2.7, 9, 300.5, 1e6):
        for p in (0.025, 0.4, 0.9, 0.975, 0.9995):
            assert t_quantile(p, df) == pytest.approx(stats.t.ppf(p, df), rel=1e-8)
            assert t_cdf(t_quantile(p, df), df) == pytest.approx(p, abs=1e-8)
    for a, b, x in ((0.5, 0.5, 0.3), (2, 7, 0.9), (150, 0.5, 0.99), (3, 4, 0.0), (3, 4, 1.0)):
        assert incomplete_beta(a, b, x) == pytest.approx(special.betainc(a, b, x), rel=1e-12)
    assert normal_quantile(0) == -math.inf and normal_quantile(0.975) == pytest.approx(1.959963984540054)


def test_wilson_by_hand():
    # 8 of 10, z = 1.96: centre (0.8 + 0.19207) / 1.38415, half 1.96 sqrt(0.016 + 0.0096040) / 1.38415
    low, high = wilson(8, 10, z=1.96)
    centre, half = (0.8 + 3.8416 / 20) / 1.38416, 1.96 * math.sqrt(0.016 + 0.009604) / 1.38416
    assert (low, high) == (pytest.approx(centre - half), pytest.approx(centre + half))
    assert (low, high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert proportion([0] * 20).low == 0.0 and proportion([0] * 20).high == pytest.approx(0.1611, abs=1e-4)
    assert proportion([1] * 20).high == 1.0 and proportion([1]).low == pytest.approx(0.2065, abs=1e-4)
    peer = stats.binomtest(37, 120).proportion_ci(method="wilson")
    assert wilson(37, 120) == (pytest.approx(peer.low), pytest.approx(peer.high))


def test_t_and_welch_equal_scipy():
    x, y = np.array([0.2, 0.5, 0.9]), np.array([0.1, 0.0, 0.4, 0.2])
    peer = stats.ttest_1samp(x, 0).confidence_interval()
    assert (t_interval(x).low, t_interval(x).high) == (pytest.approx(peer.low), pytest.approx(peer.high))
    peer = stats.ttest_ind(x, y, equal_var=False).confidence_interval()
    assert (welch(x, y).low, welch(x, y).high) == (pytest.approx(peer.low), pytest.approx(peer.high))
    assert t_interval([3.0]) == Interval(3.0, None, None, 1, "t")
    assert welch([1, 1], [0, 0]).low == 1.0 and welch([1], [0, 1]).low is None


def test_sign_test_by_hand():
    assert sign_test([1, 2, 3, 0, 0, 5, 1]) == 2 / 32  # five plus, none minus: twice 1/32
    assert sign_test([1, 1, 1, -1]) == 2 * (1 + 4) / 16
    assert sign_test([0, 0]) == 1.0 and sign_test([1, -1]) == 1.0
    assert sign_test([1] * 12 + [-1] * 3) == pytest.approx(stats.binomtest(3, 15).pvalue)


def test_paired_by_hand():
    # 10 pairs, a alone wins 4, b alone 1: p = 5/12, q = 2/12
    a, b = [1] * 4 + [0] + [1] * 5, [0] * 4 + [1] + [1] * 5
    found = paired(a, b)
    half = 1.959963984540054 * math.sqrt((7 / 12 - (3 / 12) ** 2) / 12)
    assert found.value == pytest.approx(0.3)
    assert (found.low, found.high) == (pytest.approx(3 / 12 - half), pytest.approx(3 / 12 + half))
    nothing = paired([1] * 50, [1] * 50)
    assert nothing.value == 0 and nothing.low == -nothing.high < -0.03
    with pytest.raises(ValueError, match="different length"):
        paired([1, 2], [1])


def test_a_bootstrap_is_seeded_and_draws_groups_as_wholes():
    x = np.random.default_rng(0).exponential(size=40)
    assert bootstrap(x, seed=3) == bootstrap(x, seed=3) != bootstrap(x, seed=4)
    same = bootstrap(np.repeat(x, 5), np.repeat(np.arange(40), 5))  # five equal copies of a start add no information
    alone = bootstrap(x)
    assert (same.low, same.high) == (pytest.approx(alone.low), pytest.approx(alone.high)) and same.n == 40
    assert bootstrap([2.0, 2.0, 2.0]).low == 2.0 and bootstrap([2.0]).low is None
    assert bootstrap([1.0, 2.0], ["a", "a"]).low is None  # one start


@pytest.mark.parametrize(("n", "p"), [(30, 0.5), (50, 0.2), (100, 0.1), (300, 0.71), (300, 0.02)])
def test_wilson_covers(n, p):
    low, high = wilson(np.random.default_rng(n).binomial(n, p, 20_000), n)
    assert 0.93 <= ((low <= p) & (p <= high)).mean() <= 0.97


@pytest.mark.parametrize("shape", ["normal", "skewed", "reward"])
def test_bootstrap_and_t_cover(shape):
    rng, n, sims = np.random.default_rng(7), 60, 2000
    if shape == "normal":
        x, truth = rng.normal(2, 1, (sims, n)), 2.0
    elif shape == "skewed":
        x, truth = rng.gamma(2, 1, (sims, n)), 2.0
    else:  # success pays 1 - 0.05 a move, failure -0.5
        won, moves = rng.random((sims, n)) < 0.4, rng.integers(0, 10, (sims, n))
        x, truth = np.where(won, 1 - 0.05 * moves, -0.5), 0.4 * (1 - 0.05 * 4.5) - 0.6 * 0.5
    assert 0.93 <= covers([bootstrap(row, draws=500, seed=i) for i, row in enumerate(x)], truth) <= 0.97
    assert 0.93 <= covers([t_interval(row) for row in x], truth) <= 0.97


def test_groups_cover_where_ignoring_them_does_not():
    """40 starts of unlike difficulty, 8 episodes each: the truth is the mean over all starts there could be."""
    rng, starts, each, sims = np.random.default_rng(1), 40, 8, 2000
    chance = rng.beta(1, 2, (sims, starts, 1))
    x = (rng.random((sims, starts, each)) < chance).astype(float).reshape(sims, -1)
    groups = np.repeat(np.arange(starts), each).tolist()
    assert 0.93 <= covers([proportion(row, groups) for row in x], 1 / 3) <= 0.97
    assert 0.93 <= covers([bootstrap(row, groups, draws=500) for row in x], 1 / 3) <= 0.97
    assert covers([proportion(row) for row in x], 1 / 3) < 0.85


@pytest.mark.parametrize("n", [50, 120])
def test_paired_covers(n):
    """Outcomes that share the difficulty of their start."""
    rng, sims = np.random.default_rng(n), 2000
    hard = rng.random((3 * sims, n))
    a, b = hard + rng.random((3 * sims, n)) < 1.2, hard + rng.random((3 * sims, n)) < 1.0
    truth = (1 - 0.8**2 / 2) - 0.5
    assert 0.93 <= covers([paired(x, y) for x, y in zip(a, b)], truth) <= 0.97
    u = hard[:sims] + rng.gamma(2, 0.5, (sims, n))
    v = hard[:sims] + rng.normal(0.8, 0.5, (sims, n))
    assert 0.93 <= covers([paired(x, y) for x, y in zip(u, v)], 0.2) <= 0.97


@pytest.mark.parametrize(("seeds", "starts"), [(3, 300), (5, 60)])
@pytest.mark.parametrize("spread", [(0.3, 0.0), (0.3, 0.3), (0.0, 0.0)], ids=str)
def test_crossed_covers(seeds, starts, spread):
    """Effects of the seed and of the start, and noise: all three are drawn anew."""
    rng, sims = np.random.default_rng(seeds), 3000
    x = spread[0] * rng.normal(size=(sims, seeds, 1)) + spread[1] * rng.normal(size=(sims, 1, starts))
    x = x + rng.normal(size=(sims, seeds, starts))
    assert 0.93 <= covers([crossed(table) for table in x], 0.0) <= 0.97


@pytest.mark.parametrize(("seeds", "starts", "spread"), [(3, 300, 0.05), (3, 100, 0.0), (5, 50, 0.05)])
def test_crossed_covers_differences_of_success(seeds, starts, spread):
    """Two arms, trained anew with each seed, on the same starts of unlike difficulty."""
    rng, sims = np.random.default_rng(starts), 6000  # coverage is 95 to 96 %: enough draws to tell that from 97
    hard, truth = rng.random((sims, 1, starts)), []
    wins = []
    for skill in (0.65, 0.5):
        each = np.clip(skill + spread * rng.normal(size=(sims, seeds, 1)), 0, 1)
        wins.append((hard + rng.random((sims, seeds, starts))) / 2 < each)
        q = np.clip(skill + spread * rng.normal(size=1_000_000), 0, 1)  # the mean of two uniforms is triangular
        truth.append(np.where(q < 0.5, 2 * q * q, 1 - 2 * (1 - q) ** 2).mean())
    found = [crossed(a.astype(float) - b) for a, b in zip(*wins)]
    assert 0.93 <= covers(found, truth[0] - truth[1]) <= 0.97


def test_crossed_by_hand():
    # Two seeds that agree by chance, 4 plays of 200 that do not: the seeds alone would give no width at all.
    lucky = np.zeros((2, 100))
    lucky[0, :2] = lucky[1, 2:4] = 1
    assert crossed(lucky).low < 0.001 and t_interval(lucky.mean(1)).low == pytest.approx(0.02)
    # rows 1, 3 (mean 2), columns 1.5, 2.5: MS_seed 4, MS_start 1, MS_rest 0 with (1, 1) degrees of freedom
    found = crossed([[0.5, 1.5], [2.5, 3.5]])
    t = t_quantile(0.975, 1)
    assert found.value == 2 and found.high - 2 == pytest.approx(math.sqrt(t**2 * (4 + 1) / 4))
