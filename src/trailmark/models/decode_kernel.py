"""Attention of one new token per row over that row's own keys, as one GPU kernel. It reads each key and value once, and
only as many as the row has. The result of a row depends on that row only."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

BLOCK = 64  # keys in one block
FEWEST = 64  # with fewer programs, ordinary matrix products fill the GPU better
GROUP = 16  # queries that share a key head, padded to the size of a matrix unit


def _optional(name: str) -> Any:
    """Import a module that torch for CPUs does not have; None if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


triton, tl = _optional("triton"), _optional("triton.language")
jit: Any = (lambda kernel: kernel) if triton is None else triton.jit


def suits(q: Tensor, keys: Tensor) -> bool:
    """Whether the kernel supports this case: a GPU, enough rows, and a supported size and number of heads."""
    size, heads = q.shape[-1], keys.shape[1]
    return (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and size in (16, 32, 64, 128, 256)
        and q.shape[1] // heads <= GROUP
        and q.shape[0] * heads >= FEWEST
        and triton is not None
    )


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    index: Tensor,
    scale: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """q [B, H, 1, D], keys and values [B, Hk, C, D] -> [B, H, 1, D]; row b attends to columns 0 to index[b]."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _attend(q, keys, values, index, scale, window or 0, softcap or 0.0)


@torch.library.custom_op("trailmark::one_token", mutates_args=())
def _attend(
    q: Tensor, keys: Tensor, values: Tensor, index: Tensor, scale: float, window: int, softcap: float
) -> Tensor:
    """A custom operator, so that a compiler uses the kernel as it is."""
    rows, heads, _, size = q.shape
    shared = keys.shape[1]
    q = q.contiguous()
    out = torch.empty_like(q)
    one_token[(rows, shared)](
        q, keys, values, out, index,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), keys.stride(0), keys.stride(1), keys.stride(2),
        scale, window, softcap,
        GROUPS=heads // shared, GROUP=GROUP, SIZE=size, BLOCK=BLOCK, WINDOW=window > 0, CAP=softcap > 0,
        EXACT=q.dtype == torch.float32,
    )  # fmt: skip
    return out


@_attend.register_fake
def _(q: Tensor, keys: Tensor, values: Tensor, index: Tensor, scale: float, window: int, softcap: float) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


@jit
def one_token(
    q, k, v, out, index, q_row, q_head, o_row, o_head, k_row, k_head, k_column, scale, window, cap,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    last = tl.load(index + row).to(tl.int32)
    g = tl.arange(0, GROUP)
    d = tl.arange(0, SIZE)
    mine = q + row * q_row + (head * GROUPS + g)[:, None] * q_head + d[None, :]
    query = tl.load(mine, mask=g[:, None] < GROUPS, other=0.0)
    top = tl.full([GROUP], float("-inf"), tl.float32)
    mass = tl.zeros([GROUP], tl.float32)
    total = tl.zeros([GROUP, SIZE], tl.float32)
    first = 0
    if WINDOW:
        first = tl.maximum(last - window + 1, 0) // BLOCK * BLOCK
    base = row * k_row + head * k_head
    for start in range(first, last + 1, BLOCK):
        j = start + tl.arange(0, BLOCK)
        seen = j <= last
        if WINDOW:
            seen = seen & (last - j < window)
        at = base + j[:, None] * k_column + d[None, :]
        key = tl.load(k + at, mask=seen[:, None], other=0.0)
        value = tl.load(v + at, mask=seen[:, None], other=0.0)
        if EXACT:
            score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        else:
            score = tl.dot(query, tl.trans(key)) * scale
        if CAP:
            score = cap * (2.0 * tl.sigmoid(2.0 * score / cap) - 1.0)
        score = tl.where(seen[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp(score - higher[:, None])
        shrink = tl.exp(top - higher)
        mass = mass * shrink + tl.sum(weight, 1)
        if EXACT:
            total = total * shrink[:, None] + tl.dot(weight, value, input_precision="ieee")
        else:
            total = total * shrink[:, None] + tl.dot(weight.to(value.dtype), value)
        top = higher
    place = out + row * o_row + (head * GROUPS + g)[:, None] * o_head + d[None, :]
    tl.store(place, (total / mass[:, None]).to(out.dtype.element_ty), mask=g[:, None] < GROUPS)
