"""Whose prompts are computed next, when several parties (requests of a server's clients) wait.

Each request has a due time in tokens: when the party's request before it is due (or now, if that is over), plus the
tokens of its prompt and those it may draw. The clock is the latest due time of those admitted. So a party waits for
others no longer than they would for it, however many it is among. A request of one token needs no slot, so it never
waits for one. A party that has nothing yet is admitted even if others have filled the queue for slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trailmark.engines.running import Job


class DueTimes:
    def __init__(self) -> None:
        self.clock = 0
        self._last: dict[Any, int] = {}  # of each party, if it is to come

    def join(self, job: Job) -> None:
        """Say when a request is due."""
        request = job.request
        drawn = request.n * request.max_tokens if request.max_tokens > 1 else 0
        began = max(self.clock, self._last.get(job.party, 0))
        job.due = self._last[job.party] = began + len(request.prompt) + drawn

    def admit(self, jobs: Iterable[Job]) -> None:
        self.clock = max([self.clock, *(job.due for job in jobs if not job.future.done())])
        self._last = {party: due for party, due in self._last.items() if due > self.clock}


@dataclass
class Admission:
    """One admission: `busy` counts the samples that each party has in work, `ready` of them wait for one of `slots`. At
    most `room` tokens of prompts are computed, or one prompt."""

    busy: Counter[Any]
    ready: int
    slots: int
    room: int
    admitted: int = 0

    def __post_init__(self) -> None:
        self.full = self.ready >= self.slots

    def admits(self, job: Job) -> bool:
        """Whether a prompt is computed now. Not many are: between two admissions every slot draws a token."""
        request = job.request
        if self.admitted >= self.slots or (self.admitted and len(request.prompt) > self.room):
            return False
        if request.max_tokens > 1:
            new = not self.busy.get(job.party)
            if len(self.busy) >= 4 * self.slots if new else self.full or self.ready >= 2 * self.slots:
                return False  # limits the memory of the stored keys and values
            self.ready += request.n
            self.busy[job.party] += request.n
        self.room -= len(request.prompt)
        self.admitted += 1
        return True
