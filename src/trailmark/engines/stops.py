"""Stop texts: find them while a sample is written, in time linear in the length of the sample.

`Pieces` turns tokens into text as they come. `Stop` matches one stop text letter by letter (Knuth, Morris and Pratt).
Its table grows only as far as the text matches, so a stop text of a megabyte costs nothing until a megabyte matches.
`Watch` combines both: it is fed token by token, says where to cut the sample, and says how much of the text may still
become a stop text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BROKEN = "\ufffd"  # an incomplete character decodes to this
UNSETTLED = 16  # after so many tokens without a complete character, look for a border among them
FORCED = 64  # after so many, take any border: these bytes are not text


class Pieces:
    """`add` returns the text that a token adds, as far as no later token can change it: half a character waits for its
    end. The last few tokens are decoded again with each new one, because the text of a token may depend on the token
    before it."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.tokens: list[int] = []  # the tokens since the last settled border but one
        self.read = 0  # tokens[:read] are settled; they are context for the rest
        self.known = 0  # letters that tokens[:read] decode to
        self.given = 0  # letters after these that were already returned

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
        """Settle tokens[:read], which are `letters` letters of the text. Tokens before `first` are dropped."""
        over = self.known + self.given - letters
        self.tokens = self.tokens[first:]
        self.read = read - first
        self.known = len(self.tokenizer.decode(self.tokens[: self.read]))
        self.given = max(0, over)

    def _let_go(self, text: str) -> str:
        """For bytes that never become a character: settle all but the last few, if the text can be split there."""
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
    """The last `at` letters fed so far are the first `at` letters of `text`."""

    __slots__ = ("at", "back", "text")

    def __init__(self, text: str):
        self.text, self.at = text, 0
        self.back = [0]  # back[k]: the longest proper prefix of text[: k + 1] that is also its suffix

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
        """The start of the earliest stop text that ends in this piece, or None."""
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
    """The text of one sample and its stop texts. A stop text that ends before token number `least` is ignored."""

    def __init__(self, tokenizer: Any, texts: Sequence[str], least: int = 0):
        self.tokenizer, self.texts, self.least = tokenizer, tuple(texts), least
        self.pieces, self.stops = Pieces(tokenizer), Stops(texts)
        self.count = 0
        self.piece = ""  # what the last token added

    def add(self, token: int) -> int | None:
        """Where to cut the text after this token, or None."""
        self.count += 1
        self.piece = self.pieces.add(token)
        found = self.stops.feed(self.piece) if self.piece else None
        return found if self.count >= self.least else None

    def cut(self, text: str, at: int) -> str | None:
        """`text`, the whole text of the sample, cut before the stop text that was found at `at`. None if it is not
        there: tokens decoded together may give another text than tokens decoded one after the other."""
        if not any(text.startswith(s, at) for s in self.texts):
            at = min((k for s in self.texts if (k := text.find(s)) >= 0), default=-1)
        return text[:at] if at >= 0 else None


def cut_text(tokenizer: Any, tokens: Sequence[int], texts: Sequence[str], least: int = 0) -> str:
    """The text of a sample that ended with a stop text, without the stop text."""
    watch, text = Watch(tokenizer, texts, least), tokenizer.decode(tokens)
    for token in tokens:
        if (at := watch.add(token)) is not None and (said := watch.cut(text, at)) is not None:
            return said
    return text
