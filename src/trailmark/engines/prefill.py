"""Prefill: compute prompts for the slots of a local engine. Which prompts share a pass, and the pass itself.

A pass gives the logits after each prompt, and a layout that holds the keys and values of the prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from trailmark.models.attention import Extension, Prefill, Slots
from trailmark.models.lm import LM

GPU_PREFILL = 65536  # tokens computed at once on a GPU
CPU_PREFILL = 1024  # tokens computed at once on a CPU with free shapes
CPU_PASS = 256  # on a CPU a pass costs about as much as this many tokens of a small model, whatever it computes
WORTH = 16384  # below this many tokens, a pass on a GPU takes the same time

Prompt = tuple[int, ...]
Held = tuple[int, int]  # a slot, and how many tokens of a prompt it holds


@dataclass
class Prefiller:
    lm: LM
    fixed: bool  # constant shapes
    free: bool  # shapes may change from call to call: on a GPU
    bucket: int  # prompt lengths are rounded up to a multiple of this
    given_rows: int | None = None  # prompts of one pass; None: 4, or on a GPU as many as fill it
    chunk: int = GPU_PREFILL  # tokens of a prompt computed in one pass

    def parts(self, prompts: list[Prompt]) -> Iterator[tuple[int, list[Prompt]]]:
        """Which prompts are computed together, and how wide. With free shapes on a GPU: the longest first, as many as
        fill it; much shorter ones wait for the next pass if this one is large enough. Otherwise prompts of one width,
        in rows of that width."""
        if not self.fixed and self.given_rows is None and self.lm.device.type == "cpu":
            yield from cpu_parts(prompts)
            return
        wide = lambda p: -(-len(p) // self.bucket) * self.bucket
        if self.free:
            groups = [sorted(prompts, key=len, reverse=True)]
        else:
            by_width: dict[int, list[Prompt]] = {}
            for prompt in prompts:
                by_width.setdefault(wide(prompt), []).append(prompt)
            groups = list(by_width.values())
        for group in groups:
            while group:
                width = wide(group[0])
                rows = min(len(group), self.rows(width))
                cuts = (k for k in range(-(-WORTH // width), rows) if 4 * wide(group[k]) <= 3 * width)
                rows = next(cuts, rows) if self.free else rows
                yield width, group[:rows]
                group = group[rows:]

    def rows(self, width: int) -> int:
        """The number of rows of a prefill of this width. It depends on the width only, so that neighbours cannot change
        a row."""
        if self.given_rows is None:
            filled = (GPU_PREFILL if self.free else GPU_PREFILL // 8) // width
            return max(4, min(256, filled)) if self.lm.device.type == "cuda" else 4
        return self.given_rows

    def compute(self, part: list[Prompt], width: int, chunked: bool) -> tuple[Prefill, torch.Tensor]:
        """One pass over prompts of at most `width` tokens. `chunked`: in several passes if that is too long for one."""
        rows = self.rows(width) if self.fixed else len(part)
        if self.free and rows * width >= WORTH:  # few shapes, for compiled layers
            step = max(1, (1 << (rows - 1).bit_length()) // 8)
            rows = min(-(-rows // step) * step, max(rows, self.rows(width)))
        ids, pos = np.zeros((rows, width), np.int64), np.zeros((rows, width), np.int64)
        end = np.broadcast_to(np.arange(1, width + 1), ids.shape).copy()
        for r, prompt in enumerate(part):
            n = len(prompt)
            ids[r, :n], pos[r, :n], end[r, :n] = prompt, np.arange(n), n
        device = self.lm.device
        a, b, c = (torch.as_tensor(x, device=device) for x in (ids, end, pos))
        layout = Prefill(b, c, plain=not self.fixed)
        if chunked and width > self.chunk:
            return self._in_chunks(part, a)
        hidden = self.lm.hidden(a, layout, c)
        last = torch.as_tensor([len(p) - 1 for p in part] + [0] * (rows - len(part)), device=device)
        return layout, self.lm.logits(hidden[torch.arange(rows, device=device), last])

    def _in_chunks(self, part: list[Prompt], ids: torch.Tensor) -> tuple[Prefill, torch.Tensor]:
        """A prefill of prompts that are too long for one pass. Every chunk attends to the chunks before it."""
        device, rows = self.lm.device, len(ids)
        lengths = torch.as_tensor([len(p) for p in part] + [1] * (rows - len(part)), device=device)
        layout: Prefill | None = None
        logits = None
        for first in range(0, ids.shape[1], self.chunk):
            end = min(first + self.chunk, ids.shape[1])
            pos = torch.arange(first, end, device=device)[None, :].expand(rows, -1)
            if layout is None:
                layout = Prefill(torch.full_like(pos, end), pos)
            else:
                layout = Extension(layout.kept, torch.full_like(lengths, first), pos, end)
            hidden = self.lm.hidden(ids[:, first:end], layout, pos)
            last = lengths - 1 - first
            found = self.lm.logits(hidden[torch.arange(rows, device=device), last.clamp(0, end - first - 1)])
            here = ((last >= 0) & (last < end - first))[:, None]
            logits = found if logits is None else torch.where(here, found, logits)
        assert layout is not None and logits is not None
        return layout, logits

    def extension_parts(self, held: dict[Prompt, Held]) -> Iterator[list[Prompt]]:
        """Prompts whose beginnings are in slots, in passes: each has prompts with about as much left to compute, as
        many as fill it."""
        rest = lambda p: len(p) - held[p][1]
        ordered = sorted(held, key=rest, reverse=True)
        while ordered:
            width, longest = rest(ordered[0]), max(map(len, ordered))
            rows = max(1, min(256, GPU_PREFILL // width, 8 * GPU_PREFILL // longest))
            rows = next((k for k in range(16, min(rows, len(ordered))) if 4 * rest(ordered[k]) <= width), rows)
            yield ordered[:rows]
            ordered = ordered[rows:]

    def extend(self, part: list[Prompt], held: list[Held], cache: Slots) -> tuple[Extension, torch.Tensor]:
        """Compute the part of prompts after the beginnings that are in slots of `cache`."""
        slots, had = zip(*held)
        news = [len(p) - n for p, n in zip(part, had)]
        new = max(news)
        ids, pos = np.zeros((len(part), new), np.int64), np.zeros((len(part), new), np.int64)
        for r, (prompt, n) in enumerate(zip(part, had)):
            ids[r, : len(prompt) - n] = prompt[n:]
            pos[r] = np.minimum(n + np.arange(new), len(prompt) - 1)
        device, width = self.lm.device, max(map(len, part))
        a, b, length = (torch.as_tensor(x, device=device) for x in (ids, pos, np.array(had)))
        layout = Extension(cache.read(list(slots), max(had)), length, b, width)
        hidden = self.lm.hidden(a, layout, b)
        last = torch.as_tensor([n - 1 for n in news], device=device)
        return layout, self.lm.logits(hidden[torch.arange(len(part), device=device), last])


def cpu_parts(prompts: list[Prompt]) -> Iterator[tuple[int, list[Prompt]]]:
    """Which prompts a CPU computes together with free shapes, and how wide: the longest first. A shorter prompt joins a
    pass as long as all the padding costs less than another pass. Widths are not rounded."""
    ordered = sorted(prompts, key=len, reverse=True)
    while ordered:
        width, padding, rows = len(ordered[0]), 0, 0
        for prompt in ordered:
            padding += width - len(prompt)
            if rows and (padding > CPU_PASS or (rows + 1) * width > CPU_PREFILL):
                break
            rows += 1
        yield width, ordered[:rows]
        ordered = ordered[rows:]
