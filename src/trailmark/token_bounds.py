"""How many tokens a text has at most, without encoding it.

A tokenizer that falls back to bytes writes at most one token for each byte of a text, after its normaliser. So a
short text surely fits into a long context, and only the others must be encoded to know. `most` answers None
where that is not sure: for other tokenizers, for a text that holds a control token, and for a text of which nothing
might be left.
"""

from __future__ import annotations

import json
from typing import Any

from trailmark.texts import controls_of

NORMAL_FORMS = {"NFC", "NFD", "NFKC", "NFKD"}
LONGER = 12  # times as many bytes: the most that a normal form makes of a character (U+FDFA: 3 bytes become 33)
EXTRA = 2  # a space that a tokenizer puts in front


class Bounds:
    """Upper bounds for one tokenizer, as it is now."""

    def __init__(self, tokenizer: Any):
        self._times = _look(tokenizer)
        self._holds = controls_of(tokenizer).holds

    def most(self, text: str) -> int | None:
        """A number that the tokens of `text` surely do not exceed. A text that has one has at least one token."""
        if self._times is None or not text or text.isspace() or self._holds(text):
            return None
        if text.isascii():
            return self._times[0] * len(text) + EXTRA
        return self._times[1] * len(text.encode("utf-8", "replace")) + EXTRA


def _look(tokenizer: Any) -> tuple[int, int] | None:
    """Tokens for each byte of a text of ASCII and of any other text; None if that cannot be said."""
    if not getattr(tokenizer, "is_fast", False):
        return None
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    model, cutters, normal = parts["model"], _listed(parts["pre_tokenizer"]), _listed(parts["normalizer"])
    bytewise = any(c["type"] == "ByteLevel" for c in cutters)
    if not bytewise and not model.get("byte_fallback"):
        return None
    if any(c.get("behavior", "Isolated") == "Removed" or c["type"] not in CUTTERS for c in cutters):
        return None  # it may drop a part of the text
    # A space in front of the text, or of each part between two added tokens or two cuts, is one more token.
    plain, other = 2 if any(c.get("add_prefix_space") for c in cutters) else 1, 1
    for n in normal:
        if n["type"] in NORMAL_FORMS:
            other = LONGER
        elif n["type"] == "Prepend" or (n["type"] == "Replace" and len(n["content"]) == 1):
            plain = 4  # and a sign of three bytes in place of a space
        else:
            return None
    if any(c["type"] == "Metaspace" for c in cutters):
        plain = 4
    return plain, plain * other


CUTTERS = {"ByteLevel", "Metaspace", "Split", "Digits", "Punctuation"}


def _listed(part: Any) -> list[dict[str, Any]]:
    """The members of a normaliser or a pre-tokenizer, which may be a sequence of others."""
    if part is None:
        return []
    inner = [*part.get("normalizers", ()), *part.get("pretokenizers", ())]  # both may be empty
    return [x for p in inner for x in _listed(p)] if part["type"] == "Sequence" else [part]
