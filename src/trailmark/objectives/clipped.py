"""The clipped surrogate: PPO with a critic's advantages, GRPO and its relatives with group advantages."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trailmark.models.readout import Readout, View
from trailmark.objectives.base import Objective, Term
from trailmark.objectives.kl import Estimator, kl


class Clipped(Objective):
    """L = sum_t w_t [ -min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t) + beta KL_t - entropy H_t ] / mass,
    r_t = exp(logp_t - old_t), all under the sampling law.

    What tells the relatives apart is in the data: GRPO averages tokens in a sequence, then sequences (w = 1/|o|, mass
    1 per sequence); DAPO and BNPO average over all tokens (w = 1, mass the number of tokens); Dr. GRPO divides by a
    constant length. `ratio="sequence"` uses one ratio per row, the geometric mean over its trained tokens (GSPO).
    `ratio="turn"` uses one ratio per turn, the product over its tokens: a turn is one action (stream turn).
    `surrogate="cispo"` clips the ratio as a weight without gradient: -sg(clip(r_t, 1 - low, 1 + high)) A_t logp_t. No
    token loses its gradient there, and with low = 1 nothing is clipped from below.
    Streams: advantage, old; ref when beta > 0 (with `kl="exact"` model "ref" is read instead).
    """

    kind: Literal["clipped"] = "clipped"
    low: float = Field(0.2, ge=0)
    high: float = Field(0.2, ge=0)
    beta: float = Field(0.0, ge=0)
    kl: Estimator | Literal["exact"] = "k3"
    entropy: float = 0.0
    ratio: Literal["token", "turn", "sequence"] = "token"
    surrogate: Literal["clipped", "cispo"] = "clipped"
    ref: str = "ref"

    def readouts(self) -> list[Readout]:
        out = [Readout("logp", model=self.model)]
        if self.entropy:
            out.append(Readout("entropy", "entropy", self.model))
        if self.beta and self.kl == "exact":
            out.append(Readout("exact_kl", "kl", self.model, to=self.ref))
        return out

    def terms(self, view: View) -> list[Term]:
        w, a, logp = view["weight"], view["advantage"], view["logp"]
        on = (w != 0).to(w.dtype)
        gap = (logp - view["old"]) * on
        if self.ratio == "sequence":
            gap = (view.row_sum(gap) / view.row_sum(on).clamp(min=1))[view.row]
        elif self.ratio == "turn":
            turn = view["turn"].long() + 1  # 0: a token that nobody wrote
            each = view.row * (int(turn.max()) + 1) + turn
            gap = gap.new_zeros(int(each.max()) + 1).index_add(0, each, gap)[each]
        r = gap.exp()
        within = r.clamp(1 - self.low, 1 + self.high)
        surrogate = within.detach() * a * logp if self.surrogate == "cispo" else (r * a).minimum(within * a)
        outside = ((r > 1 + self.high) & (a > 0)) | ((r < 1 - self.low) & (a < 0))
        out = [
            Term("policy", -(w * surrogate).sum()),
            Term("clip_fraction", (w * outside.to(w.dtype)).sum().detach(), coef=0.0, mean=True),
            Term("ratio", (w * r).sum().detach(), coef=0.0, mean=True),
            Term("kl_old", (w * (gap.expm1() - gap)).sum().detach(), coef=0.0, mean=True),
        ]
        if self.beta:
            each = view["exact_kl"] if self.kl == "exact" else kl(self.kl, logp, view["ref"], view["old"]) * on
            out.append(Term("kl", (w * each).sum(), coef=self.beta))
        if self.entropy:
            out.append(Term("entropy", (w * view["entropy"]).sum(), coef=-self.entropy))
        return out
