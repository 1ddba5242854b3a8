"""Whose prompts are computed next, when several parties (requests of a server's clients) wait.

Each request has a due time in tokens: when the party's request before it is due (or now, if that is over), plus the
tokens of its prompt and those it may draw. The clock is the latest due time of those admitted. So a party waits for
others no longer than they would for it, however many it is among. A request of one token needs no slot, so it never
waits for one. A party that has nothing yet is admitted even if others have filled the queue for slots.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trailmark.engines.base import Request

Waiting = tuple[Request, asyncio.Future]


class Line:
    """When each waiting request is due."""

    def __init__(self) -> None:
        self.clock = 0
        self.due: dict[asyncio.Future, int] = {}
        self._last: dict[Any, int] = {}  # of each party, if it is to come

    def join(self, request: Request, future: asyncio.Future, party: Any) -> None:
        drawn = request.n * request.max_tokens if request.max_tokens > 1 else 0
        began = max(self.clock, self._last.get(party, 0))
        self.due[future] = self._last[party] = began + len(request.prompt) + drawn
        future.add_done_callback(self.due.pop)

    def admit(self, chosen: Iterable[asyncio.Future]) -> None:
        self.clock = max([self.clock, *(self.due.get(f, 0) for f in chosen)])  # one that has left has no due time
        self._last = {party: due for party, due in self._last.items() if due > self.clock}


class Turns:
    """One admission: `busy` counts the samples that each party has in work, `ready` of them wait for one of `slots`. At
    most `room` tokens of prompts are computed, or one prompt."""

    def __init__(
        self,
        waiting: Sequence[Waiting],
        parties: Mapping[asyncio.Future, Any],
        busy: Counter[Any],
        ready: int,
        slots: int,
        room: int,
    ):
        self.waiting, self.parties, self.busy, self.ready, self.slots = waiting, parties, busy, ready, slots
        self.room = room
        self.full = ready >= slots
        self.chosen: set[asyncio.Future] = set()

    def admits(self, request: Request, future: asyncio.Future) -> bool:
        """Whether a prompt is computed now. Not many are: between two admissions every slot draws a token."""
        if len(self.chosen) >= self.slots or (self.chosen and len(request.prompt) > self.room):
            return False
        if request.max_tokens > 1:
            party = self.parties.get(future)
            new = not self.busy.get(party)
            if len(self.busy) >= 4 * self.slots if new else self.full or self.ready >= 2 * self.slots:
                return False  # limits the memory of the stored keys and values
            self.ready += request.n
            self.busy[party] += request.n
        self.room -= len(request.prompt)
        self.chosen.add(future)
        return True

    def left(self) -> deque[Waiting]:
        return deque(one for one in self.waiting if one[1] not in self.chosen)
