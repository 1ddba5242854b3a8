"""One attention function for everything: padded rows, packed rows, trees of shared prefixes, and decoding slots.

A layout gives every token j one integer, `end[j]`, the index where its subtree ends. Token i may attend to token j
exactly if `j <= i < end[j]`. A right- or left-padded row, several packed rows, and a trie in depth-first order are all
such layouts, so the code that uses a layout does not know its kind. A sliding window counts *positions* (depth in the
trie), never indices.

The function is registered with transformers under `NAME`. A model whose attention implementation is `NAME` reads the
layout from the keyword `tree`. Without it, the model uses ordinary SDPA (or eager attention with soft-capping).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from trailmark.errors import ModelError
from trailmark.models import blocks, decode_kernel

_collects = gc.isenabled()
gc.disable()  # the collector would look through the growing heap of modules again and again: a fifth of this import
try:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
finally:
    if _collects:
        gc.enable()

NAME = "trailmark"
FLEX_BLOCK = 128


@functools.cache
def failures() -> tuple[type[BaseException], ...]:
    """What torch raises if it cannot compile. The compiler takes half a second to import, so only a GPU asks."""
    import torch._dynamo.exc
    import torch._inductor.exc
    import torch._inductor.runtime.triton_heuristics as heuristics

    found = [
        torch._dynamo.exc.TorchDynamoException,
        getattr(torch._inductor.exc, "InductorError", None),
        getattr(heuristics, "NoTritonConfigsError", None),
    ]
    return tuple(f for f in found if f is not None)


class Flex:
    """Whether FlexAttention can be compiled on this machine: yes, until it fails."""

    works = True

    @classmethod
    def failed(cls, problem: BaseException) -> None:
        if cls.works:
            print(f"this torch cannot compile FlexAttention ({type(problem).__name__}): attention is computed with a "
                  "mask, more slowly", file=sys.stderr)  # fmt: skip
        cls.works = False


class How(NamedTuple):
    """How scores are computed: their scale, the window in positions, and the soft cap; None: the usual way."""

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None


class Layout:
    """`end`, `pos`: [B, L] integers. Masks are built once per window and shared by all layers. If the layout is
    `constant`, how a row is computed does not depend on the others."""

    def __init__(self, end: Tensor, pos: Tensor, constant: bool = False):
        if end.shape != pos.shape or end.ndim != 2:
            raise ValueError(f"end {tuple(end.shape)} and pos {tuple(pos.shape)} must both be [rows, length]")
        self.end, self.pos, self.constant = end, pos, constant
        self._masks: dict[int | None, Tensor] = {}
        self._blocks: dict[int | None, Any] = {}
        self._plans: dict[Any, list[blocks.Plan] | None] = {}

    def mask(self, window: int | None) -> Tensor:
        """[B, 1, L, L] bool, True where row i may attend to column j."""
        if window not in self._masks:
            i = torch.arange(self.end.shape[1], device=self.end.device)
            allowed = (i[None, None, :] <= i[None, :, None]) & (i[None, :, None] < self.end[:, None, :])
            if window is not None:
                allowed &= self.pos[:, :, None] - self.pos[:, None, :] < window
            self._masks[window] = allowed[:, None]
        return self._masks[window]

    @property
    def flexible(self) -> bool:
        """Whether FlexAttention computes this layout."""
        return Flex.works and self.end.is_cuda and self.end.shape[1] % FLEX_BLOCK == 0

    def block_mask(self, window: int | None) -> Any:
        """The same rule for FlexAttention, without ever forming [L, L]."""
        if window not in self._blocks:
            end, pos = self.end, self.pos

            def rule(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                allowed = (j <= i) & (i < end[b, j])
                return allowed if window is None else allowed & (pos[b, i] - pos[b, j] < window)

            rows, length = end.shape
            with torch.no_grad():
                self._blocks[window] = _flex()[1](
                    rule, rows, None, length, length, device=str(end.device), BLOCK_SIZE=FLEX_BLOCK
                )
        return self._blocks[window]

    def plans(self, window: int | None, q: Tensor) -> list[blocks.Plan] | None:
        """How heads like these are computed block by block on a CPU, if that is faster."""
        key = window, q.shape[1] * q.shape[3], q.dtype
        if key not in self._plans:
            call = blocks.CALL // key[1]
            made = None if self.constant else blocks.plan(self.end.numpy(), self.pos.numpy(), window, call)
            self._plans[key] = made and blocks.added(made, q.dtype)
        return self._plans[key]

    def attend(self, module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, how: How) -> Tensor:
        if self.flexible and torch.compiler.is_compiling():
            return flexed(q, k, v, self.block_mask(how.window), how.scale, how.softcap)
        if self.flexible:
            try:
                return flexed(q, k, v, self.block_mask(how.window), how.scale, how.softcap)
            except failures() as problem:
                Flex.failed(problem)
        plans = self.plans(how.window, q) if q.device.type == "cpu" and how.softcap is None else None
        if plans is not None:
            return blocks.attend(plans, q, k, v, how.scale)
        return _dense(q, k, v, self.mask(how.window), how.scale, how.softcap)


def number_of(module: torch.nn.Module) -> int:
    """Which layer an attention module belongs to. Compiled code must not read it: it would be a constant there, and
    every layer a graph of its own."""
    return module.layer_idx  # type: ignore[return-value]


class Prefill(Layout):
    """A layout that keeps the keys and values of every layer, so that decoding slots can start from them. With `plain`
    rows it is computed without a mask on a CPU too: a row is causal, and its padding stands behind it."""

    def __init__(self, end: Tensor, pos: Tensor, plain: bool = False):
        super().__init__(end, pos)
        self.plain = plain
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    @torch.compiler.disable
    def attend(self, module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, how: How) -> Tensor:
        layer = number_of(module)
        if layer in self.kept:
            raise ModelError(f"{type(module).__name__} attends twice in one layer: only one pair of keys is kept")
        self.kept[layer] = (k, v)
        if (q.is_cuda or self.plain) and how.softcap is None and (how.window is None or q.shape[2] <= how.window):
            groups = q.shape[1] // k.shape[1]  # whole rows are plainly causal: no mask, nothing to compile
            k, v = (x.repeat_interleave(groups, 1) for x in (k, v)) if groups > 1 else (k, v)
            return F.scaled_dot_product_attention(q, k, v, scale=how.scale, is_causal=True)
        return super().attend(module, q, k, v, how)


class Extension(Prefill):
    """New tokens after prefixes whose keys and values are already stored: `before[layer]` holds them as [B, Hkv, C, D],
    of which row b uses the first `length[b]`. `pos` are the positions of the new tokens. `kept` receives prefix and new
    tokens together, `width` columns wide."""

    def __init__(self, before: dict[int, tuple[Tensor, Tensor]], length: Tensor, pos: Tensor, width: int):
        super().__init__(torch.zeros_like(pos), pos)
        self.before = before
        columns = next(iter(before.values()))[0].shape[2]
        place = torch.arange(width, device=pos.device)[None, :].expand(len(pos), -1)
        new = columns + (place - length[:, None]).clamp(max=pos.shape[1] - 1)
        self.index = torch.where(place < length[:, None], place, new)[:, None, :, None]
        self.columns = place[0]

    def mask(self, window: int | None) -> Tensor:
        """[B, 1, new tokens, width] bool: a token attends to its own position and to those before it."""
        if window not in self._masks:
            gap = self.pos[:, :, None] - self.columns
            allowed = gap >= 0
            self._masks[window] = (allowed if window is None else allowed & (gap < window))[:, None]
        return self._masks[window]

    @torch.compiler.disable
    def attend(self, module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, how: How) -> Tensor:
        layer = number_of(module)
        whole = []
        for old, new in zip(self.before[layer], (k, v)):
            both = torch.cat([old, new], 2)
            whole.append(both.gather(2, self.index.expand(-1, both.shape[1], -1, both.shape[3])))
        k, v = self.kept[layer] = whole[0], whole[1]
        if q.is_cuda and q.shape[1] > k.shape[1]:  # with a mask, shared heads have no fast kernel
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return _dense(q, k, v, self.mask(how.window), how.scale, how.softcap)


class Slots:
    """Keys and values of `rows` sequences that grow by one token at a time, each with its own length.

    Shapes stay the same while rows come and go, so the numbers of a row do not depend on its neighbours.
    """

    def __init__(self, rows: int, capacity: int):
        self.rows, self.capacity = rows, capacity
        self._heads: dict[int, Tensor] = {}  # number of heads -> [rows, heads], where each begins among all tokens
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def write(self, rows: list[int], kept: dict[int, tuple[Tensor, Tensor]], sources: list[int]) -> None:
        """Start slots `rows` from rows `sources` of a prefill. Columns after a prompt's end are never read."""
        if len(rows) == 1:
            to, of = slice(rows[0], rows[0] + 1), slice(sources[0], sources[0] + 1)
        else:
            device = next(iter(kept.values()))[0].device
            to, of = torch.tensor(rows, device=device), torch.tensor(sources, device=device)
        for layer, (k, v) in kept.items():
            if layer not in self.keys:
                with torch.inference_mode(False):  # so that they can be written to in any mode
                    self.keys[layer] = k.new_zeros(self.rows, k.shape[1], self.capacity, k.shape[3])
                    self.values[layer] = v.new_zeros(self.rows, v.shape[1], self.capacity, v.shape[3])
            self.keys[layer][to, :, : k.shape[2]] = k[of]
            self.values[layer][to, :, : v.shape[2]] = v[of]

    def read(self, rows: list[int], columns: int) -> dict[int, tuple[Tensor, Tensor]]:
        """Keys and values of some slots, as far as `columns`, by layer."""
        at = torch.tensor(rows, device=next(iter(self.keys.values())).device)
        return {n: (k[at, :, :columns], self.values[n][at, :, :columns]) for n, k in self.keys.items()}

    def move(self, rows: list[int], to: list[int], columns: int) -> None:
        """Copy slots `rows`, as far as `columns`, to the slots `to`."""
        device = next(iter(self.keys.values())).device
        a, b = torch.tensor(rows, device=device), torch.tensor(to, device=device)
        for layer in self.keys:
            for kept in (self.keys[layer], self.values[layer]):
                kept[b, :, :columns] = kept[a, :, :columns]

    def heads(self, number: int) -> Tensor:
        if number not in self._heads:
            self._heads[number] = torch.arange(self.rows * number).view(self.rows, number) * self.capacity
        return self._heads[number]

    def at(self, index: Tensor, width: int | None = None, same: bool = False) -> Decoding:
        """One step: the next token of the first len(index) rows goes to `index`; `width` limits how many columns are
        looked at. `same`: only if that changes no bit of the result."""
        return Decoding(self, index, width or self.capacity, same)


