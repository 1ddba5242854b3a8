"""Scores of stored episodes, token by token: log-probs, entropies, values. One annotation per turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trailmark.types import Annotation, Episode

if TYPE_CHECKING:
    from trailmark.models.layout import Shape
    from trailmark.models.lm import LM
    from trailmark.models.readout import Readout


def source_of(lm: LM) -> str:
    """Identifies the model: its name, and a fingerprint of its weights."""
    return f"{lm.name}@{lm.fingerprint()[:12]}"


def token_scores(
    lm: LM,
    episodes: Sequence[Episode],
    readouts: Sequence[Readout],
    seat: str = "policy",
    shape: Shape = "auto",
    amp: bool = False,
) -> list[Annotation]:
    """Every readout (`Readout("logp")`, `Readout("entropy", "entropy")`, `Readout("value", "head")`) on every token
    that the seat wrote. Turns that share a prefix are computed together, and the prefix once."""
    import dataclasses

    from trailmark.models.forward import fill, pack
    from trailmark.samples import build_samples

    samples = build_samples(episodes, seat)
    if not samples:
        return []
    models = {"judge": lm}
    wanted = [dataclasses.replace(r, model="judge", where="weight") for r in readouts]
    lm.train(False)
    filled = fill(models, samples, pack(models, samples, shape), wanted, amp)
    source = source_of(lm)
    turns = {e.id: [i for i, t in enumerate(e.turns) if t.seat == seat and t.tokens] for e in episodes}
    out = []
    for s in filled:
        for k in sorted(set(s.streams["turn"].tolist()) - {-1}):
            mine = s.streams["turn"] == k
            for r in wanted:
                values = tuple(float(v) for v in s.streams[r.name][mine])
                out.append(Annotation(s.episode, r.name, "token", values, turns[s.episode][k], source))
    return out
