"""Whose prompts are computed next, when several parties (requests of a server's clients) wait.

A party is served less, the more it has: its requests line up behind what it has in work, and those of all parties are
then taken in turn. A request of one token needs no slot, so it never waits for one. A party that has nothing yet is
admitted even if others have filled the queue for slots.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from trailmark.engines.base import Request

Waiting = tuple[Request, asyncio.Future]


class Turns:
    """One admission: `busy` counts the samples that each party has in work, `ready` of them wait for one of `slots`."""

    def __init__(
        self,
        waiting: Sequence[Waiting],
        parties: Mapping[asyncio.Future, Any],
        busy: Counter[Any],
        ready: int,
        slots: int,
    ):
        self.waiting, self.parties, self.busy, self.ready, self.slots = waiting, parties, busy, ready, slots
        self.full = ready >= slots
        self.chosen: set[asyncio.Future] = set()

    def order(self) -> list[Waiting]:
        """By what the party has already, its earlier requests included; then those of one token; then as they came."""
        before = Counter(self.busy)
        ranked = []
        for one in self.waiting:
            party = self.parties.get(one[1])
            ranked.append(((before[party], one[0].max_tokens > 1), one))
            before[party] += 1
        return [one for _, one in sorted(ranked, key=lambda r: r[0])]

    def admits(self, request: Request, future: asyncio.Future) -> bool:
        """Whether a prompt is computed now. Not many are: between two admissions every slot draws a token."""
        if len(self.chosen) >= self.slots:
            return False
        if request.max_tokens > 1:
            party = self.parties.get(future)
            new = not self.busy.get(party)
            if len(self.busy) >= 4 * self.slots if new else self.full or self.ready >= 2 * self.slots:
                return False  # limits the memory of the stored keys and values
            self.ready += request.n
            self.busy[party] += request.n
        self.chosen.add(future)
        return True

    def left(self) -> deque[Waiting]:
        return deque(one for one in self.waiting if one[1] not in self.chosen)
