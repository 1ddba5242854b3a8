"""What an objective is: a config, the readouts it needs, and a pure function to sums.

The learner divides: a term's gradient is coef * sum / (mass of its weight stream over the whole batch). So an objective
never sees a batch size, and no split of a batch can change a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from trailmark.config import Config
from trailmark.learn.forward import Readout, View


@dataclass(frozen=True, eq=False)
class Term:
    """A named sum. With `coef` 0 it is only reported. `weight` names the stream it was weighted by, whose mass divides it;
    with `mean=True` (for what is only reported) the sum of that stream does, so that a report is a true mean."""

    name: str
    sum: Tensor
    weight: str = "weight"
    coef: float = 1.0
    mean: bool = False


class Objective(Config):
    """Subclasses set `kind`, list `readouts()` and compute `terms(view)`."""

    kind: str = ""
    model: str = "policy"  # whose readouts these are

    def readouts(self) -> Sequence[Readout]:
        raise TypeError(f"{type(self).__name__} lists no readouts")

    def terms(self, view: View) -> Sequence[Term]:
        raise TypeError(f"{type(self).__name__} has no terms")
