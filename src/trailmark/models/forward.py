"""The teacher-forced forward pass: from token sequences to numbers per token, computed in chunks over tokens.

`pack` lays samples out, `view` runs models over one layout (with gradients if they are trained), and `fill` adds the
results to the samples. The learner, the values of a search, the engine's scores and everything in `score/` use this.

Legend: M sample tokens, N tokens that are read (where the readout's stream is not 0), V vocabulary, W hidden width.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trailmark.errors import LearnError
from trailmark.models import compiled
from trailmark.models.attention import Layout
from trailmark.models.layout import RICHNESS, Packed, Shape, micro_batches, near_for
from trailmark.models.lm import LM
from trailmark.models.readout import Readout, View
from trailmark.models.sampling import NEVER, chosen, entropy, law_logits, most_likely, untruncated, working
from trailmark.types import Sample, SamplingLaw

CHUNK = 1024
PLACES = 65536  # default number of tokens in one pass


def choose_shape(wish: Shape, lm: LM) -> Shape:
    """The requested shape, or the richest one that is exact for the model."""
    if wish == "fixed":
        return wish
    wish = "tree" if wish == "auto" else wish
    return wish if RICHNESS[wish] <= RICHNESS[lm.sharing] else lm.sharing  # type: ignore[return-value]


def pack(
    models: Mapping[str, LM], samples: Sequence[Sample], shape: Shape = "auto", budget: int = PLACES
) -> list[Packed]:
    """Lay samples out so that all these models can read them. The same samples are always packed the same way, so
    scoring and training give equal numbers."""
    poorest = min(models.values(), key=lambda lm: RICHNESS[lm.sharing])
    longest, context = max((len(s.tokens) for s in samples), default=0), min(lm.context for lm in models.values())
    if longest > context:
        raise LearnError(
            f"a sample of {longest} tokens does not fit the model's context of {context}: leave it out, or use a model "
            "with a longer context"
        )
    multiple = max(lm.pad_multiple for lm in models.values())
    wide = max(lm.width for lm in models.values())
    return micro_batches(samples, budget, choose_shape(shape, poorest), multiple, near_for(wide))


def fill(
    models: Mapping[str, LM],
    samples: Sequence[Sample],
    packs: Sequence[Packed],
    readouts: Sequence[Readout],
    amp: bool = False,
) -> list[Sample]:
    """The samples with one more stream per readout, computed without gradient in these layouts."""
    read: list[dict[str, np.ndarray]] = []
    for packed in packs:
        with torch.no_grad():
            seen = view(models, packed, readouts, amp=amp)
        read.append({r.name: seen.read[r.name].cpu().numpy() for r in readouts})
    return put_back(samples, packs, read)


def put_back(
    samples: Sequence[Sample], packs: Sequence[Packed], read: Sequence[Mapping[str, np.ndarray]]
) -> list[Sample]:
    """The samples with what was read in each of these layouts as further streams."""
    places: dict[int, list[int]] = {}
    for i, s in enumerate(samples):
        places.setdefault(id(s), []).append(i)
    out: list[Sample | None] = [None] * len(samples)
    for packed, values in zip(packs, read, strict=True):
        for row, s in enumerate(packed.samples):
            mine = packed.row == row
            streams = {**s.streams, **{n: v[mine] for n, v in values.items()}}
            out[places[id(s)].pop()] = dataclasses.replace(s, streams=streams)
    return [s for s in out if s is not None]


def view(
    models: Mapping[str, LM],
    packed: Packed,
    readouts: Sequence[Readout],
    train: Collection[str] = (),
    amp: bool = False,
    learned: Mapping[str, float] | None = None,
) -> View:
    """Run each needed model once over the layout, and gather every readout back to sample tokens. Gradients flow only
    into the models named in `train`."""
    with _as(models, readouts[0].model if readouts else next(iter(models))) as lead:
        pass
    device, real = lead.device, torch.float64 if lead.dtype == torch.float64 else torch.float32
    streams = {n: moved(s, device) for n, s in packed.streams.items()}
    streams = {n: s.to(real) if s.is_floating_point() else s for n, s in streams.items()}
    ids, end, pos = (moved(a, device) for a in (packed.ids, packed.end, packed.pos))
    layout = Layout(end, pos, packed.constant)
    trained = {id(models[name]) for name in train}
    with_grad = {r.model for r in readouts if not r.detach and id(models.get(r.model)) in trained}
    needed = dict.fromkeys([r.model for r in readouts] + [r.to for r in readouts if r.kind == "kl"])
    hidden: dict[str, Tensor] = {}
    passes: dict[tuple[int, str, bool], Tensor] = {}  # a model with two names (a shared body) runs once
    for name in needed:
        with _as(models, name) as lm, torch.set_grad_enabled(name in with_grad), _autocast(lm, amp):
            key = (id(lm), name.partition("/")[2], name in with_grad)
            if key not in passes:
                passes[key] = lm.hidden(ids, layout, pos).reshape(-1, lm.width)
            hidden[name] = passes[key]
    read: dict[str, Tensor] = {}
    for (model, where, at), group in _grouped(readouts).items():
        if where not in packed.streams:
            raise LearnError(
                f"readout '{group[0].name}' is wanted where '{where}' is not 0, but the samples have no such stream"
            )
        if at == "before" and (packed.streams[where][packed.index == 0] != 0).any():
            raise LearnError(
                f"'{where}' is not 0 on the first token of a sample: nothing comes before it, so it cannot be read "
                "there"
            )
        m = np.nonzero(
            packed.streams[where].reshape(len(packed.where), -1).any(1) & ((packed.index > 0) | (at == "after"))
        )[0]
        place = packed.where[m] if at == "after" else packed.where[m - 1]
        target = packed.ids.reshape(-1)[packed.where[m]]
        with _as(models, model) as lm, torch.set_grad_enabled(model in with_grad), _autocast(lm, amp):
            parts = _read(lm, models, hidden, model, group, packed, m, place, target)
        at_m = moved(m, device)
        for r, value in zip(group, parts):
            value = value.to(real)
            out = torch.zeros((len(packed.where), *value.shape[1:]), dtype=real, device=device)
            read[r.name] = out.index_copy(0, at_m, value.detach() if r.detach else value)
    return View(packed, streams, read, moved(packed.row, device), learned or {})


def moved(array: np.ndarray, device: torch.device) -> Tensor:
    """An array as a tensor on a device. The host does not wait for a GPU to take it."""
    tensor = torch.as_tensor(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _read(
    lm: LM,
    models: Mapping[str, LM],
    hidden: dict[str, Tensor],
    model: str,
    group: list[Readout],
    packed: Packed,
    m: np.ndarray,
    place: np.ndarray,
    target: np.ndarray,
) -> list[Tensor]:
    device = lm.device
    at = moved(place, device)
    states = hidden[model].index_select(0, at)
    out: dict[str, list[Tensor]] = {r.name: [] for r in group}
    tokens = [r for r in group if r.kind != "head"]
    for r in group:
        if r.kind == "head":
            out[r.name].append(_read_head(lm, r, model, hidden[model], states, at, packed.constant))
    others = {r.to: hidden[r.to].index_select(0, at) for r in tokens if r.kind == "kl"}
    law = packed.streams["law"][m]
    written = packed.streams["written"][m] if "written" in packed.streams else np.full(len(m), 1 << 30)
    goal = moved(target, device)
    whole = [untruncated(w) for w in packed.laws]
    if any(r.law for r in tokens) and any(packed.laws[k].temperature == 0 for k in np.unique(law) if k >= 0):
        raise LearnError(
            "these tokens were drawn at temperature 0: their law has no gradient; sample with a temperature above 0, "
            "or read them with law=False"
        )

    if tokens and (heat := _temperatures(lm, tokens, packed.laws, law)) is not None:
        for r, value in zip(tokens, _fused(lm, states, goal, heat, tokens)):
            out[r.name].append(value)
        tokens = []

    def chunk(h: Tensor, t: Tensor, span: slice, *other: Tensor) -> tuple[Tensor, ...]:
        logits = lm.logits(h)
        own = working(logits)
        under = own
        if any(r.law and r.kind != "kl" for r in tokens):
            under = law_logits(logits, packed.laws, law[span], written[span], t)
        results = []
        for r in tokens:
            if r.kind != "kl":
                results.append(_number(r, under if r.law else own, t))
                continue
            with _as(models, r.to) as second, torch.no_grad():
                b = working(second.logits(other[list(others).index(r.to)]))
            a = own
            if r.law:
                a, b = (law_logits(x, whole, law[span], written[span]) for x in (logits, b))
            results.append(exact_kl(a, b) if r.reverse else exact_kl(b, a))
        return tuple(results)

    for first in range(0, len(m) if tokens else 0, CHUNK):
        span = slice(first, first + CHUNK)
        args = (states[span], goal[span], span, *[o[span] for o in others.values()])
        # Recomputed in the backward pass, so that no [N, V] tensor is kept after its chunk.
        results = checkpoint(chunk, *args, use_reentrant=False) if torch.is_grad_enabled() else chunk(*args)
        for r, value in zip(tokens, results):
            out[r.name].append(value)
    return [torch.cat(out[r.name]) if out[r.name] else states.new_zeros(0) for r in group]


def _read_head(
    lm: LM, r: Readout, model: str, hidden: Tensor, states: Tensor, at: Tensor, constant: bool
) -> Tensor:
    """A head's output at the places `at`, whose hidden states are `states`."""
    if r.head not in lm.heads:
        has = ", ".join(lm.heads) or "none"
        raise LearnError(f"readout '{r.name}' reads head '{r.head}' of model '{model}', which has: {has}")
    head: Any = lm.heads[r.head]
    # If shapes are constant, the head reads all places, so that its shape does not depend on how many are wanted.
    with torch.autocast(lm.device.type, enabled=False):
        value = head((hidden if constant else states).to(head.weight.dtype))
    value = value.index_select(0, at) if constant else value
    return value[:, 0] if value.shape[1] == 1 else value


