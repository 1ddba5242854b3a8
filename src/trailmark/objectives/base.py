"""What an objective is: a config, the readouts it needs, and a pure function that returns sums.

The learner divides: a term's gradient is coef * sum / (mass of its weight stream over the whole batch). So an objective
never sees a batch size, and splitting a batch does not change the gradient.

Two kinds of objective need more. Some look at the whole batch before the first backward pass: `prepare` returns the
samples with new streams (KTO's reference point). Others learn numbers of their own (a KL coefficient): `begin` returns
the initial numbers, `view.learned` holds them, and `learn` updates them after every optimiser step. Checkpoints store
them.
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
    """A named sum. With `coef` 0 it is only reported. `weight` names the stream whose mass divides the sum. With
    `mean=True` (for terms that are only reported) the sum of that stream divides it, so the report is a true mean. An
    `optional` term is left out of a batch in which its mass is 0; any other such term is an error."""

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
    model: str = "policy"  # the model that the readouts come from

    def readouts(self) -> Sequence[Readout]:
        raise TypeError(f"{type(self).__name__} lists no readouts")

    def terms(self, view: View) -> Sequence[Term | Note]:
        raise TypeError(f"{type(self).__name__} has no terms")

    def prepare(self, samples: Sequence[Sample], fill: Fill) -> Sequence[Sample]:
        """Called once with all samples of an optimiser step, before they are split into micro-batches."""
        return samples

    def begin(self) -> dict[str, float]:
        """The objective's own numbers before the first step."""
        return {}

    def learn(self, learned: Mapping[str, float], report: Mapping[str, float]) -> dict[str, float]:
        """The objective's own numbers after a step that reported `report`."""
        return dict(learned)
