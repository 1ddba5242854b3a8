"""KTO: good and bad answers that need not come in pairs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from trailmark.errors import LearnError
from trailmark.models.readout import Readout, View
from trailmark.objectives.base import Fill, Note, Objective, Term
from trailmark.types import Sample


class Kto(Objective):
    """With L = sum_t w_t (logp_t - ref_t) of a row and z a reference point:

    desirable     desirable * (1 - sigma(beta (L - z)))
    undesirable   undesirable * (1 - sigma(beta (z - L)))

    z = max(0, mean L of mismatched rows). A mismatched row is a prompt of the batch with the answer of the nearest row
    before it that has another prompt. z carries no gradient. It is computed over the whole batch before the first
    backward pass, so micro-batches do not change it (other implementations take a mean over a micro-batch).
    Rows have role "desirable" or "undesirable", weight 1 on the answer's tokens, mass 1, and the stream ref.
    """

    kind: Literal["kto"] = "kto"
    beta: float = 0.1
    desirable: float = 1.0
    undesirable: float = 1.0
    ref: str = "ref"
    max_len: int | None = None  # most tokens of a mismatched row

    def readouts(self) -> list[Readout]:
        return [Readout("logp", model=self.model, law=False)]

    def prepare(self, samples: Sequence[Sample], fill: Fill) -> list[Sample]:
        crossed = fill(
            mismatched(samples, self.max_len),
            logp=Readout("", model=self.model, law=False),
            ref=Readout("", model=self.ref, law=False),
        )
        sums = [float(((s.streams["logp"] - s.streams["ref"]) * s.streams["weight"]).sum()) for s in crossed]
        z = max(0.0, float(np.mean(sums)))
        return [dataclasses.replace(s, streams={**s.streams, "reference": np.full(len(s.tokens), z)}) for s in samples]

    def terms(self, view: View) -> list[Term | Note]:
        weight = view["weight"]
        reward = view.row_sum((view["logp"] - view["ref"]) * weight)
        z = view["reference"][:1]
        roles = [s.role for s in view.packed.samples]
        if bad := [r for r in roles if r not in ("desirable", "undesirable")]:
            raise LearnError(f"a row of KTO has role '{bad[0]}': it must be 'desirable' or 'undesirable'")
        good = reward.new_tensor([r == "desirable" for r in roles]).bool()
        gap = (reward - z).where(good, z - reward)
        scale = reward.new_tensor(self.desirable).where(good, reward.new_tensor(self.undesirable))
        loss = (scale * (1 - (self.beta * gap).sigmoid())).sum()
        return [
            Term("kto", loss),
            Term("reference_point", z[0] * len(roles), coef=0.0),
            Note("desirable_reward", self.beta * reward[good].detach()),
            Note("undesirable_reward", self.beta * reward[~good].detach()),
        ]


def mismatched(samples: Sequence[Sample], max_len: int | None = None) -> list[Sample]:
    """Each row's prompt with the answer of the nearest row before it that has another prompt. The last row counts as
    before the first. Rows are cut at `max_len` tokens."""
    starts = []
    for s in samples:
        on = np.nonzero(s.streams["weight"])[0]
        if not len(on):
            raise LearnError(f"sample '{s.episode}' has no answer: every weight is 0")
        starts.append(int(on[0]))
    prompts = [s.tokens[:k].tobytes() for s, k in zip(samples, starts)]
    if len(set(prompts)) < 2:
        raise LearnError("KTO's reference point needs rows of two different prompts in a batch: raise the batch size")
    out = []
    for i, (s, k) in enumerate(zip(samples, starts)):
        before = ((i - d) % len(samples) for d in range(1, len(samples)))
        j = next(j for j in before if prompts[j] != prompts[i])
        tokens = np.concatenate([s.tokens[:k], samples[j].tokens[starts[j] :]])[:max_len]
        weight = np.concatenate([np.zeros(k), samples[j].streams["weight"][starts[j] :]])[:max_len]
        out.append(Sample(tokens, {"weight": weight}, {"weight": 1.0}))
    return out
