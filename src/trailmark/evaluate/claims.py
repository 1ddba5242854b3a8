"""Claims of a study, "a > b on success", and the interval of a difference over seeds and starts that decides them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trailmark.errors import DataError, RecipeError, nearest
from trailmark.evaluate.stored_episodes import Key
from trailmark.evaluate.stored_episodes import verdict as sign_of
from trailmark.stats.intervals import LEVEL, Interval, crossed, mean_of, paired, proportion, t_interval, welch, wilson


@dataclass(frozen=True)
class Claim:
    """`a` is above `b` (or below it) in `measure`."""

    a: str
    b: str
    measure: str
    above: bool = True
    over: str = "both"
    paired: bool = True

    def __str__(self) -> str:
        return f"{self.a} {'>' if self.above else '<'} {self.b} on {self.measure}"


@dataclass(frozen=True)
class RunMeasure:
    """One measure of one run: a number, and for episodes the number of each start."""

    value: float
    starts: dict[Key, float] | None = None
    binary: bool = False
    lost: frozenset[Key] = frozenset()  # starts that were played and have no number, for example if all plays failed
    failed: int = 0  # failed episodes, whether they count as lost or not at all

    @property
    def played(self) -> frozenset[Key]:
        return self.lost | frozenset(self.starts or ())


def parse_claim(text: str, arms: Sequence[str], measures: Sequence[str], file: str) -> list[Claim]:
    """`a > b > c on measure` claims each step. The measure may be left out if there is only one."""
    body, _, measure = text.rpartition(" on ")
    if ends := [m for m in measures if text.endswith(f" on {m}")]:  # a measure's name may contain "on"
        measure = max(ends, key=len)
        body = text[: -len(f" on {measure}")]
    if not body:
        body, measure = text, measures[0] if len(measures) == 1 else ""
    names, signs = re.split(r"\s[<>]\s", body), re.findall(r"\s([<>])\s", body)
    names = [n.strip() for n in names]
    if not signs or not measure:
        raise RecipeError(f"{file}: claim '{text}': expected 'arm > arm on measure'.")
    for kind, found, known in (("arm", names, arms), ("measure", [measure.strip()], measures)):
        for name in found:
            if name not in known:
                raise RecipeError(f"{file}: claim '{text}': there is no {kind} '{name}'.{nearest(name, known)}")
    return [Claim(a, b, measure.strip(), sign == ">") for a, sign, b in zip(names, signs, names[1:])]


def verdict(interval: Interval, seeds: int) -> str:
    """The verdict on a claim, from the interval of its difference. One seed decides nothing, whatever the interval over
    starts is: another seed is another run."""
    return "one seed" if seeds == 1 else sign_of(interval)


def _grid(rows: Sequence[dict[Key, float]], played: Sequence[frozenset[Key]]) -> np.ndarray | None:
    """Seeds x starts if every seed played the same starts (by name), without starts that any seed lost; None if each
    seed had its own starts."""
    if any({k[0] for k in p} != {k[0] for k in played[0]} for p in played):
        return None
    tables: list[dict[str, list[float]]] = []
    for row in rows:
        tables.append({})
        for key, value in row.items():
            tables[-1].setdefault(key[0], []).append(value)
    names = sorted(set.intersection(*(set(t) for t in tables)))
    return np.array([[float(np.mean(t[name])) for name in names] for t in tables]) if names else None


def arm_interval(seen: Sequence[RunMeasure]) -> Interval:
    """The interval of one arm: over seeds and starts if every seed played the same starts, else over seeds; for one
    seed, over starts."""
    starts = [s.starts for s in seen if s.starts is not None]
    if len(starts) < len(seen) or not starts:
        return t_interval([s.value for s in seen])
    if len(seen) == 1:
        names = [k[0] for k in starts[0]]
        return (proportion if seen[0].binary else mean_of)(list(starts[0].values()), names)
    grid = _grid(starts, [s.played for s in seen])
    found = t_interval([s.value for s in seen]) if grid is None else crossed(grid)
    if not all(s.binary for s in seen) or found.low is None or found.high is None:
        return found
    if found.low == found.high and found.value in (0.0, 1.0):  # all values are equal, so they give no interval
        n = len(starts[0]) if grid is None else grid.shape[1]
        low, high = wilson(found.value * n, n)
        return Interval(found.value, float(low), float(high), n, "wilson over starts")
    return Interval(found.value, max(0.0, found.low), min(1.0, found.high), found.n, found.method)


def p_value(claim: Claim, a: Sequence[RunMeasure], b: Sequence[RunMeasure], seeds: Sequence[int]) -> float:
    """The smallest error rate at which the interval of the difference leaves out 0; 1 if there is no interval."""

    def decides(rate: float) -> bool:
        return sign_of(difference(claim, a, b, seeds, 1 - rate)) != "unclear"

    low, high = 1e-6, 1 - 1e-9
    if decides(low) or not decides(high):
        return low if decides(low) else 1.0
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if decides(middle) else (middle, high)
    return high


def holm(p: Sequence[float]) -> list[float]:
    """Holm's correction: the smallest of m values times m, the next times m - 1, and so on, never falling. Claims whose
    corrected value is at most 0.05 are decided; the chance that one or more of these is an error is at most 0.05."""
    out, least = [0.0] * len(p), 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        least = max(least, min(1.0, (len(p) - rank) * p[i]))
        out[i] = least
    return out


def difference(
    claim: Claim, a: Sequence[RunMeasure], b: Sequence[RunMeasure], seeds: Sequence[int], level: float = LEVEL
) -> Interval:
    """a - b, with the sign reversed for a claim of "below". So a positive value means that the claim is true."""
    if not claim.above:
        a, b = b, a
    if not claim.paired:
        return welch([s.value for s in a], [s.value for s in b], level)
    rows: list[dict[Key, float]] = []
    for x, y, seed in zip(a, b, seeds):
        if x.starts is None or y.starts is None:
            return t_interval([p.value - q.value for p, q in zip(a, b)], level)
        if x.played != y.played:
            raise DataError(
                f"claim '{claim}', seed {seed}: the two arms were not evaluated on the same starts and seeds; evaluate "
                "them alike, or write {claim: …, paired: false}."
            )
        rows.append({k: x.starts[k] - y.starts[k] for k in x.starts if k in y.starts})
        if not rows[-1]:
            raise DataError(f"claim '{claim}', seed {seed}: no start has a number in both arms.")
    if len(rows) == 1:
        keys = sorted(rows[0])
        one, two = a[0].starts or {}, b[0].starts or {}
        return paired([one[k] for k in keys], [two[k] for k in keys], [k[0] for k in keys], level)
    grid = _grid(rows, [s.played for s in a])
    if claim.over == "starts":
        if grid is None:
            raise DataError(f"claim '{claim}': over starts, but each seed played its own starts.")
        return mean_of(grid.mean(0), level=level)
    if claim.over == "seeds" or grid is None:
        return t_interval([float(np.mean(list(r.values()))) for r in rows], level)
    found = crossed(grid, level)
    if found.low == found.high and found.value in (-1.0, 0.0, 1.0) and all(s.binary for s in (*a, *b)):
        size = grid.shape[1]  # all values are equal, so they give no interval
        return paired([max(found.value, 0.0)] * size, [max(-found.value, 0.0)] * size, level=level)
    return found
