"""How much of a file is shown. Its kind limits the lines, then the tokens, as the configured tokenizer counts them.

    kind    suffixes                                         lines
    code    py c cpp cxx cc h hpp hxx cs java go ipynb       1000
    data    csv tsv                                          5
    text    txt md rst json yaml yml                         100
    shell   sh bash zsh                                      10

Without a tokenizer a token is four bytes of UTF-8. Binary files and text that is not UTF-8 are refused.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trailmark.errors import TaskError, nearest
from trailmark.texts import encode, encode_with_places

SUFFIXES = {
    "code": "py c cpp cxx cc h hpp hxx cs java go ipynb",
    "data": "csv tsv",
    "text": "txt md rst json yaml yml",
    "shell": "sh bash zsh",
}
LINES = {"code": 1000, "data": 5, "text": 100, "shell": 10}
TOKENS = 500
MOST_BYTES = 1 << 20  # most bytes that are read of one file
_KINDS = {suffix: kind for kind, names in SUFFIXES.items() for suffix in names.split()}


def kind_of(name: str) -> str:
    """The kind of a file: code, data, text or shell; "" for every other suffix."""
    stem, dot, suffix = name.rpartition(".")
    return _KINDS.get(suffix.lower(), "") if stem and dot else ""


class NotText(Exception):
    """The bytes are not text and are not shown."""


def decode(data: bytes, more: bool) -> str:
    """UTF-8 with any line ends. `more`: the bytes were cut off, so the last character may be incomplete."""
    if b"\0" in data:
        raise NotText("is a binary file")
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(data, final=not more)
    except UnicodeDecodeError:
        raise NotText("is not UTF-8 text") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


@dataclass(frozen=True)
class Limits:
    """Most lines and tokens that are shown of a file of each kind."""

    lines: Mapping[str, int] = field(default_factory=lambda: dict(LINES))
    tokens: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(LINES, TOKENS))
    tokenizer: Any = None

    def cut(self, text: str, kind: str) -> tuple[str, str]:
        """The part that is shown, and a note that says what is missing ("" if nothing is)."""
        rest = text.split("\n", self.lines[kind])[self.lines[kind] :]
        shown = text[: len(text) - len(rest[0])] if rest else text
        fits = first_tokens(shown, self.tokens[kind], self.tokenizer)
        if len(fits) == len(text):
            return text, ""
        what = f"{self.tokens[kind]} tokens" if len(fits) < len(shown) else f"{self.lines[kind]} lines"
        return fits, f"(cut: the first {what} are shown)"


def first_tokens(text: str, most: int, tokenizer: Any) -> str:
    """The longest prefix of `text` with at most `most` tokens that ends with a whole character."""
    if tokenizer is None:
        return text.encode()[: 4 * most].decode(errors="ignore")
    if getattr(tokenizer, "is_fast", False):
        where = encode_with_places(tokenizer, text)[1]
        return text if len(where) <= most else text[: where[most][0]]
    ids = encode(tokenizer, text)
    return text if len(ids) <= most else tokenizer.decode(ids[:most])


def limits(lines: Mapping[str, int] | None = None, tokens: Mapping[str, int] | int = TOKENS) -> Limits:
    """Limits from a task's options. Kinds that are not named keep their defaults."""
    per_kind = dict.fromkeys(LINES, tokens) if isinstance(tokens, int) else {**dict.fromkeys(LINES, TOKENS), **tokens}
    made = Limits({**LINES, **(lines or {})}, per_kind)
    for name, table in (("max_lines", made.lines), ("max_tokens", made.tokens)):
        for kind, most in table.items():
            if kind not in LINES:
                raise TaskError(f"auto-explore: {name} has no kind '{kind}'.{nearest(str(kind), LINES)}")
            if isinstance(most, bool) or not isinstance(most, int) or most < 1:
                raise TaskError(f"auto-explore: {name} of '{kind}' must be a number of at least 1, not {most!r}.")
    return made
