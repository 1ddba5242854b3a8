"""Does this model's attention compute shared prefixes exactly? There are two checks, because each finds what the other
misses.

1. The gradient of one row's output with respect to tokens outside its path is exactly 0 (nothing leaks).
2. Packed results equal those of the rows alone (nothing else depends on the layout: positions, windows, mixers).
"""

from __future__ import annotations

import numpy as np
import torch

from trailmark.models.attention import Layout, Prefill, Slots
from trailmark.models.layout import Shape, lay_out
from trailmark.models.lm import LM
from trailmark.types import Sample


def check_layout(lm: LM, shape: Shape = "tree", length: int = 24) -> str:
    """'' if the layout is exact for this model, else what went wrong."""
    draw = np.random.default_rng(0)
    top = min(lm.vocab, 1000)
    longest = min(length + 6, lm.context)
    shared = draw.integers(0, top, max(0, longest - 6) // 2)
    sizes = [max(1, longest - 6 + 3 * k - len(shared)) for k in range(3)]
    rows = [np.concatenate([shared, draw.integers(0, top, n)]) for n in sizes]
    rows.append(draw.integers(0, top, min(length, longest)))
    packed = lay_out([Sample(tokens=r) for r in rows], shape, lm.pad_multiple)
    device = lm.device
    ids, end, pos = (torch.as_tensor(a, device=device) for a in (packed.ids, packed.end, packed.pos))
    embed = lm.base.get_input_embeddings()
    seen: list[torch.Tensor] = []

    def keep(module: object, args: object, out: torch.Tensor) -> torch.Tensor:
        seen.append(out.detach().requires_grad_())
        return seen[-1]

    was_training = lm.model.training
    lm.train(False)
    hook = embed.register_forward_hook(keep)
    try:
        with torch.enable_grad():
            out = lm.hidden(ids, Layout(end, pos), pos)
            flat = out.reshape(-1, out.shape[-1])
            last = int(packed.where[packed.row == 1][-1])
            (grad,) = torch.autograd.grad(flat[last].float().square().sum(), seen[0])
    finally:
        hook.remove()
    off = np.setdiff1d(np.arange(packed.ids.size), packed.where[packed.row == 1])
    leak = float(grad.reshape(-1, grad.shape[-1])[torch.as_tensor(off, device=device)].abs().max())
    with torch.no_grad():
        got = lm.logits(flat[torch.as_tensor(packed.where, device=device)]).float()
        want = []
        for row in rows:
            one = lay_out([Sample(tokens=row)], "rows", lm.pad_multiple)
            a, b, c = (torch.as_tensor(x, device=device) for x in (one.ids, one.end, one.pos))
            want.append(lm.logits(lm.hidden(a, Layout(b, c), c)[0, : len(row)]).float())
        expected = torch.cat(want)
    lm.train(was_training)
    gap = float((got - expected).abs().max())
    allowed = {torch.float64: 5e-6, torch.float32: 5e-6}.get(lm.dtype, 0.05) * max(1.0, float(expected.abs().max()))
    if lm.device.type == "cuda":
        allowed *= 20  # there, float32 kernels without TF32 differ by a few 1e-5 between shapes
    lm.leaks = leak != 0.0
    if lm.leaks:
        return f"tokens outside a row's own path change it (gradient {leak:.2g})"
    if not gap <= allowed:
        return f"packed and separate rows differ by {gap:.2g} in logits (allowed {allowed:.2g})"
    return ""


def decodes(lm: LM, prompt: int = 5, more: int = 3) -> str:
    """'' if decoding token by token from cached keys and values equals one pass over the whole sequence. A mixer with
    its own state (convolution, recurrence) fails this, because only keys and values are cached."""
    if lm.decodes is None:
        if lm.leaks is None:  # a model that was not loaded by `load_model`
            before, lm.compiled.wanted = lm.compiled.wanted, False  # one look is not worth compiling for
            check_layout(lm, "flat")
            lm.compiled.wanted = before
        # A small effect of a state may be lost in the rounding below. A gradient that leaks is never small enough.
        if lm.leaks:
            lm.decodes = "its layers see more than keys and values (tokens of another row change it)"
            return lm.decodes
        device, n = lm.device, min(prompt + more, lm.context)
        prompt = min(prompt, n - 1)
        ids = (torch.arange(n, device=device)[None] * 37 + 11) % lm.vocab
        pos = torch.arange(n, device=device)[None]
        lm.train(False)
        with torch.no_grad():
            whole = lm.logits(lm.hidden(ids, Layout(torch.full_like(ids, n), pos), pos))[0].float()
            head = Prefill(torch.full_like(ids[:, :prompt], prompt), pos[:, :prompt])
            lm.hidden(ids[:, :prompt], head, pos[:, :prompt])
            lm.kept = sum(x.shape[1] * x.shape[3] for both in head.kept.values() for x in both)
            slots = Slots(1, 32)
            slots.write([0], head.kept, [0])
            gap = 0.0
            for t in range(prompt, n):
                step = lm.hidden(ids[:, t : t + 1], slots.at(pos[0, t : t + 1]), pos[:, t : t + 1])
                gap = max(gap, float((lm.logits(step)[0, 0].float() - whole[t]).abs().max()))
        allowed = {torch.float64: 1e-5, torch.float32: 1e-4}.get(lm.dtype, 0.25) * max(1.0, float(whole.abs().max()))
        lm.decodes = (
            ""
            if gap <= allowed
            else f"decoding from cached keys and values differs from a whole pass by {gap:.2g} in logits"
        )
    return lm.decodes


def richest_layout(lm: LM) -> tuple[str, tuple[str, ...]]:
    """The best of tree > flat > rows that is exact for this model, and a note for each that is not."""
    notes = []
    shapes: tuple[Shape, ...] = ("tree", "flat")
    for shape in shapes:
        wrong = check_layout(lm, shape)
        if not wrong:
            return shape, tuple(notes)
        notes.append(f"model '{lm.name}': {shape} packing is not exact for this model and is not used: {wrong}")
    return "rows", tuple(notes)
