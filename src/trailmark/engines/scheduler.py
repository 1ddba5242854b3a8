"""The order of work in a local engine: requests wait, prompts are computed, samples get slots, every slot decodes."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trailmark.engines.base import EngineError
from trailmark.engines.decoder import Decoder
from trailmark.engines.prefill import Prefiller, Prompt
from trailmark.engines.running import Job, Running
from trailmark.engines.schema import Schemas
from trailmark.engines.stops import Watch
from trailmark.engines.turns import Admission, DueTimes
from trailmark.models.attention import Prefill

MOST_DELAY = 8  # most turns that a prefill waits for more prompts


class Scheduler:
    def __init__(self, prefiller: Prefiller, decoder: Decoder, schemas: Schemas):
        self.prefiller, self.decoder, self.schemas = prefiller, decoder, schemas
        self.waiting: deque[Job] = deque()
        self.ready: deque[Running] = deque()  # prefilled, waiting for a slot
        self.open: set[Job] = set()
        self._of_parties: set[Job] = set()  # open jobs on somebody's behalf
        self._due = DueTimes()
        self._delay = 0  # turns that the waiting prefill has been delayed
        self._task: asyncio.Task | None = None

    def submit(self, job: Job) -> None:
        """Put a request in line, and work until nothing is left to do."""
        self.waiting.append(job)
        for jobs in (self.open, self._of_parties) if job.party is not None else (self.open,):
            jobs.add(job)
            job.future.add_done_callback(lambda _, jobs=jobs: jobs.discard(job))
        self._due.join(job)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())

    async def _work(self) -> None:
        """In each turn: admit requests, decode one token in every slot, wake finished callers."""
        try:
            await asyncio.sleep(0)  # callers that start together are admitted together
            while self.waiting or self.ready or self.decoder.busy:
                self._forget()
                room = len(self.ready) < self.decoder.slots or self._of_parties
                if self.waiting and room and self._worth_it():
                    self.prefill()
                self._give_slots()
                if self.decoder.busy:
                    self.decoder.step()
                await asyncio.sleep(0)
        # if the loop is cancelled, no caller may wait forever and no row may be half done
        except BaseException as problem:
            self._fail(problem)
            if not isinstance(problem, Exception):
                raise

    def _fail(self, problem: BaseException) -> None:
        error = EngineError(f"engine '{self.prefiller.lm.name}' failed: {type(problem).__name__}: {problem}")
        error.__cause__ = problem
        self.waiting.clear()
        self.ready.clear()
        self.decoder.clear()
        for job in list(self.open):
            if not job.future.done():
                job.future.set_exception(error)

    def _forget(self) -> None:
        """Drop the requests of callers that have gone away."""
        self.waiting = deque(job for job in self.waiting if not job.future.done())
        self.ready = deque(sample for sample in self.ready if not sample.job.future.done())
        self.decoder.forget()

    # -- prompts ------------------------------------------------------------------------------------------------

    def _worth_it(self) -> bool:
        """Whether to prefill now. With free shapes, a pass over few prompts costs a GPU as much as one over many. So
        the prefill waits for more prompts, but only for a few turns."""
        self._delay += 1
        if self.prefiller.free and len(self.waiting) < self.decoder.slots // 4 and self._delay < MOST_DELAY:
            return False
        self._delay = 0
        return True

    def _admit(self) -> dict[Prompt, list[Job]]:
        """The requests whose prompts are computed now, by prompt."""
        prompts: dict[Prompt, list[Job]] = {}
        slots, ready, jobs = self.decoder.slots, len(self.ready), list(self.waiting)
        admits: Callable[[Job], bool] | None = None
        if self._of_parties:
            room = self.prefiller.rows(self.decoder.capacity) * self.decoder.capacity
            admits = Admission(self._samples(self.ready), ready, slots, room).admits
            jobs.sort(key=lambda job: job.due)
        for job in jobs:
            # limits the memory of the stored keys and values
            if admits(job) if admits else job.request.prompt in prompts or ready < 2 * slots:
                prompts.setdefault(job.request.prompt, []).append(job)
                ready += job.request.n if job.request.max_tokens > 1 else 0
        admitted = {job for asked in prompts.values() for job in asked}
        self.waiting = deque(job for job in self.waiting if job not in admitted)
        self._due.admit(admitted)
        return prompts

    @torch.inference_mode()
    def prefill(self) -> None:
        """Compute every distinct waiting prompt once, and sample the first token of all its samples."""
        if not (prompts := self._admit()):
            return
        counts, prefixes = self.decoder.drawer.counts, self.decoder.prefixes
        self.prefiller.lm.train(False)
        found = {p: prefixes.find(p) for p in prompts} if self.decoder.reuse else {}
        held = {p: slot for p, slot in found.items() if slot is not None}
        counts.computed += sum(len(p) - held.get(p, (0, 0))[1] for p in prompts)
        counts.reused += sum(n for _, n in held.values())
        counts.prefills += len(prompts)
        passes = list(self.prefiller.extension_parts(held))
        for k, part in enumerate(passes):
            later = {held[p][0] for rest in passes[k + 1 :] for p in rest}
            made = self.prefiller.extend(part, [held[p] for p in part], self.decoder.cache)
            self._first_tokens(part, prompts, *made, later)
            del made  # memory for the next pass
        for width, part in self.prefiller.parts([p for p in prompts if p not in held]):
            made = self.prefiller.compute(part, width, chunked=self.decoder.reuse)
            self._first_tokens(part, prompts, *made)
            del made

    def _first_tokens(
        self, part: list[Prompt], prompts: dict[Prompt, list[Job]], layout: Prefill, logits: torch.Tensor,
        later: Sequence[int] | set[int] = (),
    ) -> None:  # fmt: skip
        """Sample the first token of every sample after its prompt. Samples that continue wait for a slot. `later`:
        slots that a later pass of this prefill starts from."""
        samples = [
            self._sample(job, k, (layout.kept, row))
            for row, prompt in enumerate(part) for job in prompts[prompt] for k in range(job.request.n)
        ]  # fmt: skip
        decoder = self.decoder
        decoder.drawer.draw_first(logits, samples, max(decoder.slots, 1), decoder.fixed)
        over = dict(enumerate(part))
        for sample in samples:
            if not sample.ended(decoder.lm.tokenizer, decoder.max_len):
                self.ready.append(sample)
                over.pop(sample.prefilled[1], None)
        decoder.remember(over, layout.kept, later, len(self.ready))

    def _sample(self, job: Job, number: int, prefilled: Any) -> Running:
        request, tokenizer = job.request, self.decoder.lm.tokenizer
        stops = request.stop_strings
        watch = Watch(tokenizer, stops, request.law.min_tokens) if stops else None
        guide = self.schemas.guide(request.schema, request.stop_ids) if request.schema else None
        return Running(job, number, prefilled, watch, guide)

    # -- slots --------------------------------------------------------------------------------------------------

    def _samples(self, more: Sequence[Running] | deque[Running] = ()) -> Counter[Any]:
        """How many samples of each party have a slot, or are among `more`."""
        return Counter(s.job.party for s in (*self.decoder.running, *more) if s is not None)

    def _give_slots(self) -> None:
        """Free slots go to waiting samples: to the first ones, or to those of the party with the fewest slots."""
        if not self.ready:
            return
        slots, samples = self.decoder.free_slots()[: len(self.ready)], []
        busy = self._samples() if self._of_parties else Counter()
        for _ in slots:
            at = 0
            if self._of_parties:
                at = min(range(len(self.ready)), key=lambda k: busy[self.ready[k].job.party])
            samples.append(self.ready[at])
            busy[samples[-1].job.party] += 1
            del self.ready[at]
        self.decoder.start(slots, samples)
