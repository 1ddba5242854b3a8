"""From marks and an outcome to the weight of each turn: r_t, G_t and w_t of EPO."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from trailmark.credit.marks import largest, marked_rewards, turn_weights
from trailmark.credit.returns import discounted
from trailmark.errors import DataError
from trailmark.methods.epo.config import ShapeConfig


@dataclass(frozen=True)
class Marked:
    """A trajectory of `turns` turns, of which `critical` (numbers from 0) decided."""

    name: str
    group: str
    turns: int
    critical: Collection[int]
    outcome: float | None


@dataclass(frozen=True)
class Shaped:
    """The weights of each trajectory, and the largest |G_t| of all, by which `dataset` divides."""

    weights: list[np.ndarray]
    largest: float

    def numbers(self) -> dict[str, float]:
        flat = np.concatenate(self.weights) if self.weights else np.zeros(1)
        zero = sum(not w.any() for w in self.weights)
        return {"trajectories": len(self.weights), "zero": zero, "weight": float(flat.mean()),
                "negative": float((flat < 0).mean()), "largest": self.largest}  # fmt: skip


def shaped(rows: Sequence[Marked], c: ShapeConfig) -> Shaped:
    """r_t: 1 if critical, else the outcome at the last turn. G_t = sum_k gamma^(k-t) r_k. w_t: G_t, normalised."""
    returns = []
    for row in rows:
        r = marked_rewards(row.turns, row.critical, _outcome(row, c), c.outcome == "add", c.first)
        returns.append(discounted(r, c.gamma))
    try:
        weights = turn_weights(returns, c.normalise, [row.group for row in rows], c.baseline)
    except ValueError as problem:
        raise DataError(f"shape.normalise {c.normalise}: {problem}.") from None
    return Shaped(weights, largest(returns))


def _outcome(row: Marked, c: ShapeConfig) -> float:
    if row.outcome is None:
        raise DataError(f"{row.name} has no outcome: a play that was not scored cannot be shaped.")
    if not c.least <= row.outcome <= c.most:
        raise DataError(f"{row.name} has the outcome {row.outcome:g}, and outcomes go from {c.least:g} to {c.most:g} "
                        "(shape.least, shape.most).")  # fmt: skip
    return row.outcome / c.most