def _number(r: Readout, logits: Tensor, token: Tensor) -> Tensor:
    """One readout of the distributions softmax(logits), [N, V], at tokens [N]."""
    if r.kind == "entropy":
        return entropy(logits)
    if r.kind == "logp":
        return chosen(logits, token)
    if r.kind == "rank":
        return (logits > logits.gather(1, token[:, None])).sum(-1) + 1
    ids, logp = most_likely(logits, min(r.top, logits.shape[1]))
    return torch.stack([ids.to(logp.dtype), logp], 1)


def _temperatures(lm: LM, wanted: Sequence[Readout], laws: Sequence[SamplingLaw], law: np.ndarray) -> Tensor | None:
    """One temperature for each token, if every law is only a temperature and the compiled readout is available; else
    None."""
    if lm.device.type != "cuda" or not lm.compiled.wanted or lm.dtype == torch.float64 or not len(law):
        return None
    used = [laws[k] for k in np.unique(law) if k >= 0]
    only = all(dataclasses.replace(w, temperature=1.0).plain and w.temperature > 0 for w in used)
    if not only or any(r.kind not in ("logp", "entropy") for r in wanted) or len({r.law for r in wanted}) > 1:
        return None
    # index -1 is the last entry: the model's own distribution
    table = np.array([w.temperature for w in laws] + [1.0], np.float32)
    return moved(table[law] if wanted[0].law else np.ones(len(law), np.float32), lm.device)


