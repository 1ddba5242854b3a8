"""Lengths: how long a new chapter should be, and how a prompt that is too long is cut.

A prompt that is too long loses words of the previous chapter, from its start. Everything else stays: the synopsis, the
header and the instruction are what the answer needs most.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from trailmark.errors import DataError
from trailmark.tasks.stories.prompts import Messages, Show, pieces, reasoning
from trailmark.tasks.stories.rows import AnyRow, StoryRow


@dataclass(frozen=True, slots=True)
class Target:
    """The wanted length of a chapter: words to ask for, and limits in tokens."""

    words: int
    min_tokens: int
    max_tokens: int


def target_length(tokens: int) -> Target:
    """From the length of the gold chapter (with its header) or of a chapter that a user wishes, in tokens: 0.375 words
    for each, rounded up to a hundred; between 0.5 and 1.5 times as many tokens."""
    if tokens < 1:
        raise ValueError(f"a chapter of {tokens} tokens has no length")
    return Target(100 * math.ceil(375 * tokens / 100_000), math.floor(0.5 * tokens), math.ceil(1.5 * tokens))


def fit(row: AnyRow, show: Show, most: int, count: Callable[[Messages], int]) -> AnyRow:
    """The row itself if its reasoning prompt has at most `most` tokens, as `count` counts them. Otherwise the row with
    as many of the last words of the previous chapter as fit."""
    size = lambda r: count(reasoning(pieces(r, show)))
    whole = size(row)
    if whole <= most:
        return row
    if not isinstance(row, StoryRow):
        raise DataError(f"{row.where}: the prompt has {whole} tokens, and at most {most} are allowed: shorten the row.")
    starts = [m.start() for m in re.finditer(r"\S+", row.story_text)]
    kept = lambda k: row.with_previous(row.story_text[starts[-k] :] if k else "")
    if (bare := size(kept(0))) > most:
        raise DataError(
            f"{row.where}: the prompt has {bare} tokens without the previous chapter, and at most {most} are allowed: "
            "shorten its other parts, or allow more."
        )
    low, high = 0, len(starts)  # the last `low` words fit, the last `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(kept(middle)) <= most else (low, middle)
    return kept(low)
