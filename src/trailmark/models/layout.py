"""Lay a micro-batch of samples out for one forward pass: as padded rows, as packed rows, or as a trie.

Objectives never see the layout. They see one flat token axis M (the tokens of all samples, one sample after the other).
`where[m]` is the place of token m in the [B, L] layout. So a shared prefix is computed once and read by many samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Literal

import numpy as np

from trailmark.types import Sample, SamplingLaw

Shape = Literal["auto", "tree", "flat", "rows", "left", "fixed"]
RICHNESS = {"rows": 0, "left": 1, "flat": 1, "tree": 2}  # order of the layouts that a model may compute exactly
FIXED_ROWS, FIXED_BUCKET = 4, 32  # shape "fixed": rows of a pass, and the multiple that widths are rounded up to
NEAR = 256  # on a CPU, attention to this many places costs a small model about as much as the rest of its layers
NARROW = 128  # width of the models that `NEAR` is for


def near_for(width: int) -> int:
    """`NEAR` of a model with hidden states of this width. The rest of a layer grows with the square of the width, and
    attention with the width only."""
    return NEAR if width <= NARROW else max(NEAR, 3 * width)


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
    """tokens, end, pos of the trie of `rows` in depth-first order, and the nodes of each row."""
    order, shared = _in_order(rows)
    tokens, end, pos, paths = _grown([rows[r] for r in order], shared)
    nodes = [np.empty(0, np.int64)] * len(rows)
    for r, path in zip(order, paths):
        nodes[r] = path
    return tokens, end, pos, nodes


def _in_order(rows: Sequence[np.ndarray]) -> tuple[list[int], np.ndarray]:
    """The rows sorted as big-endian bytes, and how many tokens each shares with the one before it. In this order
    neighbours share the longest prefixes, so one pass over neighbours finds the whole trie."""
    order = sorted(range(len(rows)), key=lambda r: rows[r].astype(">u4").tobytes())
    shared = [0, *(common_prefix(rows[a], rows[b]) for a, b in pairwise(order))]
    return order, np.array(shared[: len(rows)], np.int64)


def _grown(
    rows: Sequence[np.ndarray], shared: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray]]:
    """tokens, end, pos of the tries of `rows`, of which each continues the first `shared` tokens of the one before it,
    and the nodes of each row. A row that shares nothing begins the next trie."""
    lengths = np.array([len(row) for row in rows], np.int64)
    fresh = lengths - shared
    begins = np.cumsum(fresh) - fresh
    number = np.arange(fresh.sum())
    tokens = np.concatenate([row[s:] for row, s in zip(rows, shared.tolist())])
    pos = number - np.repeat(begins - shared, fresh)
    end = np.empty_like(number)
    path, nodes, before = np.empty(lengths.max(), np.int64), [], 0
    for length, s, begin in zip(lengths.tolist(), shared.tolist(), begins.tolist()):
        end[path[s:before]] = begin  # these subtrees are complete
        path[s:length] = number[begin : begin + length - s]
        nodes.append(path[:length].copy())
        before = length
    end[path[:before]] = len(number)
    return tokens, end, pos, nodes


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    first = int(differ.argmax()) if n else 0
    return first if n and differ[first] else n


def lay_out(
    samples: Sequence[Sample],
    shape: Shape = "tree",
    multiple: int = 1,
    budget: int | None = None,
    near: int = NEAR,
) -> Packed:
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
        order, shared = (list(range(len(rows))), np.zeros(len(rows), np.int64)) if shape == "flat" else _in_order(rows)
        ordered = [rows[r] for r in order]
        lengths = np.array([len(row) for row in ordered])
        cut = shared < 1 if shape == "flat" else _cuts(lengths, shared, multiple, budget, near)
        sizes = _sizes(lengths, shared, cut)
        tokens, ends, position, nodes = _grown(ordered, np.where(cut, 0, shared))
        line, offset, width, _ = _lines(sizes, multiple, budget and max(budget, len(tokens)), near)
        root = np.repeat(np.arange(len(sizes)), sizes)
        place = offset[root] + np.arange(len(tokens))  # within its line
        width = _up(width, multiple)
        ids, pos = np.zeros((int(line.max()) + 1, width), np.int64), np.zeros((int(line.max()) + 1, width), np.int64)
        end = np.broadcast_to(np.arange(1, width + 1), ids.shape).copy()
        at = line[root], place
        ids[at], pos[at], end[at] = tokens, position, ends + offset[root]
        flat = at[0] * width + place
        places = [np.empty(0, np.int64)] * len(rows)
        for r, path in zip(order, nodes):
            places[r] = flat[path]
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


def micro_batches(
    samples: Sequence[Sample], budget: int, shape: Shape = "tree", multiple: int = 1, near: int = NEAR
) -> list[Packed]:
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
    return [packed for part in parts for packed in _in_lines(part, shape, multiple, budget, near)]


def _in_lines(part: Sequence[Sample], shape: Shape, multiple: int, budget: int, near: int) -> list[Packed]:
    """A part of a batch; or its two halves, if it is so full that padded lines of a good width do not fit into the
    budget, and the long ones that do cost more than twice as much."""
    packed = lay_out(part, shape, multiple, budget, near)
    full = 4 * packed.computed > 3 * budget and packed.ids.shape[1] > near
    if multiple > 1 or shape in ("rows", "left") or not full:
        return [packed]
    borders = [k for k in range(1, len(part)) if not part[k].unit or part[k].unit != part[k - 1].unit]
    if not borders:
        return [packed]
    half = min(borders, key=lambda k: abs(2 * k - len(part)))
    halves = [lay_out(some, shape, multiple, budget, near) for some in (part[:half], part[half:])]
    cost = lambda p: p.computed * (1 + p.ids.shape[1] / near)
    return halves if 2 * sum(map(cost, halves)) < cost(packed) else [packed]


def saving(samples: Sequence[Sample]) -> float:
    """The share of tokens that a trie computes only once."""
    total = sum(len(s.tokens) for s in samples)
    return 1.0 - len(trie([s.tokens for s in samples])[0]) / total if total else 0.0


def _cuts(
    lengths: np.ndarray, shared: np.ndarray, multiple: int, budget: int | None, near: int
) -> np.ndarray:
    """Which of the ordered rows begin a new trie. If lines are short, a short prefix that all rows share (a BOS, a
    header) is cheaper to compute again than to join all rows in one long line. So the smallest shared prefix that still
    joins neighbours is chosen by its cost."""
    if budget is None or multiple > 1:
        return np.arange(len(shared)) < 1
    found, least, before, budget = shared < 1, np.inf, 0, max(budget, int((lengths - shared).sum()))
    for joins in (1, 2, 5, 9, 17, 33, 65, 129):
        cut = shared < joins
        if (pieces := int(cut.sum())) == before:
            continue  # the same cuts as before
        before = pieces
        cost = _lines(_sizes(lengths, shared, cut), multiple, budget, near, least)[3]
        if cost < least:
            found, least = cut, cost
    return found


def _sizes(lengths: np.ndarray, shared: np.ndarray, cut: np.ndarray) -> np.ndarray:
    """The number of places of each trie, if new ones begin at `cut`."""
    return np.add.reduceat(lengths - np.where(cut, 0, shared), np.nonzero(cut)[0])


def _lines(
    sizes: np.ndarray, multiple: int, budget: int | None, near: int, below: float = np.inf
) -> tuple[np.ndarray, np.ndarray, int, float]:
    """Where each piece goes (pieces share nothing): its line, the offset of its places (places count on from piece to
    piece), the width of the lines, and the cost. Nobody asks for lines that cost `below` or more.

    A GPU skips masked blocks, so one long line is best there (`multiple` > 1). A CPU computes the whole square of a
    line. So the pieces are put into several lines, largest first, with the width for which places * (1 + width / near)
    is least.
    """
    total, largest = int(sizes.sum()), int(sizes.max())
    zeros = np.zeros(len(sizes), np.int64)
    cost = total * (1 + total / near) if budget is None or total <= budget else np.inf
    found = zeros, zeros, total, cost
    if budget is None or multiple > 1:
        return found
    falling = np.argsort(-sizes, kind="stable")
    equal = [(size, sum(1 for _ in group)) for size, group in groupby(sizes[falling].tolist())]
    for width in sorted({min(total, int(largest * k)) for k in (1, 1.25, 1.5, 2, 3, 4)}):
        if max(total, largest * -(-total // width)) * (1 + largest / near) >= min(cost, below):
            continue  # however well the pieces fit
        rooms, starts, free = _first_fit(equal, width)
        used = width - min(free)
        area = used * len(free)
        if area <= budget and area * (1 + used / near) < cost:
            cost = area * (1 + used / near)
            line, offset = zeros.copy(), np.cumsum(sizes) - sizes
            line[falling], offset[falling] = rooms, starts - offset[falling]
            found = line, offset, used, cost
    return found


def _first_fit(equal: Sequence[tuple[int, int]], width: int) -> tuple[list[int], list[int], list[int]]:
    """Put pieces into the first line with room, a new one if there is none: the line and the start of each, and what
    is left of each line. `equal`: sizes, and how many pieces of each size, in order. Pieces of one size fill a line
    before they go to the next."""
    rooms, starts, free = list[int](), list[int](), list[int]()
    for size, number in equal:
        k = 0
        while number:
            if k == len(free):
                free.append(width)
            if (left := free[k]) >= size:
                fit = min(number, left // size) if size else number
                rooms += [k] * fit
                starts += [width - left + n * size for n in range(fit)]
                free[k] = left - fit * size
                number -= fit
            k += 1
    return rooms, starts, free


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
