"""The text of a sample while it grows: only what no later token can change is given out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BROKEN = "\ufffd"  # what bytes that are no whole character decode to


class Growing:
    """Fed token by token, `add` returns text that is settled: it ends in no half character, it holds no stop string, and
    its end is not the beginning of one. All pieces and the rest from `finish` are together the text of the completion."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()):
        self.tokenizer, self.stops = tokenizer, stops
        self.tokens: list[int] = []
        self.text = ""  # of the first `read` tokens
        self.sent = 0  # how much of the text was given out
        self.seen, self.read = (
            0,
            0,
        )  # tokens[seen:read] are decoded again with each new one, for a decoder may need them

    def add(self, token: int) -> str:
        self.tokens.append(token)
        before = self.tokenizer.decode(self.tokens[self.seen : self.read])
        now = self.tokenizer.decode(self.tokens[self.seen :])
        text = self.text + now[len(before) :]
        if not now.endswith(BROKEN):
            self.text, self.seen, self.read = text, self.read, len(self.tokens)
        return self._give(text, self._settled(text))

    def finish(self, text: str) -> str:
        """What is left of the whole text, known when the sample has ended."""
        return self._give(text, len(text))

    def _give(self, text: str, end: int) -> str:
        piece = text[self.sent : end]
        self.sent += len(piece)
        return piece

    def _settled(self, text: str) -> int:
        whole = text.rstrip(BROKEN)
        end = len(whole)
        for stop in self.stops:
            if (at := text.find(stop, self.sent)) >= 0:
                end = min(end, at)
            else:
                begun = next((k for k in range(len(stop) - 1, 0, -1) if whole.endswith(stop[:k])), 0)
                end = min(end, len(whole) - begun)
        return end
