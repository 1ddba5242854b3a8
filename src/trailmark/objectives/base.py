"""What an objective is: a config, the readouts it needs, and a pure function to sums.

The learner divides: a term's gradient is coef * sum / (mass of its weight stream over the whole batch). So an objective
never sees a batch size, and no split of a batch can change a gradient.

Two kinds of objective need more. One looks at the whole batch before the first backward pass: `prepare` returns the samples with
what it found written into them (KTO's reference point). One has numbers of its own that it learns (a KL coefficient): it
`begin`s with them, finds them in `view.learned`, and `learn`s after every optimiser step; they are part of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from trailmark.config import Config
from trailmark.models.readout import Readout, View
from trailmark.types import Sample

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Term:
    """A named sum. With `coef` 0 it is only reported. `weight` names the stream it was weighted by, whose mass divides it;
    with `mean=True` (for what is only reported) the sum of that stream does, so that a report is a true mean. An `optional`
    term is left out of a batch that has nothing of it, where any other would be refused."""

    name: str
    sum: Tensor
    weight: str = "weight"
    coef: float = 1.0
    mean: bool = False
    optional: bool = False


@dataclass(frozen=True, eq=False)
class Note:
    """Numbers that are only reported, as NAME_min, NAME_median and NAME_max over the whole batch."""

    name: str
    values: Tensor


class Fill(Protocol):
    """`Learner.fill`: streams computed without gradient."""

    def __call__(self, samples: Sequence[Sample], **readouts: Readout) -> list[Sample]: ...


class Objective(Config):
    """Subclasses set `kind`, list `readouts()` and compute `terms(view)`."""

    kind: str = ""
    model: str = "policy"  # whose readouts these are

    def readouts(self) -> Sequence[Readout]:
        raise TypeError(f"{type(self).__name__} lists no readouts")

    def terms(self, view: View) -> Sequence[Term | Note]:
        raise TypeError(f"{type(self).__name__} has no terms")

    def prepare(self, samples: Sequence[Sample], fill: Fill) -> Sequence[Sample]:
        """Called once for all samples of an optimiser step, before they are split."""
        return samples

    def begin(self) -> dict[str, float]:
        """Its own numbers before the first step."""
        return {}

    def learn(self, learned: Mapping[str, float], report: Mapping[str, float]) -> dict[str, float]:
        """Its own numbers after a step that reported `report`."""
        return dict(learned)
