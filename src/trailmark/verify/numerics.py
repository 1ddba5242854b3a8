"""What the model computes on the run's own data: identities at step one, sampler against learner, one gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from trailmark.config import LearnerConfig
from trailmark.episodes import evenly
from trailmark.learn.budget import PLAIN
from trailmark.learn.learner import Learner
from trailmark.models.layout import RICHNESS, saving
from trailmark.models.lm import LM
from trailmark.models.readout import Readout
from trailmark.objectives.base import Objective
from trailmark.objectives.clipped import Clipped
from trailmark.objectives.sft import Sft
from trailmark.objectives.weighted_logp import WeightedLogp
from trailmark.types import Episode, Sample
from trailmark.verify.evidence import Evidence, Missing
from trailmark.verify.report import Check, Findings

# By the coarser of the two compared dtypes: the largest and the mean difference of a log-prob, and the relative
# difference of a gradient. Some norms compute in float32 whatever the dtype of the weights.
LARGEST = {"float64": 1e-5, "float32": 1e-3}
MEAN = {"float64": 1e-6, "float32": 1e-4}
GRADIENT = {"float64": 1e-5, "float32": 1e-4}
COARSE = {"largest": 1.0, "mean": 0.05, "gradient": 0.2}
CLEARLY = 4.0  # other weights must explain the stored numbers so many times better


def _learner(lm: LM, ev: Evidence, amp: bool = False, **more: Any) -> Learner:
    own = ev.config.learner
    settings = LearnerConfig(micro_tokens=own.micro_tokens, layout=own.layout, amp=own.amp if amp else "none")
    return Learner({"policy": lm}, settings.model_copy(update=more))


def _dtype(lm: LM) -> str:
    return str(lm.dtype).removeprefix("torch.")


def check_step_one(ev: Evidence) -> Check:
    """If the learner itself scores the old log-probs, in the same packing, every ratio is exactly 1 and every KL 0."""
    found = Findings("step one")
    if ev.conversations:
        return found.skip("imitation has no ratio and no KL")
    samples, lm = ev.batch(), ev.weights.any()
    learner = _learner(lm, ev, amp=True)
    filled = learner.fill(samples, old=Readout(""), ref=Readout(""))
    again = learner.fill(filled, now=Readout(""))
    with np.errstate(invalid="ignore"):  # a token that its law excludes has log-prob -inf on both sides
        off = [float(np.abs(s.streams["now"] - s.streams["old"]).max(initial=0.0)) for s in again]
    terms = learner.gradient(filled, Clipped(beta=0.1, kl="k3"))
    learner.optimisers["policy"].adam.zero_grad(set_to_none=True)
    if max(off) != 0.0:
        found.defect(f"a ratio at step one is not 1: log-probs differ by up to {max(off):.3g}")
    for name in ("kl", "kl_old", "clip_fraction"):
        if terms.get(name) != 0.0:
            found.defect(f"{name} at step one is {terms.get(name)}, not 0")
    found.numbers = {
        "samples": len(samples), "largest": max(off), "kl": terms.get("kl"), "kl_old": terms.get("kl_old"),
        "layout": ev.config.learner.layout,
    }  # fmt: skip
    return found.result(f"{len(samples)} samples: every ratio exactly 1, every KL exactly 0")


def check_sampler(ev: Evidence) -> Check:
    """The log-probs stored with the episodes come from the weights of the version that they name."""
    found = Findings("sampler")
    by_version: dict[int, list[tuple[Episode, int]]] = {}
    seat_of: dict[int, str] = {}
    mixed = 0
    for e in ev.episodes:
        seats = ev.seats(e)
        for i, t in enumerate(e.turns):
            if t.seat in seats and t.logp and len(t.logp) == len(t.tokens) == len(t.logq):
                if len(set(t.versions)) > 1:
                    mixed += 1
                    continue
                by_version.setdefault(t.version, []).append((e, i))
                seat_of[t.version] = t.seat
    if mixed:
        found.notes.append(f"{mixed} turns were not compared: the weights changed while they were written")
    if not by_version:
        return found.skip("no turn of a trained seat was stored with log-probs")
    versions = ev.weights.versions
    both = [v for v in versions if v in by_version]
    if not both:
        held = ", ".join(map(str, versions)) or "none"
        return found.skip(f"the weights of no version that wrote episodes are available (available: {held}); "
                          "keep more with checkpoint.every and checkpoint.keep_last")  # fmt: skip
    engine = getattr(getattr(ev.config, "engine", None), "dtype", None)
    dtypes = {engine or ev.config.model.dtype, ev.config.model.dtype}
    kind = next((d for d in ("bfloat16", "float16", "float32") if d in dtypes), "float64")
    largest, mean = LARGEST.get(kind, COARSE["largest"]), MEAN.get(kind, COARSE["mean"])
    gaps: dict[str, dict[str, float]] = {}
    for v in evenly(both, 8):
        turns = evenly(by_version[v], 4 * ev.limit)
        samples = [_turn_sample(e, i) for e, i in turns]
        gap = {w: _gaps(ev, w, seat_of[v], samples) for w in {v, *evenly([w for w in versions if w != v], 4)}}
        worst, average = gap[v]
        others = {w: g[1] for w, g in gap.items() if w != v}
        best = min(others, key=lambda w: others[w], default=v)
        gaps[str(v)] = {"turns": len(turns), "largest": worst, "mean": average}
        wrong = worst > largest or average > mean
        if best != v and average > mean / 50 and others[best] * CLEARLY < average:
            age = "older" if best < v else "newer"
            found.defect(
                f"the sampler's weights are not those of its version (stale?): version {best}, which is {age}, "
                f"explains the log-probs of version {v} to {others[best]:.2g}, its own weights to {average:.2g}"
            )
        elif wrong:
            found.defect(
                f"the sampler and the learner disagree: log-probs of version {v} differ by up to {worst:.2g} "
                f"(mean {average:.2g}; allowed in {kind}: {largest:g}, mean {mean:g}): stale or other weights, or "
                "tokens that were not drawn this way"
            )
    found.numbers = {"dtype": kind, "versions": gaps, "versions_at_hand": versions}
    if both == [0]:
        found.notes.append(
            "only the first weights are available, so stale weights could not be noticed: keep more with "
            "checkpoint.every and checkpoint.keep_last"
        )
    worst = max(g["largest"] for g in gaps.values())
    return found.result(f"versions {', '.join(gaps)}: stored and recomputed log-probs differ by at most {worst:.2g}")


def _turn_sample(e: Episode, i: int) -> Sample:
    """One turn as its own sequence, made directly from its fields."""
    turn, tokens = e.turns[i], e.sequence(i)
    span = slice(len(tokens) - len(turn.tokens), len(tokens))
    streams = {n: np.zeros(len(tokens)) for n in ("weight", "uncut", "logp", "logq")}
    law, written = np.full(len(tokens), -1), np.zeros(len(tokens), np.int64)
    streams["weight"][span], streams["logp"][span], streams["logq"][span] = 1.0, turn.logp, turn.logq
    # A learner's nucleus may differ by a token at its edge, and arg max has no density. These are compared without law.
    streams["uncut"][span] = float(turn.law.temperature > 0 and turn.law.top_p == 1.0 and turn.law.top_k == 0)
    law[span], written[span] = 0, np.arange(len(turn.tokens))
    return Sample(np.array(tokens), {**streams, "law": law, "written": written}, {"weight": 1.0}, (turn.law,), e.id)


def _gaps(ev: Evidence, version: int, seat: str, samples: Sequence[Sample]) -> tuple[float, float]:
    """The largest and the mean difference between stored log-probs and those under the weights of a version."""
    lm = ev.weights.at(version, seat)
    if lm is None:
        return float("inf"), float("inf")
    seen = _learner(lm, ev).fill(samples, own=Readout("", law=False), under=Readout("", where="uncut"))
    off = [np.abs(s.streams["own"] - s.streams["logp"])[s.streams["weight"] != 0] for s in seen]
    off += [np.abs(s.streams["under"] - s.streams["logq"])[s.streams["uncut"] != 0] for s in seen]
    flat = np.concatenate(off)
    if not np.isfinite(flat).all():
        return float("inf"), float("inf")
    return float(flat.max(initial=0.0)), float(flat.mean())


def check_gradient(ev: Evidence) -> Check:
    """All packings and splits give the same gradient. The reference is each sample alone."""
    found = Findings("one gradient")
    samples, lm = ev.batch(), ev.weights.any()
    objective: Objective = Sft() if ev.conversations else WeightedLogp()
    total = sum(len(s.tokens) for s in samples)
    most = ev.config.learner.micro_tokens or PLAIN
    alone = _gradient(lm, ev, samples, objective, "rows", 1)
    size = float(alone.norm())
    if not size > 0 or not np.isfinite(size):
        found.defect(f"the gradient of a batch of the run has norm {size}")
    tolerance = GRADIENT.get(_dtype(lm), COARSE["gradient"])
    off: dict[str, float] = {}
    shapes = [s for s in ("rows", "left", "flat", "tree") if RICHNESS[s] <= RICHNESS[lm.sharing]]
    for shape in shapes:
        for budget in sorted({most, max(1, min(most, total // 3))}):
            got = _gradient(lm, ev, samples, objective, shape, budget)
            off[f"{shape}/{budget}"] = float((got - alone).norm()) / max(size, 1e-30)
    backwards = _gradient(lm, ev, samples[::-1], objective, shapes[-1], most)
    off["backwards"] = float((backwards - alone).norm()) / max(size, 1e-30)
    for name, value in off.items():
        if not value <= tolerance:
            found.defect(
                f"packing '{name}' (layout/tokens) changes the gradient by {value:.2g} of its size, "
                f"allowed {tolerance:g}"
            )
    found.numbers = {
        "samples": len(samples),
        "tokens": total,
        "shared": saving(samples),
        "norm": size,
        "relative": off,
        "tolerance": tolerance,
    }
    if len(shapes) < 4:
        found.notes.append(f"this model computes exactly only: {', '.join(shapes)}")
    return found.result(
        f"{len(off)} packings and splits of {len(samples)} samples agree to {max(off.values()):.1g} of its size"
    )


def _gradient(
    lm: LM, ev: Evidence, samples: Sequence[Sample], objective: Objective, layout: str, budget: int
) -> torch.Tensor:
    learner = _learner(lm, ev, layout=layout, micro_tokens=budget)
    learner.gradient(samples, objective)
    grads = [p.grad.double().flatten() for _, p in lm.parameters() if p.grad is not None]
    if not grads:
        raise Missing("the model has nothing to train")
    learner.optimisers["policy"].adam.zero_grad(set_to_none=True)
    return torch.cat(grads)