class Decoding:
    """One token of the first len(index) rows of some slots."""

    def __init__(self, slots: Slots, index: Tensor, width: int, same: bool = False):
        self.slots, self.index, self.width, self.same = slots, index, width, same
        self._masks: dict[tuple[int | None, int], Tensor] = {}
        self._places: dict[int, Tensor] = {}  # number of heads -> where new tokens go among all tokens of all heads

    def _write(self, new: Tensor, kept: Tensor) -> None:
        rows, heads, _, size = new.shape
        if new.device.type != "cpu":
            kept[torch.arange(rows, device=new.device), :, self.index] = new[:, :, 0]
            return
        if heads not in self._places:  # computed once for all layers
            self._places[heads] = (self.slots.heads(heads)[:rows] + self.index[:, None]).view(-1)
        kept.view(-1, size).index_copy_(0, self._places[heads], new.reshape(-1, size))

    def attend(self, module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, how: How) -> Tensor:
        layer, rows, (scale, window, softcap) = number_of(module), len(q), how
        keys, values = self.slots.keys[layer], self.slots.values[layer]
        self._write(k, keys)
        self._write(v, values)
        if decode_kernel.suits(q, keys):
            return decode_kernel.attend(q, keys, values, self.index, scale, window, softcap)
        width, whole = self.width, self.slots.capacity
        if self.same and width < whole:
            known = softcap is None and any_width(q.shape[1], keys.shape[1], q.shape[3], whole, q.dtype)
            width = width if known else whole
        if (window, width) not in self._masks:
            j = torch.arange(width, device=q.device)[None, :]
            allowed = j <= self.index[:, None]
            if window is not None:
                allowed = allowed & (self.index[:, None] - j < window)
            self._masks[window, width] = allowed[:, None, None, :]
        attend = _one_token if q.is_cuda and softcap is None else _dense
        k, v = keys[:rows, :, :width], values[:rows, :, :width]
        return attend(q, k, v, self._masks[window, width], scale, softcap)


