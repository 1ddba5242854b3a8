r"""Split a solution into steps without losing a character: the joined steps are the text.

A step ends after a newline. In solutions that run in paragraphs (MATH) it also ends after ". " and ".$ ". "3.5" has no
blank after its point and stays whole. Blank lines belong to the step before them, or at the very top to the first step.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

LINES = ("\n",)
SENTENCES = ("\n", ". ", ".$ ")


def step_spans(text: str, delimiters: Sequence[str] = LINES) -> list[tuple[int, int]]:
    """The steps as [start, end) spans of characters that cover `text` without gaps; each keeps its delimiter."""
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
