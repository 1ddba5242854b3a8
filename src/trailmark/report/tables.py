"""Metrics as curves and evaluation files as rows of a table."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from trailmark.evaluate.run import FailedAs, successes, warning
from trailmark.samples import scored
from trailmark.stats.intervals import proportion
from trailmark.types import Episode, Scored

POINTS = 2000  # most points of a curve; longer ones are averaged in equal pieces
FIRST = ("reward", "success", "nll", "loss", "kl", "entropy", "grad_norm")


def curves(metrics: Sequence[Mapping[str, Any]], timings: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
    """One panel per metric: {name, train: [[step, value]], eval: [[step, value]]}. `eval/x` is on the panel of x."""
    panels: dict[str, dict[str, Any]] = {}
    for prefix, rows in (("", metrics), ("time/", timings)):
        for row in rows:
            for key, value in row.items():
                if key == "step" or not isinstance(value, int | float) or isinstance(value, bool):
                    continue
                if abs(value) > sys.float_info.max:  # a whole number that no float can hold
                    continue
                name = prefix + key.removeprefix("eval/")
                panel = panels.setdefault(name, {"name": name, "train": [], "eval": []})
                panel["eval" if key.startswith("eval/") else "train"].append([row["step"], value])
    for panel in panels.values():
        panel["train"], panel["eval"] = _thin(panel["train"]), _thin(panel["eval"])
    return sorted(panels.values(), key=lambda p: _rank(p["name"]))


def _rank(name: str) -> tuple[int, str]:
    last = name.split("/")[-1]
    place = next((i for i, first in enumerate(FIRST) if last == first or last.startswith(first + "_")), len(FIRST))
    return (place + 100 if name.startswith("time/") else place, name)


def _thin(points: list[list[float]]) -> list[list[float]]:
    if len(points) <= POINTS:
        return points
    size = math.ceil(len(points) / POINTS)
    chunks = [points[i : i + size] for i in range(0, len(points), size)]
    return [[c[-1][0], _mean([v for _, v in c])] for c in chunks]


def _mean(values: Sequence[float]) -> float:
    """Also of numbers whose sum is larger than a float."""
    mean = sum(values) / len(values)
    return mean if math.isfinite(mean) else sum(v / len(values) for v in values)


def evaluation_row(name: str, episodes: Sequence[Episode], failed: FailedAs = "apart") -> dict[str, Any]:
    """Summary of one file of episodes: success with its 95 % interval, reward, length, and what could not be
    counted."""
    good, dropped = scored(episodes)
    outcomes = [e.outcome for e in good if isinstance(e.outcome, Scored)]
    row: dict[str, Any] = {"name": name, "episodes": len(episodes), **dropped, "failed_as": failed}
    if found := successes(episodes, None, failed):
        starts, wins = zip(*found)
        share = proportion(wins, starts)
        row |= {"wins": int(sum(wins)), "n": len(wins), "success": share.value, "low": share.low, "high": share.high}
    if warned := warning(episodes, row):
        row["warning"] = warned
    if outcomes:
        row["reward"] = _mean([o.reward for o in outcomes])
        row["turns"] = sum(len(e.turns) for e in good) / len(good)
        row["tokens"] = sum(len(t.tokens) for e in good for t in e.turns) / len(good)
    return row
