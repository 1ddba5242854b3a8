"""Attention to a trie on a CPU, block by block. A mask costs the whole square of a line; a trie needs little of it.

The places of a line fall into chains: each place follows the one before it, until another branch begins. The queries of
a block of neighbouring chains need the keys of the block and of its ancestors only, so each block is a product of its
own. Short chains share a block if that costs less than another call. Which blocks are made depends on the layout and on
the shape of the heads, never on a timing.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

CALL = 1 << 19  # what another block costs, in pairs of places x heads x size of a head
RUN = 64  # places of padding that stay together


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
    if len(end) > 1 and end.shape[1] ** 2 <= 2 * call:
        return None  # not worth a look
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
    ended = np.bincount(end, minlength=length + 1)[:length]  # subtrees that end before each place
    above = number - np.cumsum(ended)
    lone = (above == 0) & (end == number + 1)  # padding: looked at in runs
    begins = (ended > 0) & ~(lone & np.append(False, lone[:-1]) & (number % RUN > 0))
    starts, above = [0, *np.nonzero(begins)[0].tolist()], above.tolist()
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
    starts, latest = np.array(cuts[:-1]), np.maximum.reduceat(end, cuts[:-1])
    blocks = []
    for a, b, *_ in spans:
        mine = np.nonzero((starts < b) & (latest > a))[0].tolist()
        mask = None
        if cuts[mine[0]] < a or end[a:b].min() < b or (window is not None and b - a > window):
            rows, seen = number[a:b, None], np.concatenate([number[cuts[n] : cuts[n + 1]] for n in mine])[None]
            allowed = (seen <= rows) & (rows < end[seen])
            if window is not None:
                allowed &= pos[rows] - pos[seen] < window
            mask = torch.from_numpy(allowed)
        blocks.append(Block(a, b, tuple(mine), mask))
    return Plan([b - a for a, b in pairwise(cuts)], blocks)


def added(plans: list[Plan], dtype: torch.dtype) -> list[Plan]:
    """The plans with masks that are added to scores, so that not every layer makes them again."""

    def turn(mask: Tensor | None) -> Tensor | None:
        return None if mask is None else torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -torch.inf)

    return [p._replace(blocks=[b._replace(mask=turn(b.mask)) for b in p.blocks]) for p in plans]


def attend(plans: list[Plan], q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """q [B, H, L, D], k and v [B, Hkv, L, D] -> [B, H, L, D]."""
    lines, shared = [], q.shape[1] > k.shape[1]
    for n, (cuts, blocks) in enumerate(plans):
        keys, values = (x[n : n + 1].split(cuts, 2) for x in (k, v))
        queries = q[n : n + 1].split([b.last - b.first for b in blocks], 2)
        parts = []
        for block, mine in zip(blocks, queries):
            seen, known = (torch.cat([x[p] for p in block.pieces], 2) for x in (keys, values))
            part = F.scaled_dot_product_attention(
                mine, seen, known, attn_mask=block.mask, is_causal=block.mask is None, scale=scale, enable_gqa=shared
            )
            parts.append(part.transpose(1, 2))
        lines.append(parts[0] if len(parts) == 1 else torch.cat(parts, 1))
    return (lines[0] if len(lines) == 1 else torch.cat(lines)).transpose(1, 2)
