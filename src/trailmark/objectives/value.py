"""Regression of a value head on returns."""

from __future__ import annotations

from typing import Literal

from trailmark.models.readout import Readout, View
from trailmark.objectives.base import Objective, Term


class Value(Objective):
    """L = sum_t w_t (V(s_t) - G_t)^2 / mass, times `scale`. V(s_t) is read before token t, or after it (`at`): then it
    is the worth of a step that token t ends. With `clip`, the larger of this error and the error of V clipped to
    old_value +- clip is used (PPO). Stream: returns; old_value with clip."""

    kind: Literal["value"] = "value"
    model: str = "critic"
    head: str = "value"
    clip: float | None = None
    scale: float = 1.0
    weight: str = "value_weight"
    at: Literal["before", "after"] = "before"

    def readouts(self) -> list[Readout]:
        return [Readout("value", "head", model=self.model, head=self.head, at=self.at, where=self.weight)]

    def terms(self, view: View) -> list[Term]:
        v, goal = view["value"], view["returns"]
        error = (v - goal).square()
        if self.clip is not None:
            old = view["old_value"]
            error = error.maximum((old + (v - old).clamp(-self.clip, self.clip) - goal).square())
        return [Term("value", (view[self.weight] * error).sum(), weight=self.weight, coef=self.scale)]
