"""The text of a sample while it grows: only text that no later token can change is returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trailmark.engines.stops import BROKEN, Watch

__all__ = ["BROKEN", "Growing"]


class Growing:
    """`add` takes one token and returns settled text. Settled text ends in no half character, holds no stop text, and
    does not end in the beginning of one. All pieces and the rest from `finish` make the text of the completion."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = (), least: int = 0):
        self.watch = Watch(tokenizer, stops, least)
        self.held = ""  # text that may still become a stop text
        self.sent = 0  # letters returned so far
        self.over = False

    def add(self, token: int) -> str:
        if self.over:
            return ""
        at = self.watch.add(token)
        self.held += self.watch.piece
        if at is not None:
            self.over = True
            return self._give(max(0, at - self.sent))
        return self._give(len(self.held) - self.watch.stops.open)

    def finish(self, text: str) -> str:
        """The rest of the whole text, which is known when the sample has ended."""
        piece, self.over = text[self.sent :], True
        self.sent += len(piece)
        return piece

    def _give(self, letters: int) -> str:
        piece, self.held = self.held[: max(0, letters)], self.held[max(0, letters) :]
        self.sent += len(piece)
        return piece
