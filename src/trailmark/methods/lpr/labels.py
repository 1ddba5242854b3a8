"""How well a reward model tells right steps from wrong ones: on labels of people (PRMBench), on values of held-out
states, on anything that has an annotation `label`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trailmark.errors import DataError
from trailmark.stats.intervals import mean_of, proportion
from trailmark.types import Annotation, Episode


def labelled_steps(
    episodes: Sequence[Episode], notes: Sequence[Annotation], scores: Sequence[Annotation], label: str = "label"
) -> list[tuple[str, str, list[float], list[float]]]:
    """(group, episode, labels, scores) of each turn that has both, without the steps that were not judged (below 0)."""
    groups = {e.id: e.group for e in episodes}
    known = {(a.episode, a.turn or 0): a.values for a in notes if a.name == label and a.level == "step"}
    out = []
    for a in scores:
        labels = known.get((a.episode, a.turn or 0), ())
        if labels and len(labels) != len(a.values):
            raise DataError(f"episode '{a.episode}' has {len(labels)} labels for {len(a.values)} steps.")
        if both := [(x, s) for x, s in zip(labels, a.values) if x >= 0]:
            out.append((groups[a.episode], a.episode, [x for x, _ in both], [s for _, s in both]))
    return out


def step_row(found: Sequence[tuple[str, str, list[float], list[float]]], good: float, least: float) -> dict[str, Any]:
    """The row of a reward model. A step is right if its label is `good` or more, and called right if its score is
    `least` or more.

    accuracy       the share of steps that are called what they are
    right found    of right steps; `wrong found` of wrong ones; `balanced` is the mean of the two
    first error    of solutions with a wrong step: the first step that is called wrong is the first wrong one
    order          the probability that a right step has a higher score than a wrong one (ties count half)
    """
    groups = np.array([g for g, _, labels, _ in found for _ in labels])
    right = np.array([x >= good for _, _, labels, _ in found for x in labels])
    every = np.array([s for *_, scores in found for s in scores])
    if not len(right):
        raise DataError("no step has both a label and a score.")
    judged_right = every >= least
    out = {"steps": len(right), "solutions": len(found), "right steps": int(right.sum())}
    metrics = {"accuracy": proportion(judged_right == right, groups.tolist()).plain()}
    for name, side in (("right found", right), ("wrong found", ~right)):
        if side.any():
            metrics[name] = proportion((judged_right == right)[side], groups[side].tolist()).plain()
    if right.any() and not right.all():
        # A step counts by one over twice the size of its side, so that the mean is the balanced accuracy.
        weight = np.where(right, len(right) / (2 * right.sum()), len(right) / (2 * (~right).sum()))
        metrics["balanced"] = mean_of((judged_right == right) * weight, groups.tolist()).plain()
        metrics["order"] = {"value": _order(every, right), "low": None, "high": None, "n": len(right), "method": "auc"}
    first = [
        (g, _first([x >= good for x in labels]) == _first([s >= least for s in scores]))
        for g, _, labels, scores in found
        if min(labels) < good
    ]
    if first:
        metrics["first error"] = proportion([hit for _, hit in first], [g for g, _ in first]).plain()
    return {**out, "metrics": metrics}


def step_curve(
    scores: Sequence[tuple[bool, Sequence[float]]], most: int | None = None
) -> list[dict[str, float | int | None]]:
    """What a reward model says along solutions, which are (right, the scores of the steps). For each number of a step:
    the mean score of right and of wrong solutions, and the means of the product and of the sum up to there."""
    rows = []
    longest = max((len(s) for _, s in scores), default=0)
    for n in range(1, min(longest, most or longest) + 1):
        row: dict[str, float | int | None] = {"step": n}
        for name, side in (("right", True), ("wrong", False)):
            begun = np.array([s[:n] for right, s in scores if right is side and len(s) >= n], float)
            row[f"{name} solutions"] = len(begun)
            means = {"score": begun[:, -1], "product": begun.prod(1), "sum": begun.sum(1)} if len(begun) else {}
            for what in ("score", "product", "sum"):
                row[f"{name} {what}"] = float(means[what].mean()) if means else None
        rows.append(row)
    return rows


def _first(right: Sequence[bool]) -> int:
    """The number of the first step that is not right; -1: there is none."""
    return next((n for n, ok in enumerate(right) if not ok), -1)


def _order(scores: np.ndarray, right: np.ndarray) -> float:
    order = np.sort(scores[~right])
    below, upto = (np.searchsorted(order, scores[right], side) for side in ("left", "right"))
    return float((below + upto).mean() / (2 * len(order)))
