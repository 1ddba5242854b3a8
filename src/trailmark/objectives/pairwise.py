"""Preferences between two continuations: DPO, IPO, hinge."""

from __future__ import annotations

from typing import Literal

import numpy as np

from trailmark.errors import LearnError
from trailmark.models.readout import Readout, View
from trailmark.objectives.base import Objective, Term


class Pairwise(Objective):
    """h = sum_t w_t (logp_t - ref_t) of the chosen row minus the same sum of the rejected row. With w = 1 these are the
    sums of DPO. With w = 1/length (`mean="sequence"`) they are length-normalised, as in some IPO implementations.

    sigmoid  -(1 - smooth) log sigma(beta h) - smooth log sigma(-beta h)      (DPO; ln 2 at h = 0)
    hinge    max(0, 1 - beta h)
    ipo      (h - 1/(2 beta))^2
    The two rows of a pair share `unit` and have role "chosen" and "rejected"; a pair's mass is 1, on its chosen row.
    Stream: ref (or `reference_free`).
    """

    kind: Literal["pairwise"] = "pairwise"
    loss: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    beta: float = 0.1
    smooth: float = 0.0
    reference_free: bool = False

    def readouts(self) -> list[Readout]:
        return [Readout("logp", model=self.model, law=False)]

    def terms(self, view: View) -> list[Term]:
        import torch
        from torch.nn.functional import logsigmoid

        ref = 0.0 if self.reference_free else view["ref"]
        reward = view.row_sum((view["logp"] - ref) * view["weight"])
        chosen, rejected = (torch.as_tensor(x, device=reward.device) for x in pairs(view))
        h = reward[chosen] - reward[rejected]
        if self.loss == "sigmoid":
            each = -(1 - self.smooth) * logsigmoid(self.beta * h) - self.smooth * logsigmoid(-self.beta * h)
        elif self.loss == "hinge":
            each = (1 - self.beta * h).relu()
        else:
            each = (h - 1 / (2 * self.beta)).square()
        return [
            Term("pair", each.sum()),
            Term("accuracy", (h > 0).to(h.dtype).sum().detach(), coef=0.0),
            Term("chosen_reward", self.beta * reward[chosen].sum().detach(), coef=0.0),
            Term("rejected_reward", self.beta * reward[rejected].sum().detach(), coef=0.0),
        ]


def pairs(view: View) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers of each unit's chosen and rejected sample."""
    found: dict[str, dict[str, int]] = {}
    counts: dict[str, int] = {}
    for row, s in enumerate(view.packed.samples):
        found.setdefault(s.unit, {})[s.role] = row
        counts[s.unit] = counts.get(s.unit, 0) + 1
    if bad := [u for u, roles in found.items() if set(roles) != {"chosen", "rejected"} or counts[u] != 2]:
        raise LearnError(
            f"pair '{bad[0]}' has {counts[bad[0]]} rows ({', '.join(sorted(found[bad[0]]))}): a pair is one 'chosen' "
            "and one 'rejected' sample"
        )
    return np.array([r["chosen"] for r in found.values()]), np.array([r["rejected"] for r in found.values()])
