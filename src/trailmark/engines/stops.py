"""Texts that end a sample, found while it is written, in time that is linear in what is written.

`Pieces` turns tokens into text as they come. `Stop` meets one stop text letter by letter (Knuth, Morris and Pratt); its table
grows only as far as the text agrees with it, so a stop text of a megabyte costs nothing until a megabyte is written. `Watch` is
both: fed token by token, it says where the sample is to be cut, and how much of the text may still become a stop text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BROKEN = "\ufffd"  # what bytes that are no whole character decode to
UNSETTLED = 16  # tokens in a row that end in no whole character, after which a border is looked for among them
FORCED = 64  # and after which one is taken as it is: these bytes are no text


class Pieces:
    """`add` gives the text that a token adds, as far as no later token can change it: half a character waits for its end. The last
    few tokens are decoded again with each new one, for what a token says may depend on the one before."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.tokens: list[int] = []  # those from the last but one settled border on
        self.read = 0  # tokens[:read] are settled, and context for the rest
        self.known = 0  # letters that tokens[:read] decode to
        self.given = 0  # letters behind these that were given out already

    def add(self, token: int) -> str:
        self.tokens.append(token)
        text = self.tokenizer.decode(self.tokens)
        whole = len(text) if not text.endswith(BROKEN) else len(text.rstrip(BROKEN))
        done = self.known + self.given
        piece = text[done : max(done, whole)]
        self.given += len(piece)
        if whole == len(text):
            self._settle(self.read, len(self.tokens), len(text))
        elif len(self.tokens) - self.read > UNSETTLED:
            return piece + self._let_go(text)
        return piece

    def _settle(self, first: int, read: int, letters: int) -> None:
        """tokens[:read] are settled, `letters` of the text; what stands before `first` is not looked at again."""
        over = self.known + self.given - letters
        self.tokens = self.tokens[first:]
        self.read = read - first
        self.known = len(self.tokenizer.decode(self.tokens[: self.read]))
        self.given = max(0, over)

    def _let_go(self, text: str) -> str:
        """Bytes that never become a character: settle all but the last few, where the text can be cut in two there."""
        n = len(self.tokens)
        for read in range(n - 4, n - 9, -1):
            head, first = self.tokenizer.decode(self.tokens[:read]), max(0, read - 4)
            rest = len(self.tokenizer.decode(self.tokens[first:])) - len(self.tokenizer.decode(self.tokens[first:read]))
            if n > FORCED or (text.startswith(head) and rest == len(text) - len(head)):
                done = self.known + self.given
                piece = head[done:]
                self.given += len(piece)
                self._settle(first, read, len(head))
                return piece
        return ""


class Stop:
    """`at` letters of `text` are the end of what was fed so far."""

    __slots__ = ("at", "back", "text")

    def __init__(self, text: str):
        self.text, self.at = text, 0
        self.back = [0]  # back[k]: how much of text[: k + 1] is both its beginning and its end

    def feed(self, letter: str) -> bool:
        """Whether the stop text ends here."""
        text, back = self.text, self.back
        if self.at == len(text):
            self.at = back[-1]
        while self.at and text[self.at] != letter:
            self.at = back[self.at - 1]
        if text[self.at] == letter:
            self.at += 1
            if self.at > len(back):
                k = back[-1]
                while k and text[k] != letter:
                    k = back[k - 1]
                back.append(k + (text[k] == letter))
        return self.at == len(text)


class Stops:
    """Several stop texts over one growing text."""

    def __init__(self, texts: Sequence[str]):
        self.stops = [Stop(t) for t in dict.fromkeys(texts)]
        self.length = 0

    def feed(self, piece: str) -> int | None:
        """Where the earliest of the stop texts begins that end in this piece."""
        found: int | None = None
        for stop in self.stops:
            if stop.at == 0 and stop.text[0] not in piece:
                continue
            for at, letter in enumerate(piece, self.length + 1):
                if stop.feed(letter):
                    start = at - len(stop.text)
                    found = start if found is None else min(found, start)
        self.length += len(piece)
        return found

    @property
    def open(self) -> int:
        """How many of the last letters may still become a stop text."""
        return max((s.at for s in self.stops), default=0)


class Watch:
    """The text of one sample and its stop texts. A stop text that ends before token number `least` does not count."""

    def __init__(self, tokenizer: Any, texts: Sequence[str], least: int = 0):
        self.tokenizer, self.texts, self.least = tokenizer, tuple(texts), least
        self.pieces, self.stops = Pieces(tokenizer), Stops(texts)
        self.count = 0
        self.piece = ""  # what the last token added

    def add(self, token: int) -> int | None:
        """Where the text is to be cut because of this token."""
        self.count += 1
        self.piece = self.pieces.add(token)
        found = self.stops.feed(self.piece) if self.piece else None
        return found if self.count >= self.least else None

    def cut(self, text: str, at: int) -> str | None:
        """`text`, all that was written, without the stop text that was found at `at` and what follows. None where it stands nowhere:
        decoded as a whole, tokens may say something else than one after the other."""
        if not any(text.startswith(s, at) for s in self.texts):
            at = min((k for s in self.texts if (k := text.find(s)) >= 0), default=-1)
        return text[:at] if at >= 0 else None


def cut_text(tokenizer: Any, tokens: Sequence[int], texts: Sequence[str], least: int = 0) -> str:
    """The text of a sample that a stop text ended, without it."""
    watch, text = Watch(tokenizer, texts, least), tokenizer.decode(tokens)
    for token in tokens:
        if (at := watch.add(token)) is not None and (said := watch.cut(text, at)) is not None:
            return said
    return text