def _fused(lm: LM, states: Tensor, goal: Tensor, heat: Tensor, wanted: Sequence[Readout]) -> list[Tensor]:
    """The readouts in chunks of one shape, each recomputed in the backward pass."""
    number, entropies = len(goal), any(r.kind == "entropy" for r in wanted)
    pad = -number % compiled.CHUNK
    states, goal = F.pad(states, (0, 0, 0, pad)), F.pad(goal, (0, pad))
    heat = F.pad(heat, (0, pad), value=1.0)
    parts = []
    for first in range(0, number, compiled.CHUNK):
        span = slice(first, first + compiled.CHUNK)
        args = (lm, states[span], goal[span], heat[span], entropies)
        grad = torch.is_grad_enabled()
        parts.append(checkpoint(compiled.readout, *args, use_reentrant=False) if grad else compiled.readout(*args))
    whole = [torch.cat(p)[:number] for p in zip(*parts)]
    return [whole[0] if r.kind == "logp" else whole[1] for r in wanted]


def exact_kl(a: Tensor, b: Tensor) -> Tensor:
    """KL(softmax a || softmax b) per row = sum_v p_a(v) (log p_a(v) - log p_b(v)). Tokens without mass under a count
    0."""
    pa, pb = a.log_softmax(-1), b.log_softmax(-1)
    gap = torch.where(pa == NEVER, torch.zeros_like(pa), pa - pb)
    return (pa.exp() * gap).sum(-1)


def _grouped(readouts: Sequence[Readout]) -> dict[tuple[str, str, str], list[Readout]]:
    groups: dict[tuple[str, str, str], list[Readout]] = {}
    for r in readouts:
        groups.setdefault((r.model, r.where, r.at), []).append(r)
    return groups


@contextlib.contextmanager
def _as(models: Mapping[str, LM], name: str):
    """The model called `name`; "x/base" is x with its adapter off."""
    root, _, part = name.partition("/")
    if root not in models:
        raise LearnError(f"the objective reads model '{name}', but this run has only: {', '.join(models)}")
    with models[root].without_adapter() if part == "base" else contextlib.nullcontext():
        yield models[root]


def _autocast(lm: LM, amp: bool):
    return torch.autocast(lm.device.type, torch.bfloat16) if amp else contextlib.nullcontext()
