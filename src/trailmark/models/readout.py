"""Readouts: the numbers per sample token that a model can give. Objectives, scores and engines ask for them, and
`models/forward.py` computes them. This module imports without torch, because recipes are checked before torch is
imported.

Legend: M sample tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from trailmark.errors import LearnError

if TYPE_CHECKING:
    from torch import Tensor

    from trailmark.models.layout import Packed


@dataclass(frozen=True, slots=True)
class Readout:
    """One number (or vector) per token, under `name`.

    logp      log-prob of the token, under its sampling law (`law=True`) or the model's own distribution
    entropy   of the distribution that the token came from
    kl        exact KL(model || `to`) over the vocabulary in the state where the token was chosen (`reverse=False`
              swaps the two)
    head      a head's output: `at="before"` in the state where the token was chosen (V), `at="after"` once it was
              read (a step's class). One output gives [M], several give [M, outputs].
    rank      the token's rank among all by probability; 1 is the most likely
    top       the `top` most likely tokens, [M, 2, top]: their ids, then their log-probs
    `where` names a stream: only its non-zero entries are computed, the rest is 0. The model "x/base" is x without its
    adapter.
    """

    name: str
    kind: Literal["logp", "entropy", "kl", "head", "rank", "top"] = "logp"
    model: str = "policy"
    law: bool = True
    head: str = "value"
    at: Literal["before", "after"] = "before"
    to: str = "ref"
    reverse: bool = True
    where: str = "weight"
    detach: bool = False
    top: int = 0


@dataclass(eq=False)
class View:
    """The input of an objective: streams and readouts over one token axis, the row of each token, and the numbers that
    the objective itself has learned so far."""

    packed: Packed
    streams: dict[str, Tensor]
    read: dict[str, Tensor]
    row: Tensor
    learned: Mapping[str, float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        found = self.read if name in self.read else self.streams
        if name not in found:
            streams = ", ".join(sorted(self.streams))
            raise LearnError(f"the objective needs '{name}', which the samples do not have (streams: {streams})")
        return found[name]

    def row_sum(self, x: Tensor) -> Tensor:
        """[M] -> one sum per row."""
        return x.new_zeros(len(self.packed.samples)).index_add(0, self.row, x)

    def has(self, name: str) -> bool:
        return name in self.streams or name in self.read
