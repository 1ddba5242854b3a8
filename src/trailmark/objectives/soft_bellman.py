"""OREO: a policy and a value that satisfy the soft Bellman equation on logged trajectories.

V(s_t) = R - beta sum_{i>=t} l_i,  l_i = log pi(a_i|s_i) - log ref(a_i|s_i), for every decision state: the telescoped form of
V(s) - V(s') = r - beta l. Observation tokens are no actions and add nothing to the sum.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trailmark.learn.forward import Readout, View
from trailmark.objectives.base import Objective, Term


def tail_sums(x: Tensor, row: Tensor) -> Tensor:
    """sum over tokens >= t of the same row, for every t: [M] -> [M]."""
    after = x.double().flip(0).cumsum(0).flip(0)  # over all later tokens of all rows
    last = torch.cat([row[1:] != row[:-1], torch.ones(1, dtype=torch.bool, device=row.device)])
    beyond = torch.cat([after[1:], after.new_zeros(1)])[last]  # what belongs to rows after this one
    return (after - beyond[row]).to(x.dtype)


class SoftBellman(Objective):
    """Residual e_t = V(s_t) - R + beta (l_t + sum_{i>t} l_i), squared, w-weighted.

    part="value": V carries the gradient, the policy's l come from stream `policy_logp` (scored before the step).
    part="policy": l_t carries it, later l and V (stream `value`) are held fixed, so every action has the same scale.
    Streams: weight (states, also the actions' mask at token level), ref, reward (R on every token of the row).
    """

    kind: Literal["soft_bellman"] = "soft_bellman"
    part: Literal["value", "policy"] = "policy"
    beta: float = 0.03
    critic: str = "critic"

    def readouts(self) -> list[Readout]:
        if self.part == "value":
            return [Readout("value", "head", model=self.critic)]
        return [Readout("logp", model=self.model, law=False)]

    def terms(self, view: View) -> list[Term]:
        w = view["weight"]
        on = (w != 0).to(w.dtype)
        logp = view["policy_logp"] if self.part == "value" else view["logp"]
        ratio = (logp - view["ref"]) * on
        tail = tail_sums(ratio.detach(), view.row)
        own = ratio - ratio.detach()  # value 0, the gradient of l_t alone
        residual = (view["value"] - view["reward"] + self.beta * (tail + own)) * on
        return [Term(self.part, (w * residual.square()).sum())]
