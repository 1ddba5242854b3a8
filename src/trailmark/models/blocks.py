"""Attention to a trie on a CPU, block by block. A dense mask costs the whole square of a line; a trie needs little of it.

The places of a line fall into chains: each place follows the one before it, until another branch begins. The queries of
a block of neighbouring chains need the keys of the block and of its ancestors only, so each block is a product of its
own. Short chains share a block if that costs less than another call. Which blocks are made depends on the layout and on
the shape of the heads, never on a timing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

CALL = 1 << 19  # what another block costs, in pairs of places x heads x size of a head


class Block(NamedTuple):
    """Places [first, last) of a line, the pieces of the line that they may see, and what of those."""

    first: int
    last: int
    pieces: tuple[int, ...]
    mask: Tensor | None  # [places, seen], True where seen; None: plainly causal


class Plan(NamedTuple):
    cuts: list[int]  # sizes of the pieces of a line
    blocks: list[Block]


def plan(end: np.ndarray, pos: np.ndarray, window: int | None, call: int) -> list[Plan] | None:
    """The blocks of each line of a layout ([B, L]) if they cost less than its squares; a block more costs `call`
    pairs."""
    lines = [_spans(line, call) for line in end]
    if sum(span.cost for spans in lines for span in spans) >= end.size * end.shape[1] + call:
        return None
    return [_plan(line, at, spans, window) for line, at, spans in zip(end, pos, lines)]


class _Span(NamedTuple):
    first: int
    last: int
    above: int  # number of ancestors of the first place
    cost: int  # in pairs


def _spans(end: np.ndarray, call: int) -> list[_Span]:
    """The chains of a line; neighbours are joined where that costs less."""
    length = len(end)
    number = np.arange(length)
    above = (number - np.cumsum(np.bincount(end, minlength=length + 1))[:length]).tolist()
    starts = np.nonzero(np.append(True, end[:-1] == number[1:]) | np.isin(number, end))[0].tolist()
    spans: list[_Span] = []
    for a, b in zip(starts, [*starts[1:], length]):
        own = b - a
        chain = _Span(a, b, above[a], call + (own * (above[a] + own) if above[a] else own * own // 2))
        if spans:
            first, _, up, cost = spans[-1]
            joined = _Span(first, b, up, call + (b - first) * (up + b - first))
            if joined.cost <= cost + chain.cost:
                spans[-1] = joined
                continue
        spans.append(chain)
    return spans


def _plan(end: np.ndarray, pos: np.ndarray, spans: list[_Span], window: int | None) -> Plan:
    number, borders = np.arange(len(end)), {0, len(end)}
    for a, *_ in spans:
        seen = np.nonzero(end[:a] > a)[0]
        borders |= {a, int(seen[-1]) + 1 if len(seen) else 0}
    cuts = sorted(borders)
    parts = list(zip(cuts, cuts[1:]))
    blocks = []
    for a, b, *_ in spans:
        mine = [n for n, (s, t) in enumerate(parts) if s < b and (end[s:t] > a).any()]
        rows, seen = number[a:b, None], np.concatenate([number[slice(*parts[n])] for n in mine])[None]
        mask = (seen <= rows) & (rows < end[seen])
        if window is not None:
            mask &= pos[rows] - pos[seen] < window
        causal = mask.shape[0] == mask.shape[1] and bool((mask == np.tri(b - a, dtype=bool)).all())
        blocks.append(Block(a, b, tuple(mine), None if causal else torch.from_numpy(mask)))
    return Plan([t - s for s, t in parts], blocks)


def added(plans: list[Plan], dtype: torch.dtype) -> list[Plan]:
    """The plans with masks that are added to scores, so that not every layer makes them again."""
    def turn(mask: Tensor | None) -> Tensor | None:
        return None if mask is None else torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -torch.inf)

    return [p._replace(blocks=[b._replace(mask=turn(b.mask)) for b in p.blocks]) for p in plans]


def attend(plans: list[Plan], q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """q [B, H, L, D], k and v [B, Hkv, L, D] -> [B, H, L, D]."""
    lines = []
    for n, (cuts, blocks) in enumerate(plans):
        keys, values = (x[n : n + 1].split(cuts, 2) for x in (k, v))
        queries = q[n : n + 1].split([b.last - b.first for b in blocks], 2)
        parts = []
        for block, mine in zip(blocks, queries):
            seen = (torch.cat([x[p] for p in block.pieces], 2) for x in (keys, values))
            parts.append(_block(mine, *seen, block.mask, scale).transpose(1, 2))
        lines.append(parts[0] if len(parts) == 1 else torch.cat(parts, 1))
    return (lines[0] if len(lines) == 1 else torch.cat(lines)).transpose(1, 2)


def _block(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    if mask is None or groups == 1:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=groups > 1
        )
    # Heads that share keys become rows of one product: few rows make slow products.
    rows = q.reshape(1, k.shape[1], -1, q.shape[3])
    out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask.repeat(groups, 1), scale=scale)
    return out.reshape(q.shape)
