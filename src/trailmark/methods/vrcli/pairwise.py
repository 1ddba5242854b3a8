"""Pairwise judgements of texts: who was preferred, how often, and how strong each system is.

A file is CSV, one comparison a row: a column for each dimension that holds the winner's name or `same`, `options` with
the two names, and columns of True and False that mark subsets (genres). People and judges write the same file.

    preference   wins / (wins + losses): ties are left out. For two systems this is Bradley and Terry's fit
    win rate     wins / (wins + ties + losses)
    strengths    Bradley and Terry's model over all pairs at once, P(A beats B) = s_A / (s_A + s_B), summing to 100
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trailmark.errors import DataError
from trailmark.plain_files import read_unpacked
from trailmark.stats.distributions import incomplete_beta
from trailmark.stats.intervals import Interval, wilson

SAME = "same"
KEYS = ("options", "texts")  # columns that are neither a dimension nor a subset
PRIOR = 0.5  # votes added to each ordered pair where a fit would not be finite


@dataclass(frozen=True)
class Comparison:
    """One row: two systems, the winner in each dimension ("" for a tie), and the subsets that it belongs to."""

    options: tuple[str, str]
    winners: Mapping[str, str]
    subsets: frozenset[str]


@dataclass(frozen=True)
class Score:
    """How often `first` won against `second`."""

    first: str
    second: str
    wins: int
    losses: int
    ties: int

    @property
    def preference(self) -> Interval:
        n = self.wins + self.losses
        return _share(self.wins, n)

    @property
    def win_rate(self) -> Interval:
        return _share(self.wins, self.wins + self.losses + self.ties)

    @property
    def p(self) -> float:
        """The two-sided sign test: how likely so uneven a split is if both were equally good."""
        n, few = self.wins + self.losses, min(self.wins, self.losses)
        return min(1.0, 2 * sum(math.comb(n, k) for k in range(few + 1)) / 2**n) if n else 1.0


def _share(wins: int, n: int) -> Interval:
    if not n:
        return Interval(math.nan, None, None, 0, "wilson")
    low, high = wilson(wins, n)
    return Interval(wins / n, float(low), float(high), n, "wilson")


def read_comparisons(path: Path) -> list[Comparison]:
    """Read a file of judgements. A row that does not fit is refused with its line."""
    rows = list(_rows(path))
    if not rows:
        raise DataError("holds no comparison", path)
    header = [name for name in rows[0][1] if name not in KEYS]
    flags = [name for name in header if all(row[name] in ("True", "False") for _, row in rows)]
    dimensions = [name for name in header if name not in flags]
    if "options" not in rows[0][1] or not dimensions:
        raise DataError("is no file of judgements: it needs a column 'options' and one column for each dimension", path)
    out = []
    for line, row in rows:
        names = tuple(sorted(part.strip() for part in (row["options"] or "").split(",")))
        if len(names) != 2 or names[0] == names[1] or not all(names):
            raise DataError(f"options must name two systems, such as 'base,rl', and is '{row['options']}'", path, line)
        winners = {}
        for name in dimensions:
            won = (row[name] or "").strip()
            if won != SAME and won not in names:
                raise DataError(f"{name} is '{won}', and must be {names[0]}, {names[1]} or {SAME}", path, line)
            winners[name] = "" if won == SAME else won
        out.append(Comparison(names, winners, frozenset(f for f in flags if row[f] == "True")))  # type: ignore[arg-type]
    return out


def _rows(path: Path) -> Iterable[tuple[int, dict[str, str]]]:
    try:
        text = read_unpacked(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(f"cannot be read: {problem}", path) from problem
    reader = csv.DictReader(io.StringIO(text), strict=True)
    try:
        for row in reader:
            if None in row or None in row.values():
                raise DataError(f"has {len(reader.fieldnames or ())} columns in its first line, and not here", path,
                                reader.line_num)  # fmt: skip
            yield reader.line_num, row
    except csv.Error as problem:
        raise DataError(f"is no CSV: {problem}", path, reader.line_num) from problem


def systems(comparisons: Sequence[Comparison]) -> list[str]:
    return sorted({name for c in comparisons for name in c.options})


def dimensions_of(comparisons: Sequence[Comparison]) -> list[str]:
    return list(comparisons[0].winners) if comparisons else []


def subsets_of(comparisons: Sequence[Comparison]) -> list[str]:
    return sorted({s for c in comparisons for s in c.subsets})


def score(
    comparisons: Sequence[Comparison], first: str, second: str, dimension: str, subset: str | None = None
) -> Score:
    """Wins, losses and ties of `first` against `second`."""
    pair = tuple(sorted((first, second)))
    won = [c.winners[dimension] for c in comparisons if c.options == pair and (subset is None or subset in c.subsets)]
    return Score(first, second, won.count(first), won.count(second), won.count(""))


def wins_table(comparisons: Sequence[Comparison], dimension: str, names: Sequence[str]) -> np.ndarray:
    """[i, j]: how often i beat j."""
    at = {name: k for k, name in enumerate(names)}
    table = np.zeros((len(names), len(names)))
    for c in comparisons:
        if (winner := c.winners[dimension]) and winner in c.options:
            loser = c.options[0] if winner == c.options[1] else c.options[1]
            table[at[winner], at[loser]] += 1
    return table


def finite(table: np.ndarray) -> bool:
    """Whether Bradley and Terry's fit exists: from every system a chain of wins leads to every other."""
    reach = (table > 0) | np.eye(len(table), dtype=bool)
    for _ in range(len(table)):
        reach = (reach.astype(int) @ reach.astype(int)) > 0
    return bool(reach.all())


