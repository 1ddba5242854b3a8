r"""A solution in steps, without losing a character: the steps put together are the text.

A step ends behind a newline and, for solutions that run in paragraphs (MATH), behind ". " and ".$ " too. "3.5" has no blank behind
its point and stays whole. Blank lines belong to the step before them, or at the very top to the first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

LINES = ("\n",)
SENTENCES = ("\n", ". ", ".$ ")


def step_spans(text: str, delimiters: Sequence[str] = LINES) -> list[tuple[int, int]]:
    """The steps as [start, end) spans of characters that tile `text`; each keeps its delimiter."""
    cut = re.compile("|".join(re.escape(d) for d in sorted(delimiters, key=len, reverse=True)))
    spans: list[tuple[int, int]] = []
    at = 0
    for end in [m.end() for m in cut.finditer(text)] + [len(text)]:
        piece = text[at:end]
        if not piece:
            continue
        if spans and (not piece.strip() or not text[slice(*spans[-1])].strip()):
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((at, end))
        at = end
    return spans


def split_steps(text: str, delimiters: Sequence[str] = LINES) -> list[str]:
    return [text[a:b] for a, b in step_spans(text, delimiters)]
