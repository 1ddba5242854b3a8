"""The samples that have a slot in a local engine, and the step that gives each of them one more token."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch

from trailmark.engines.decode_ahead import Ahead
from trailmark.engines.drawing import Drawer
from trailmark.engines.prefill import Prompt
from trailmark.engines.prefix_cache import PrefixCache
from trailmark.engines.running import KeysValues, Running
from trailmark.models.attention import Slots, widths
from trailmark.models.decode_step import short_step
from trailmark.models.free_decoding import FreeDecoding, Groups
from trailmark.models.lm import LM

WORTH_KEEPING = 64  # a shorter prompt is not kept for later prompts


class Decoder:
    """With `ahead` the host is one step behind the device, as on a GPU; on a CPU there is nothing to overlap. With
    `reuse`, later prompts continue from what free slots hold. Not with fixed shapes: the content of a slot depends on
    neighbours, and a decoded token is not bitwise equal to a prefilled one."""

    def __init__(self, lm: LM, slots: int, capacity: int, bucket: int, max_len: int, fixed: bool, ahead: bool):
        self.lm, self.slots, self.capacity, self.bucket = lm, slots, capacity, bucket
        self.max_len, self.fixed, self.reuse = max_len, fixed, ahead and not fixed
        self.drawer = Drawer(lm, ahead)
        self.cache = Slots(slots, capacity)
        self.short = None if ahead else short_step(lm)
        self.free = not fixed and not ahead and lm.device.type == "cpu" and lm.dtype == torch.float32
        on_cpu = lm.device.type == "cpu"
        self._widths = widths(capacity, bucket) if on_cpu else [capacity]  # with fixed shapes
        self.running: list[Running | None] = [None] * slots
        self._length = np.zeros(slots, np.int64)  # tokens whose keys and values a slot holds
        self._last = np.zeros(slots, np.int64)  # the last token of its sample
        self._group = np.full(slots, -1)  # samples that began with the same prompt
        self._groups = 0  # how many there were so far
        self._ahead = Ahead(lm, self.cache) if ahead else None
        # the step whose tokens are not read yet, and its samples
        self._in_flight: tuple[int, list[Running | None]] | None = None
        self.prefixes = PrefixCache()
        self._turn = 0  # how often slots were given away
        self._free_since = [0] * slots  # turn in which a slot was left

    @property
    def busy(self) -> bool:
        return any(self.running) or self._in_flight is not None

    def clear(self) -> None:
        """Forget all samples and what slots hold."""
        self.running = [None] * self.slots
        self._length[:] = self._last[:] = 0
        self._group[:] = -1
        self._in_flight = None
        self.prefixes.clear()

    # -- slots --------------------------------------------------------------------------------------------------

    def free_slots(self) -> list[int]:
        """The slots to give to waiting samples. The one that has waited longest for a continuing prompt comes first."""
        slots = [k for k, sample in enumerate(self.running) if sample is None]
        if self.reuse:
            self._turn += 1
            slots.sort(key=self._free_since.__getitem__)
        return slots

    def start(self, slots: Sequence[int], samples: Sequence[Running]) -> None:
        """Give each sample a slot. The keys and values of samples of one prefill are copied together."""
        groups = {s.request.prompt: int(n) for s, n in zip(self.running, self._group) if s is not None}
        together: dict[int, tuple[KeysValues, list[int], list[int]]] = {}
        for slot, sample in zip(slots, samples):
            self.prefixes.drop(slot)
            (kept, row), sample.prefilled = sample.prefilled, ({}, 0)  # so that its memory is let go
            _, to, rows = together.setdefault(id(kept), (kept, [], []))
            to.append(slot)
            rows.append(row)
            self.running[slot], self._length[slot] = sample, len(sample.request.prompt)
            self._last[slot] = sample.tokens[-1]
            self._groups += 1
            self._group[slot] = groups.setdefault(sample.request.prompt, self._groups)
        for kept, to, rows in together.values():
            self.cache.write(to, kept, rows)
        if self._ahead is not None and samples:
            state = [(len(s.request.prompt), s.tokens[-1], len(s.tokens), *s.keys) for s in samples]
            self._ahead.seat(slots, state, [s.request.law.temperature for s in samples])

    def leave(self, slot: int, sample: Running) -> None:
        """Free a slot. A later prompt may begin with what it holds."""
        self.running[slot], self._length[slot], self._last[slot], self._group[slot] = None, 0, 0, -1
        if self.reuse:
            prompt = sample.request.prompt
            whole = *prompt, *sample.tokens[:-1]
            self.prefixes.add(slot, whole, (len(prompt), len(whole)))
            self._free_since[slot] = self._turn

    def forget(self) -> None:
        """Free the slots of callers that have gone away."""
        for slot, sample in enumerate(self.running):
            if sample is not None and sample.job.future.done():
                self.leave(slot, sample)

    def remember(self, prompts: Mapping[int, Prompt], kept: KeysValues, used: Collection[int], ready: int) -> None:
        """Keep prompts (by their rows of a prefill) in free slots, for the next decision of their conversation: their
        samples ended with the first token (decisions among labels) and never had a slot. The slots in `used`, and as
        many as samples are `ready`, are left alone."""
        if not self.reuse or self._ahead is None:
            return
        empty = (slot for slot, sample in enumerate(self.running) if sample is None and slot not in used)
        free = sorted(empty, key=self._free_since.__getitem__)
        free = free[: max(0, len(free) - ready)]
        rows = [row for row, prompt in prompts.items() if len(prompt) >= WORTH_KEEPING][: len(free)]
        if not rows:
            return
        slots = free[: len(rows)]
        self.cache.write(slots, kept, rows)
        state = [(len(prompts[row]), 0, 0, 0, 0) for row in rows]
        self._ahead.seat(slots, state, [1.0] * len(slots))  # an idle slot writes after its prompt
        self._turn += 1  # so that the next pass takes other slots
        for slot, row in zip(slots, rows):
            self.prefixes.add(slot, prompts[row], (len(prompts[row]),))
            self._free_since[slot] = self._turn

    # -- a step -------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> None:
        """One more token for every sample that has a slot."""
        self.lm.train(False)
        if self._ahead is not None:
            return self._step_ahead(self._ahead)
        rows, most = self.slots, int(self._length.max()) + 1
        if self.fixed:
            width = next(w for w in self._widths if w >= most)
        else:
            width = -(-most // self.bucket) * self.bucket
            rows = self._close_gaps(width)
        length, last = (torch.as_tensor(x[:rows], device=self.lm.device) for x in (self._length, self._last))
        samples = self.running[:rows]
        self.drawer.draw(self._next(length, last, width), samples)
        self._advance(samples)

    def _next(self, length: torch.Tensor, last: torch.Tensor, width: int) -> torch.Tensor:
        """The logits after the last token of the first slots, [slots, V]."""
        if self.free:
            prompts = np.array([0 if s is None else len(s.request.prompt) for s in self.running[: len(length)]])
            layout = FreeDecoding(self.cache, length, Groups(self._group[: len(length)], prompts))
        else:
            layout = self.cache.at(length, width, same=self.fixed)
        if self.short is not None:
            return self.lm.logits(self.short(last, layout, length))
        return self.lm.logits(self.lm.hidden(last[:, None], layout, length[:, None])[:, 0])

    def _close_gaps(self, width: int) -> int:
        """How many of the first slots hold all samples. If many of these are free, the last samples move there."""
        used = [slot for slot, sample in enumerate(self.running) if sample is not None]
        free = [slot for slot in range(len(used)) if self.running[slot] is None]
        if 8 * len(free) < used[-1] + 1 or not free:
            return used[-1] + 1
        moving = used[len(used) - len(free) :]
        self.cache.move(moving, free, width)
        for slot, to in zip(moving, free):
            for of_slots, none in ((self.running, None), (self._length, 0), (self._last, 0), (self._group, -1)):
                of_slots[to], of_slots[slot] = of_slots[slot], none  # type: ignore[index]
        return len(used)

    def _step_ahead(self, ahead: Ahead) -> None:
        """Start a step, then read the step before it. If a law needs sampling on the host, or a listener wants the most
        likely tokens, the host waits for this step."""
        waits = any(s is not None and (not s.simple or s.job.top) for s in self.running)
        if self._in_flight is not None and waits:
            self._read(ahead)
        if not any(self.running):
            self._in_flight = None  # all samples of that step have ended
            return
        started = ahead.launch(), list(self.running)
        if self._in_flight is not None:
            self._read(ahead)
        self._in_flight = started
        if waits:
            self._read(ahead)

    def _read(self, ahead: Ahead) -> None:
        """Read the tokens of the step in flight, and free the slots of samples that it ended."""
        assert self._in_flight is not None and ahead.logits is not None
        (number, samples), self._in_flight = self._in_flight, None
        # the other samples had ended before this step
        samples = [s if s is self.running[slot] else None for slot, s in enumerate(samples)]
        here = self.drawer.append(ahead.logits, samples, ahead.read(number).tolist())
        if here:
            ahead.correct(here, [samples[slot].tokens[-1] for slot in here])  # type: ignore[union-attr]
        self._advance(samples)

    def _advance(self, samples: Sequence[Running | None]) -> None:
        """Update the slots after a step: one token longer, or free."""
        for slot, sample in enumerate(samples):
            if sample is None:
                continue
            self._length[slot] += 1
            self._last[slot] = sample.tokens[-1]
            if sample.ended(self.lm.tokenizer, self.max_len):
                self.leave(slot, sample)
