"""Supervised fine-tuning: imitate the tokens that carry weight."""

from __future__ import annotations

from typing import Literal

from trailmark.models.readout import Readout, View
from trailmark.objectives.base import Objective, Term


class Sft(Objective):
    """L = - sum_t w_t log p(token_t | before) / mass. With w = 1 on trained tokens and mass their number this is the
    mean cross-entropy per token. p is the model's own distribution, whatever law the tokens were drawn under. With
    `law=True` it is restricted to each token's law (a label among the listed ones)."""

    kind: Literal["sft"] = "sft"
    law: bool = False

    def readouts(self) -> list[Readout]:
        return [Readout("logp", model=self.model, law=self.law)]

    def terms(self, view: View) -> list[Term]:
        return [Term("nll", -(view["weight"] * view["logp"]).sum())]