def strengths(
    table: np.ndarray, prior: float | None = None, met: np.ndarray | None = None
) -> tuple[np.ndarray, float]:
    """Bradley and Terry's strengths, summing to 100, and the prior that was used: `prior` votes for each ordered pair
    that met (with a win, or as `met` says); None: 0 where the fit exists without, else half a vote. Fitted by Zermelo's
    iteration to 1e-12."""
    if prior is None:
        prior = 0.0 if finite(table) else PRIOR
    met = (table + table.T) > 0 if met is None else met
    won = table + prior * met
    games = won + won.T
    s = np.ones(len(won))
    for _ in range(100_000):
        new = won.sum(1) / np.where(met, games / (s[:, None] + s[None, :]), 0.0).sum(1)
        new = new / new.sum() * len(new)
        if np.abs(new - s).max() < 1e-12:
            break
        s = new
    return 100 * s / s.sum(), prior


def _lone(table: np.ndarray) -> bool:
    """Whether a system neither won nor lost: then only the prior, of the pairs that met, says how strong it is."""
    return bool(((table + table.T).sum(1) == 0).any())


def strengths_with_intervals(
    comparisons: Sequence[Comparison], dimension: str, prior: float | None = None, draws: int = 1000, seed: int = 0
) -> tuple[dict[str, Interval], float]:
    """Strengths with percentile intervals of a bootstrap over comparisons. If all draws give the same strength (one
    system won every time), the interval is unknown, and not of width 0."""
    names = systems(comparisons)
    whole = wins_table(comparisons, dimension, names)
    pairs = {c.options for c in comparisons}
    met = np.array([[(a, b) in pairs or (b, a) in pairs for b in names] for a in names])
    values, used = strengths(whole, prior or None if _lone(whole) else prior, met if _lone(whole) else None)
    draw = np.random.default_rng(seed)
    drawn = []
    for _ in range(draws):
        some = [comparisons[k] for k in draw.integers(0, len(comparisons), len(comparisons))]
        table = wins_table(some, dimension, names)
        votes = used if finite(table) or used else PRIOR
        drawn.append(strengths(table, votes, met if _lone(table) else None)[0])
    low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
    known = np.ptp(drawn, axis=0) > 1e-9
    ends = [(float(a), float(b)) if ok else (None, None) for a, b, ok in zip(low, high, known)]
    size = len(comparisons)
    return {n: Interval(float(v), *e, size, "bootstrap") for n, v, e in zip(names, values, ends)}, used


# --- automatic metrics --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Metrics:
    """Values by (system, metric). `doubled` names those whose rows stand in the file twice; each was taken once."""

    values: Mapping[tuple[str, str], np.ndarray]
    doubled: tuple[tuple[str, str], ...]


def read_metrics(path: Path) -> Metrics:
    """A CSV of key (the system), cat (the metric) and val. Rows that are there twice would make tests too sure."""
    found: dict[tuple[str, str], list[float]] = {}
    for line, row in _rows(path):
        if not {"key", "cat", "val"} <= row.keys():
            raise DataError("is no file of metrics: it needs the columns key, cat and val", path)
        try:
            found.setdefault((row["key"], row["cat"]), []).append(float(row["val"]))
        except ValueError:
            raise DataError(f"val is '{row['val']}', and must be a number", path, line) from None
    if not found:
        raise DataError("holds no metric", path)
    values, doubled = {}, []
    for key, each in found.items():
        half = len(each) // 2
        twice = len(each) % 2 == 0 and half > 1 and each[:half] == each[half:]
        doubled += [key] * twice
        values[key] = np.array(each[:half] if twice else each)
    return Metrics(values, tuple(doubled))


def anova(groups: Sequence[np.ndarray]) -> tuple[float, float]:
    """One-way analysis of variance: F, and the probability of one so large if all means were equal."""
    sizes, everything = [len(g) for g in groups], np.concatenate(groups)
    between = sum(n * (g.mean() - everything.mean()) ** 2 for n, g in zip(sizes, groups)) / (len(groups) - 1)
    df = len(everything) - len(groups)
    within = sum(((g - g.mean()) ** 2).sum() for g in groups) / df
    if within == 0:
        return (math.inf, 0.0) if between > 0 else (0.0, 1.0)
    f = float(between / within)
    top = len(groups) - 1
    return f, incomplete_beta(df / 2, top / 2, df / (df + top * f))