def widths(capacity: int, bucket: int) -> list[int]:
    """The few widths that a step of constant shapes may look at: two for each power of two."""
    found = [w for k in range(capacity.bit_length()) for w in (2 << k, 3 << k)]
    return [*(w for w in found if w % bucket == 0 and w < capacity), capacity]


@functools.cache
@torch.no_grad()
def any_width(heads: int, shared: int, size: int, capacity: int, dtype: torch.dtype) -> bool:
    """Whether attention of one token on this CPU gives the same bits however many columns without keys follow. SDPA
    adds zeros for them, at the end of each sum."""
    draw = torch.Generator().manual_seed(0)
    shapes = (heads, 1), (shared, capacity), (shared, capacity)
    q, k, v = (torch.randn(2, *shape, size, generator=draw).to(dtype) for shape in shapes)
    for w in widths(capacity, 32)[:-1]:
        for n in (w // 2 + 1, w - 3, w):
            seen = (torch.arange(capacity) < n).expand(2, 1, 1, -1)
            narrow = _dense(q, k[:, :, :w], v[:, :, :w], seen[..., :w], None, None)
            if not torch.equal(narrow, _dense(q, k, v, seen, None, None)):
                return False
    return True


def _one_token(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None, softcap: float | None) -> Tensor:
    """One query per row, [B, H, 1, D]. Heads that share keys become rows of one product, so keys are read once."""
    rows, heads, _, size = q.shape
    scores = q.view(rows, k.shape[1], -1, size) @ k.transpose(2, 3) * (size**-0.5 if scale is None else scale)
    weights = scores.float().masked_fill(~mask, -torch.inf).softmax(-1).to(v.dtype)
    return (weights @ v).view(rows, heads, 1, -1)


def _dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None, softcap: float | None) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=groups > 1)
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores.softmax(-1) @ v


