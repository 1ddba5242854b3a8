"""Layouts are the same as those of a second implementation, which goes over rows and pieces one by one."""

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from trailmark.models import layout
from trailmark.models.layout import NEAR, _up, lay_out, micro_batches, saving
from trailmark.types import Sample


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


def plain_layout(rows, shape, multiple, budget):
    pieces = [[r] for r in range(len(rows))] if shape == "flat" else plain_pieces(rows, multiple, budget)
    tries = [trie([rows[r] for r in piece]) for piece in pieces]
    starts = np.cumsum([0, *(len(t[0]) for t in tries)])
    tokens, position = np.concatenate([t[0] for t in tries]), np.concatenate([t[2] for t in tries])
    ends = np.concatenate([t[1] + start for t, start in zip(tries, starts)])
    places = [np.empty(0, np.int64)] * len(rows)
    for piece, (_, _, _, nodes), start in zip(pieces, tries, starts):
        for r, path in zip(piece, nodes):
            places[r] = path + start
    line, offset, width, _ = plain_lines(np.diff(starts), multiple, budget and max(budget, len(tokens)))
    root = np.repeat(np.arange(len(pieces)), np.diff(starts))
    place = offset[root] + np.arange(len(tokens))  # within its line
    width = _up(width, multiple)
    ids, pos = np.zeros((int(line.max()) + 1, width), np.int64), np.zeros((int(line.max()) + 1, width), np.int64)
    end = np.broadcast_to(np.arange(1, width + 1), ids.shape).copy()
    at = line[root], place
    ids[at], pos[at], end[at] = tokens, position, ends + offset[root]
    flat = at[0] * width + place
    places = [flat[nodes] for nodes in places]
    return ids, end, pos, np.concatenate(places)


def plain_pieces(rows: Sequence[np.ndarray], multiple: int, budget: int | None) -> list[list[int]]:
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
        cost = plain_lines(sizes, multiple, max(budget, int((lengths - shared).sum())))[3]
        if cost < least:
            found, least = cut, cost
    return [list(part) for part in np.split(np.array(order), np.nonzero(found)[0][1:])]


def plain_lines(sizes: np.ndarray, multiple: int, budget: int | None) -> tuple[np.ndarray, np.ndarray, int, float]:
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


def batch(kind, draw):
    """Token sequences of one kind: how much they share, how long they are."""
    token = lambda n, high=250: draw.integers(0, high, n)
    if kind == "groups":  # samples of a prompt share it, and all prompts share a header
        header = token(draw.integers(0, 9))
        prompts = [np.concatenate([header, token(draw.integers(3, 60))]) for _ in range(draw.integers(1, 9))]
        made = [np.concatenate([p, token(draw.integers(1, 30))]) for p in prompts for _ in range(draw.integers(1, 9))]
    elif kind == "ragged":
        made = [token(draw.integers(1, 120)) for _ in range(draw.integers(1, 60))]
    elif kind == "nested":  # few tokens, so that rows are often beginnings of others, or equal to them
        made = [token(draw.integers(1, 9), 3) for _ in range(draw.integers(1, 60))]
    else:  # labels: many rows of the same length
        prompt = token(draw.integers(1, 40))
        number = draw.integers(2, 90)
        made = [np.concatenate([prompt[: draw.integers(0, 2)], token(9), token(1)]) for _ in range(number)]
    return [made[k] for k in draw.permutation(len(made))]


@pytest.mark.parametrize("kind", ["groups", "ragged", "nested", "labels"])
def test_layouts_are_those_of_the_plain_code(kind):
    several = 0
    for seed in range(40):
        draw = np.random.default_rng([seed, len(kind)])
        rows = batch(kind, draw)
        for shape, multiple, budget in [("tree", 1, 8192), ("tree", 1, 200), ("tree", 1, None), ("tree", 128, 8192),
                                        ("flat", 1, 8192), ("flat", 1, 100), ("flat", 128, None)]:  # fmt: skip
            ids, end, pos, where = plain_layout(rows, shape, multiple, budget)
            made = lay_out([Sample(row) for row in rows], shape, multiple, budget)
            for want, got in ((ids, made.ids), (end, made.end), (pos, made.pos), (where, made.where)):
                assert want.dtype == got.dtype and np.array_equal(want, got), (kind, seed, shape, multiple, budget)
            several += len(ids) > 1
    assert several > 20, "hardly any of these layouts has several lines"


@pytest.mark.parametrize("kind", ["groups", "nested"])
def test_tries_are_those_of_the_plain_code(kind):
    for seed in range(40):
        rows = batch(kind, np.random.default_rng(seed))
        *want, nodes = trie(rows)
        *got, paths = layout.trie(rows)
        assert all(np.array_equal(a, b) for a, b in zip([*want, *nodes], [*got, *paths], strict=True))
        assert saving([Sample(r) for r in rows]) == 1.0 - len(want[0]) / sum(map(len, rows))


def test_lines_are_not_searched_again_for_cuts_that_are_the_same(monkeypatch):
    """Rows that share nothing are cut the same way however short a shared beginning may be."""
    draw, calls, lines = np.random.default_rng(0), [], layout._lines
    monkeypatch.setattr(layout, "_lines", lambda *a: calls.append(a) or lines(*a))
    samples = [Sample(draw.permutation(250)[:n]) for n in draw.integers(5, 60, 32)]
    micro_batches(samples, 8192)
    assert len(calls) <= 3, "once to choose the cuts, once more if two rows begin alike, once to place the pieces"


@pytest.mark.parametrize("number", [96, 128, 512])
def test_a_full_micro_batch_is_put_into_lines(number):
    """A part that fills its budget to the last place leaves no room for padding, so it was one line of 8,000 places,
    and attention computed its square."""
    draw = np.random.default_rng(3)
    samples = [Sample(draw.integers(0, 250, n)) for n in draw.integers(30, 150, number)]
    parts = micro_batches(samples, 8192)
    assert sum(len(p.samples) for p in parts) == number and len(parts) > 1
    for part in parts:
        assert part.computed <= 8192 and part.ids.shape[1] <= 4 * 150
    apart = [dataclasses.replace(s, unit=f"u{k // 3}") for k, s in enumerate(samples)]
    where = [{s.unit for s in p.samples} for p in micro_batches(apart, 8192)]
    assert sum(map(len, where)) == len(set().union(*where)), "units stay together"
    on_gpu = micro_batches(samples, 8192, multiple=128)
    assert {len(part.ids) for part in on_gpu} == {1}, "a GPU skips what is masked"


def test_wider_models_have_wider_lines():
    draw = np.random.default_rng(3)
    samples = [Sample(draw.integers(0, 250, n)) for n in draw.integers(30, 150, 32)]
    few, many = (lay_out(samples, budget=8192, near=layout.near_for(width)) for width in (128, 576))
    assert layout.near_for(64) == layout.near_for(128) == NEAR and layout.near_for(576) == 1728
    assert many.ids.shape[1] > few.ids.shape[1] and many.computed < few.computed


def test_one_long_prefix_stays_one_line():
    """Sixteen long answers to one long prompt fill a part: two halves would compute the prompt twice."""
    draw = np.random.default_rng(3)
    prompt = draw.integers(0, 250, 4000)
    samples = [Sample(np.concatenate([prompt, draw.integers(0, 250, 250)])) for _ in range(16)]
    (part,) = micro_batches(samples, 8192)
    assert len(part.ids) == 1 and 8000 - 16 <= part.computed <= 8000
