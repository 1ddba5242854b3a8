"""REINFORCE with any credit: EPO's turn weights, Reflect-RL's policy gradient, reward-weighted cloning."""

from __future__ import annotations

from typing import Literal

from trailmark.models.readout import Readout, View
from trailmark.objectives.base import Objective, Term


class WeightedLogp(Objective):
    """L = - sum_t w_t A_t log p(token_t) / mass - entropy * sum_t w_t H_t / mass.

    The mean over tokens, turns, trajectories is in w and mass (EPO: w = 1/(T k_t), mass 1 per trajectory). The
    reference code of EPO sums over a micro-batch where ours takes a mean. So its learning rate changes with the batch
    size, and ours does not. With A = -(cost to go) this is Reflect-RL's loss.
    """

    kind: Literal["weighted_logp"] = "weighted_logp"
    entropy: float = 0.0
    law: bool = True
    gap: bool = False  # report the distance to the log-probs that the tokens were drawn with (stream old): 0 on policy

    def readouts(self) -> list[Readout]:
        more = [Readout("entropy", "entropy", self.model, self.law)] if self.entropy else []
        return [Readout("logp", model=self.model, law=self.law), *more]

    def terms(self, view: View) -> list[Term]:
        w = view["weight"]
        out = [Term("policy", -(w * view["advantage"] * view["logp"]).sum())]
        if self.entropy:
            out.append(Term("entropy", (w * view["entropy"]).sum(), coef=-self.entropy))
        if self.gap:
            gap = (view["logp"] - view["old"]).abs().detach().nan_to_num()  # a server may have given no log-probs
            out.append(Term("sampler_gap", (w * gap).sum(), coef=0.0, mean=True))
        return out
