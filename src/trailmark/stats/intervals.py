"""Numbers with intervals: proportions, means, paired and unpaired differences. Pure functions over numpy arrays.

    proportion    Wilson; with several episodes of one start, Wilson at the effective sample size
    mean_of       bias-corrected, accelerated bootstrap over starts, widened for small samples
    t_interval    Student's t, for a handful of seeds
    paired        the mean difference over common starts; yes/no outcomes get Bonett and Price's adjusted interval
    crossed       a mean over seeds x starts, both of which were drawn
    welch         the difference between two independent small samples

Every interval is two-sided at `level`. If there is no interval (one value), its ends are None.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from trailmark.stats.distributions import normal_cdf, normal_quantile, t_quantile

LEVEL, DRAWS = 0.95, 2000
_BLOCK = 4_000_000  # most bootstrap indices held at once


@dataclass(frozen=True, slots=True)
class Interval:
    """A number, the ends of its interval, the number of independent observations, and the method."""

    value: float
    low: float | None
    high: float | None
    n: int
    method: str

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.3f} [?]"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def _around(value: float, half: float, n: int, method: str) -> Interval:
    return Interval(float(value), float(value - half), float(value + half), n, method)


def wilson(successes: ArrayLike, n: ArrayLike, z: float | None = None, level: float = LEVEL) -> tuple[Any, Any]:
    """Ends of Wilson's interval, (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n); arrays work elementwise."""
    z = normal_quantile((1 + level) / 2) if z is None else z
    size = np.asarray(n, float)
    p = np.asarray(successes, float) / size
    centre = (p + z * z / (2 * size)) / (1 + z * z / size)
    half = z * np.sqrt(p * (1 - p) / size + z * z / (4 * size * size)) / (1 + z * z / size)
    # At the very ends, rounding must not leave p itself outside.
    return np.clip(np.minimum(centre - half, p), 0, 1), np.clip(np.maximum(centre + half, p), 0, 1)


def _clusters(values: np.ndarray, groups: Sequence[Hashable] | None) -> tuple[np.ndarray, np.ndarray]:
    """The sum and size of each group, in the order in which the groups first appear."""
    if groups is None:
        return values, np.ones(len(values))
    if len(groups) != len(values):
        raise ValueError(f"{len(groups)} groups for {len(values)} values")
    number: dict[Hashable, int] = {}
    index = np.array([number.setdefault(g, len(number)) for g in groups], int)
    return np.bincount(index, values, len(number)), np.bincount(index, minlength=len(number)).astype(float)


def proportion(wins: ArrayLike, groups: Sequence[Hashable] | None = None, level: float = LEVEL) -> Interval:
    """The share of wins. Episodes of one group are not independent. So n is the effective sample size (the number of
    independent episodes with the same spread), and z becomes t over the groups. If all won or all lost, n is the number
    of groups."""
    values = np.asarray(wins, float)
    n, p = len(values), float(values.mean())
    sums, sizes = _clusters(values, groups)
    g = len(sums)
    if g == n:
        low, high = wilson(values.sum(), n, level=level)
        return Interval(p, float(low), float(high), n, "wilson")
    if g == 1:
        return Interval(p, None, None, 1, "wilson, clustered")
    spread = g / (g - 1) * float(((sums - p * sizes) ** 2).sum()) / n**2
    size = float(min(n, max(1.0, p * (1 - p) / spread))) if spread > 0 and 0 < p < 1 else float(g)
    low, high = wilson(p * size, size, t_quantile((1 + level) / 2, g - 1))
    return Interval(p, float(low), float(high), g, "wilson, clustered")


def t_interval(values: ArrayLike, level: float = LEVEL) -> Interval:
    """mean ± t sd / sqrt(n)."""
    x = np.asarray(values, float)
    if len(x) < 2:
        return Interval(float(x.mean()), None, None, len(x), "t")
    half = t_quantile((1 + level) / 2, len(x) - 1) * x.std(ddof=1) / math.sqrt(len(x))
    return _around(x.mean(), half, len(x), "t")


