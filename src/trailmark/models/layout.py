"""Lay a micro-batch of samples out for one forward pass: as padded rows, as packed rows, or as a trie.

Objectives never see the layout. They see one flat token axis M (the tokens of all samples, one sample after the other).
`where[m]` is the place of token m in the [B, L] layout. So a shared prefix is computed once and read by many samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from trailmark.types import Sample, SamplingLaw

Shape = Literal["auto", "tree", "flat", "rows", "left", "fixed"]
RICHNESS = {"rows": 0, "left": 1, "flat": 1, "tree": 2}  # order of the layouts that a model may compute exactly
FIXED_ROWS, FIXED_BUCKET = 4, 32  # shape "fixed": rows of a pass, and the multiple that widths are rounded up to
NEAR = 256  # on a CPU, attention to this many places costs a small model about as much as the rest of its layers


@dataclass(frozen=True, eq=False)
class Packed:
    ids: np.ndarray  # [B, L]
    end: np.ndarray  # [B, L] where the subtree of each place ends
    pos: np.ndarray  # [B, L] position in its own sequence
    where: np.ndarray  # [M] flat place of each sample token
    row: np.ndarray  # [M] which sample
    index: np.ndarray  # [M] which token of it
    streams: dict[str, np.ndarray]  # each [M, ...]
    laws: tuple[SamplingLaw, ...]
    samples: tuple[Sample, ...]
    constant: bool = False  # the shape is constant, because a row must not depend on its neighbours

    @property
    def computed(self) -> int:
        """The number of places that the forward pass computes, padding included."""
        return self.ids.size


def trie(rows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray]]:
    """tokens, end, pos of the trie of `rows` in depth-first order, and the nodes of each row.

    If rows are sorted as big-endian bytes, neighbours share the longest prefixes, so one pass over neighbours is
    enough.
    """
    order = sorted(range(len(rows)), key=lambda r: rows[r].astype(">u4").tobytes())
    tokens: list[np.ndarray] = []
    pos: list[np.ndarray] = []
    nodes: list[np.ndarray] = [np.empty(0, np.int64)] * len(rows)
    end = np.empty(sum(len(r) for r in rows), np.int64)
    count, path, before = 0, np.empty(0, np.int64), np.empty(0, np.int64)
    for r in order:
        row = rows[r]
        shared = common_prefix(before, row)
        end[path[shared:]] = count  # these subtrees are complete
        fresh = np.arange(count, count + len(row) - shared)
        path = np.concatenate([path[:shared], fresh])
        tokens.append(row[shared:])
        pos.append(np.arange(shared, len(row)))
        count += len(fresh)
        nodes[r], before = path, row
    end[path] = count
    return np.concatenate(tokens), end[:count], np.concatenate(pos), nodes


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differ = np.nonzero(a[:n] != b[:n])[0]
    return int(differ[0]) if len(differ) else n


def lay_out(samples: Sequence[Sample], shape: Shape = "tree", multiple: int = 1, budget: int | None = None) -> Packed:
    """Place samples in one [B, L]. `multiple`: pad L up to a multiple of it (FlexAttention needs 128). With a `budget`
    of places, samples that share nothing may be put in separate lines if that is cheaper; without, all are in one line.
    "fixed" are padded rows of constant height: `micro_batches` gives it only samples of one width."""
    rows = [s.tokens for s in samples]
    if shape in ("rows", "left", "fixed"):
        width = _fixed_width(rows[0], multiple) if shape == "fixed" else _up(max(map(len, rows)), multiple)
        height = FIXED_ROWS if shape == "fixed" else len(rows)
        ids, pos = np.zeros((height, width), np.int64), np.zeros((height, width), np.int64)
        # padding attends to itself only, and no token attends to it
        end = np.broadcast_to(np.arange(1, width + 1), ids.shape).copy()
        places = []
        for b, row in enumerate(rows):
            start = width - len(row) if shape == "left" else 0
            span = slice(start, start + len(row))
            ids[b, span], pos[b, span], end[b, span] = row, np.arange(len(row)), start + len(row)
            places.append(b * width + np.arange(start, start + len(row)))
    else:
        pieces = [[r] for r in range(len(rows))] if shape == "flat" else _pieces(rows, multiple, budget)
        tries = [trie([rows[r] for r in piece]) for piece in pieces]
        starts = np.cumsum([0, *(len(t[0]) for t in tries)])
        tokens, position = np.concatenate([t[0] for t in tries]), np.concatenate([t[2] for t in tries])
        ends = np.concatenate([t[1] + start for t, start in zip(tries, starts)])
        places = [np.empty(0, np.int64)] * len(rows)
        for piece, (_, _, _, nodes), start in zip(pieces, tries, starts):
            for r, path in zip(piece, nodes):
                places[r] = path + start
        line, offset, width, _ = _lines(np.diff(starts), multiple, budget and max(budget, len(tokens)))
        root = np.repeat(np.arange(len(pieces)), np.diff(starts))
        place = offset[root] + np.arange(len(tokens))  # within its line
        width = _up(width, multiple)
        ids, pos = np.zeros((int(line.max()) + 1, width), np.int64), np.zeros((int(line.max()) + 1, width), np.int64)
        end = np.broadcast_to(np.arange(1, width + 1), ids.shape).copy()
        at = line[root], place
        ids[at], pos[at], end[at] = tokens, position, ends + offset[root]
        flat = at[0] * width + place
        places = [flat[nodes] for nodes in places]
    laws, law = _laws(samples)
    streams = {name: _stream(samples, name) for name in sorted({n for s in samples for n in s.streams} - {"law"})}
    streams["law"] = law
    return Packed(
        ids,
        end,
        pos,
        np.concatenate(places),
        np.repeat(np.arange(len(rows)), [len(r) for r in rows]),
        np.concatenate([np.arange(len(r)) for r in rows]),
        streams,
        laws,
        tuple(samples),
        shape == "fixed",
    )


def micro_batches(samples: Sequence[Sample], budget: int, shape: Shape = "tree", multiple: int = 1) -> list[Packed]:
    """Split a batch so that each part computes at most `budget` places (a single unit may exceed it).

    Samples of one unit stay together. Neighbours share prefixes (tree) or lengths (rows). "fixed" has no budget: its
    parts have at most `FIXED_ROWS` samples of one width, in their order.
    """
    if shape == "fixed":
        widths: dict[int, list[Sample]] = {}
        for s in samples:
            widths.setdefault(_fixed_width(s.tokens, multiple), []).append(s)
        return [
            lay_out(group[k : k + FIXED_ROWS], shape, multiple)
            for group in widths.values()
            for k in range(0, len(group), FIXED_ROWS)
        ]
    units: dict[str, list[Sample]] = {}
    for n, s in enumerate(samples):
        units.setdefault(s.unit or f"\0{n}", []).append(s)
    if shape in ("rows", "left"):
        ordered = sorted(units.values(), key=lambda u: max(len(s.tokens) for s in u))
    else:
        ordered = sorted(units.values(), key=lambda u: u[0].tokens.astype(">u4").tobytes())
    parts: list[list[Sample]] = []
    cost, widest, before = 0, 0, np.empty(0, np.int64)
    for unit in ordered:
        lengths = [len(s.tokens) for s in unit]
        if shape in ("rows", "left"):
            fits = parts and max(widest, *lengths) * (len(parts[-1]) + len(unit)) <= budget
            add = 0
        else:
            add = sum(lengths)
            if shape == "tree":
                for one in unit:
                    add -= common_prefix(before, one.tokens)
                    before = one.tokens
            fits = parts and cost + add <= budget
        if fits:
            parts[-1].extend(unit)
            cost, widest = cost + add, max(widest, *lengths)
        else:
            parts.append(list(unit))
            cost, widest = sum(lengths), max(lengths)
    return [lay_out(part, shape, multiple, budget) for part in parts]


def saving(samples: Sequence[Sample]) -> float:
    """The share of tokens that a trie computes only once."""
    total = sum(len(s.tokens) for s in samples)
    return 1.0 - len(trie([s.tokens for s in samples])[0]) / total if total else 0.0


def _pieces(rows: Sequence[np.ndarray], multiple: int, budget: int | None) -> list[list[int]]:
    """Which rows form one trie. If lines are short, a short prefix that all rows share (a BOS, a header) is cheaper to
    compute again than to join all rows in one long line. So the smallest shared prefix that still joins neighbours is
    chosen by its cost."""
    if budget is None or multiple > 1:
        return [list(range(len(rows)))]
    order = sorted(range(len(rows)), key=lambda r: rows[r].astype(">u4").tobytes())
    lengths = np.array([len(rows[r]) for r in order])
    shared = np.array([0, *(common_prefix(rows[a], rows[b]) for a, b in pairwise(order))])
    found, least = shared < 1, np.inf
    for joins in (1, 2, 5, 9, 17, 33, 65, 129):
        cut = shared < joins
        sizes = np.bincount(np.cumsum(cut) - 1, lengths - np.where(cut, 0, shared)).astype(np.int64)
        cost = _lines(sizes, multiple, max(budget, int((lengths - shared).sum())))[3]
        if cost < least:
            found, least = cut, cost
    return [list(part) for part in np.split(np.array(order), np.nonzero(found)[0][1:])]


def _lines(sizes: np.ndarray, multiple: int, budget: int | None) -> tuple[np.ndarray, np.ndarray, int, float]:
    """Where each piece goes (pieces share nothing): its line, the offset of its places (places count on from piece to
    piece), the width of the lines, and the cost.

    A GPU skips masked blocks, so one long line is best there (`multiple` > 1). A CPU computes the whole square of a
    line. So the pieces are put into several lines, largest first, with the width for which places * (1 + width / NEAR)
    is least.
    """
    total, largest, first = int(sizes.sum()), int(sizes.max()), np.cumsum(sizes) - sizes
    zeros = np.zeros(len(sizes), np.int64)
    cost = total * (1 + total / NEAR) if budget is None or total <= budget else np.inf
    found = zeros, zeros, total, cost
    if budget is None or multiple > 1:
        return found
    for width in sorted({min(total, int(largest * k)) for k in (1, 1.25, 1.5, 2, 3, 4)}):
        line, offset, free = zeros.copy(), zeros.copy(), []
        for piece in np.argsort(-sizes, kind="stable"):
            room = next((k for k, left in enumerate(free) if left >= sizes[piece]), len(free))
            if room == len(free):
                free.append(width)
            line[piece], offset[piece] = room, width - free[room] - first[piece]
            free[room] -= int(sizes[piece])
        used = width - min(free)
        area = used * len(free)
        if area <= budget and area * (1 + used / NEAR) < cost:
            cost = area * (1 + used / NEAR)
            found = line, offset, used, cost
    return found


def _fixed_width(row: np.ndarray, multiple: int) -> int:
    """The width of a row under "fixed". It depends on that row only, so that its shape does not depend on its
    neighbours."""
    multiple = max(FIXED_BUCKET, multiple)
    return -(-len(row) // multiple) * multiple


def _up(n: int, multiple: int) -> int:
    """`n` rounded up. With a `multiple`, there are eight lengths between two powers of two, so that lengths repeat."""
    if multiple > 1:
        multiple = max(multiple, (1 << (n - 1).bit_length()) // 16) if n > 1 else multiple
    return -(-n // multiple) * multiple


def _laws(samples: Sequence[Sample]) -> tuple[tuple[SamplingLaw, ...], np.ndarray]:
    """One table of laws for the batch, and each token's index in it."""
    table: dict[SamplingLaw, int] = {}
    parts = []
    for s in samples:
        number = np.array([table.setdefault(law, len(table)) for law in s.laws] + [-1], np.int64)
        parts.append(number[s.streams["law"]] if "law" in s.streams else np.full(len(s.tokens), -1))
    return tuple(table), np.concatenate(parts)


def _stream(samples: Sequence[Sample], name: str) -> np.ndarray:
    like = next(s.streams[name] for s in samples if name in s.streams)
    return np.concatenate(
        [
            s.streams[name] if name in s.streams else np.zeros((len(s.tokens), *like.shape[1:]), like.dtype)
            for s in samples
        ]
    )