def flexed(q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float | None, softcap: float | None) -> Tensor:
    """FlexAttention with keys and values repeated to every query head: the backward pass of a few shared heads has too
    few blocks to fill a card. Inside a layer that is compiled as a whole it is part of that graph."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    capped = None if softcap is None else _softcap(softcap)
    if torch.compiler.is_compiling():
        return flex_attention(q, k, v, score_mod=capped, block_mask=mask, scale=scale)
    return _flex()[0](q, k, v, score_mod=capped, block_mask=mask, scale=scale)


@functools.cache
def _softcap(cap: float) -> Any:
    def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


@functools.cache
def set_up() -> None:
    """Settings of the compiler."""
    import torch._functorch.config as functorch

    # Past its limit of variants (dtype, window, grad mode, number of heads) torch runs code uncompiled, with a warning
    # only. Uncompiled, a block mask materialises [L, L] and attention its scores.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 128)
    if hasattr(functorch, "force_non_lazy_backward_lowering"):
        # So a failure to compile shows in the forward pass.
        functorch.force_non_lazy_backward_lowering = True  # type: ignore[assignment]


@functools.cache
def _flex() -> tuple[Any, Any]:
    set_up()
    return torch.compile(flex_attention, dynamic=True), torch.compile(create_block_mask, dynamic=True)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    tree: Layout | Decoding | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """q [B, H, L, D], k and v [B, Hkv, L, D] -> [B, L, H, D]. Dropout is never applied: on a tree it has no meaning."""
    if kwargs.get("s_aux") is not None or kwargs.get("position_bias") is not None:
        raise ModelError(f"{type(module).__name__} uses attention sinks or biases, which Trailmark does not compute")
    if tree is not None:
        out = tree.attend(module, query, key, value, How(scaling, sliding_window, softcap))
        return out.transpose(1, 2).contiguous(), None
    if _watching:
        _watching[-1].note(attention_mask, sliding_window)
    if attention_mask is not None:
        out = _dense(query, key, value, attention_mask, scaling, softcap)
    else:
        causal = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        out = _dense(query, key, value, causal.tril(key.shape[2] - query.shape[2]), scaling, softcap)
    return out.transpose(1, 2).contiguous(), None


def _mask(*args: Any, local_size: int | None = None, **kwargs: Any) -> Tensor | None:
    kwargs.update(allow_is_causal_skip=False)  # our function needs the mask, also for plain causal rows
    made = sdpa_mask(*args, local_size=local_size, **kwargs)
    if _watching and made is not None:
        _watching[-1].masks.append((made, local_size))
    return made


class Watched:
    """The windows of a pass without a layout: of the masks that transformers made, and those that layers were told."""

    def __init__(self) -> None:
        self.masks: list[tuple[Tensor, int | None]] = []
        self.pairs: set[tuple[int | None, int | None]] = set()  # of the mask of a layer, and what its function was told

    def note(self, mask: Tensor | None, window: int | None) -> None:
        for made, size in self.masks:
            if mask is not None and mask.data_ptr() == made.data_ptr():
                self.pairs.add((size or None, window or None))


_watching: list[Watched] = []


@contextlib.contextmanager
def watched() -> Iterator[Watched]:
    """Note the windows of the passes in this block."""
    _watching.append(Watched())
    try:
        yield _watching[-1]
    finally:
        _watching.pop()


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, _mask)
