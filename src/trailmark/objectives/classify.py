"""Class labels at chosen tokens: a process reward model at step ends, an outcome model at the last token."""

from __future__ import annotations

from typing import Literal

from trailmark.models.readout import Readout, View
from trailmark.objectives.base import Objective, Term


class Classify(Objective):
    """L = sum_t w_t CE(head(h_t), label_t) / mass, read *after* token t: the state a step has just reached."""

    kind: Literal["classify"] = "classify"
    model: str = "policy"
    head: str = "classes"
    weight: str = "class_weight"

    def readouts(self) -> list[Readout]:
        return [Readout("classes", "head", model=self.model, head=self.head, at="after", where=self.weight)]

    def terms(self, view: View) -> list[Term]:
        w = view[self.weight]
        label = view["label"].masked_fill(w == 0, 0).long()
        logp = view["classes"].log_softmax(-1)
        right = (logp.argmax(-1) == label).to(w.dtype)
        return [
            Term("cross_entropy", -(w * logp.gather(1, label[:, None])[:, 0]).sum(), weight=self.weight),
            Term("accuracy", (w * right).sum().detach(), weight=self.weight, coef=0.0),
        ]
