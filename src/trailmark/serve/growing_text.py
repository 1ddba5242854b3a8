"""The text of a sample while it grows: only what no later token can change is given out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trailmark.engines.stops import BROKEN, Watch

__all__ = ["BROKEN", "Growing"]


class Growing:
    """Fed token by token, `add` returns text that is settled: it ends in no half character, it holds no stop text, and its end is
    not the beginning of one. All pieces and the rest from `finish` are together the text of the completion."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = (), least: int = 0):
        self.watch = Watch(tokenizer, stops, least)
        self.held = ""  # may still become a stop text
        self.sent = 0  # letters given out
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
        """What is left of the whole text, known when the sample has ended."""
        piece, self.over = text[self.sent :], True
        self.sent += len(piece)
        return piece

    def _give(self, letters: int) -> str:
        piece, self.held = self.held[: max(0, letters)], self.held[max(0, letters) :]
        self.sent += len(piece)
        return piece