def bootstrap(
    values: ArrayLike,
    groups: Sequence[Hashable] | None = None,
    level: float = LEVEL,
    draws: int = DRAWS,
    seed: int = 0,
) -> Interval:
    """The mean, with whole groups resampled. BCa corrects bias and skew, and uses sqrt(g/(g-1)) t instead of z;
    without that, a bootstrap of g groups is too narrow."""
    x = np.asarray(values, float)
    sums, sizes = _clusters(x, groups)
    g, mean = len(sums), float(x.mean())
    name = "bootstrap bca" + ("" if g == len(x) else ", clustered")
    if g < 2:
        return Interval(mean, None, None, g, name)
    rng = np.random.default_rng(seed)
    rows = max(1, min(draws, _BLOCK // g))
    means = np.concatenate([
        sums[i].sum(1) / sizes[i].sum(1)
        for i in (rng.integers(g, size=(min(rows, draws - at), g)) for at in range(0, draws, rows))
    ])  # fmt: skip
    left = ((sums.sum() - sums) / np.maximum(sizes.sum() - sizes, 1)).astype(float)  # the mean without each group
    off = left.mean() - left
    skew = float((off**3).sum() / (6 * (off**2).sum() ** 1.5)) if (off**2).sum() > 0 else 0.0
    share = float((means < mean).mean() + (means == mean).mean() / 2)
    bias = normal_quantile(min(max(share, 1 / (2 * draws)), 1 - 1 / (2 * draws)))
    wide = math.sqrt(g / (g - 1)) * t_quantile((1 + level) / 2, g - 1)

    def end(z: float) -> float:
        turned = 1 - skew * (bias + z)
        at = normal_cdf(bias + (bias + z) / turned) if turned > 0 else float(z > 0)
        return float(np.quantile(means, at))

    return Interval(mean, min(end(-wide), mean), max(end(wide), mean), g, name)


def mean_of(values: ArrayLike, groups: Sequence[Hashable] | None = None, level: float = LEVEL) -> Interval:
    """A mean over episodes: the bootstrap, or the value itself if all values are equal."""
    return bootstrap(values, groups, level)


def paired(
    a: ArrayLike, b: ArrayLike, groups: Sequence[Hashable] | None = None, level: float = LEVEL, seed: int = 0
) -> Interval:
    """mean(a - b) over common starts. Single yes/no outcomes: with c wins of `a` alone, d of `b` alone, p = (c+1)/(n+2)
    and q = (d+1)/(n+2), the interval is p - q ± z sqrt((p + q - (p - q)²)/(n + 2)). It is never empty."""
    x, y = np.asarray(a, float), np.asarray(b, float)
    if x.shape != y.shape:
        raise ValueError(f"pairs of different length: {x.shape} and {y.shape}")
    d, n = x - y, len(x)
    single = groups is None or len(set(groups)) == n
    if single and np.isin(x, (0, 1)).all() and np.isin(y, (0, 1)).all():
        p, q = ((d > 0).sum() + 1) / (n + 2), ((d < 0).sum() + 1) / (n + 2)
        half = normal_quantile((1 + level) / 2) * math.sqrt((p + q - (p - q) ** 2) / (n + 2))
        low, high = max(-1.0, p - q - half), min(1.0, p - q + half)
        return Interval(float(d.mean()), float(low), float(high), n, "paired proportions")
    found = bootstrap(d, groups, level, seed=seed)
    return Interval(found.value, found.low, found.high, found.n, f"paired {found.method}")


def crossed(table: ArrayLike, level: float = LEVEL) -> Interval:
    """The mean of a table seeds x starts, if both are samples. Its variance has two parts: MS_seed / ST, with S - 1
    degrees of freedom, and (MS_start - MS_rest) / ST, with T - 1. Each is widened by its own t² (Graybill and Wang's
    idea): one t for their sum is too narrow whenever few seeds happen to agree. If seeds agree exactly, as counts of
    wins may, MS_rest replaces MS_seed: plays of one seed vary, so their agreement is luck."""
    x = np.asarray(table, float)
    s, t = x.shape
    mean = float(x.mean())
    if s < 2 or t < 2:
        return t_interval(x.ravel(), level)
    rows, columns = x.mean(1), x.mean(0)
    ms_s = t * float(((rows - mean) ** 2).sum()) / (s - 1)
    ms_t = s * float(((columns - mean) ** 2).sum()) / (t - 1)
    ms_e = float(((x - rows[:, None] - columns + mean) ** 2).sum()) / ((s - 1) * (t - 1))
    p = (1 + level) / 2
    agree = ms_s <= 1e-9 * ms_e
    across = t_quantile(p, (s - 1) * (t - 1)) ** 2 * ms_e if agree else t_quantile(p, s - 1) ** 2 * ms_s
    wide = across + t_quantile(p, t - 1) ** 2 * max(0.0, ms_t - ms_e)
    return _around(mean, math.sqrt(wide / (s * t)), s * t, "t over seeds and starts")


def welch(a: ArrayLike, b: ArrayLike, level: float = LEVEL) -> Interval:
    """mean(a) - mean(b) of independent samples with different variances."""
    x, y = np.asarray(a, float), np.asarray(b, float)
    value, n = float(x.mean() - y.mean()), len(x) + len(y)
    if len(x) < 2 or len(y) < 2:
        return Interval(value, None, None, n, "welch")
    u, v = x.var(ddof=1) / len(x), y.var(ddof=1) / len(y)
    if u + v == 0:
        return Interval(value, value, value, n, "welch")
    df = (u + v) ** 2 / (u**2 / (len(x) - 1) + v**2 / (len(y) - 1))
    return _around(value, t_quantile((1 + level) / 2, float(df)) * math.sqrt(u + v), n, "welch")


def sign_test(differences: ArrayLike) -> float:
    """The two-sided probability of a split into plus and minus at least this uneven, if both were equally likely. Ties
    do not count."""
    d = np.asarray(differences, float)
    plus, n = int((d > 0).sum()), int((d != 0).sum())
    if n == 0:
        return 1.0
    tail = sum(math.comb(n, k) for k in range(min(plus, n - plus) + 1))
    return min(1.0, 2 * tail / 2**n)
