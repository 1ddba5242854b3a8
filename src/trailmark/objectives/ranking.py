"""Preferences as a number for each answer: the pairwise loss of a reward model."""

from __future__ import annotations

from typing import Literal

from trailmark.models.readout import Readout, View
from trailmark.objectives.base import Objective, Term
from trailmark.objectives.pairwise import pairs


class Ranking(Objective):
    """L = - mean over pairs of log sigma(r_chosen - r_rejected) (Bradley-Terry; ln 2 where both are worth the same).

    r is a head of one output, read after the tokens that carry weight: the last token of an answer has weight 1. Rows
    come in pairs as for `Pairwise`.
    """

    kind: Literal["ranking"] = "ranking"
    head: str = "step"

    def readouts(self) -> list[Readout]:
        return [Readout("worth", "head", model=self.model, head=self.head, at="after")]

    def terms(self, view: View) -> list[Term]:
        import torch
        from torch.nn.functional import logsigmoid

        worth = view.row_sum(view["worth"] * view["weight"])
        chosen, rejected = (torch.as_tensor(x, device=worth.device) for x in pairs(view))
        gap = worth[chosen] - worth[rejected]
        return [
            Term("ranking", -logsigmoid(gap).sum()),
            Term("accuracy", (gap > 0).to(gap.dtype).sum().detach(), coef=0.0),
            Term("gap", gap.sum().detach(), coef=0.0),
        ]
