r"""Reasoning steps: where a text is split into steps, and which tokens belong to which step. All steps are made here.

A step ends after a delimiter: a newline (LINES), and in solutions of paragraphs also ". " and ".$ " (SENTENCES). "3.5"
has no blank after its point, so it stays whole. Blank pieces belong to the step before them, or to the first step if
they are at the top. ReAct texts name their steps instead ("Thought 1:", "Action 1:"). A token belongs to the step in
which it ends.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

from trailmark.texts import encode_with_places
from trailmark.types import Episode, Tokens

LINES = ("\n",)
SENTENCES = ("\n", ". ", ".$ ")
NAMED = re.compile(r"^(Thought|Action|Observation) ?[0-9]*:", re.MULTILINE)
Split = Literal["turn", "newline", "sentence", "auto"]

# --- texts --------------------------------------------------------------------------------------------------------


def step_spans(text: str, ends: Sequence[str] = LINES) -> list[tuple[int, int]]:
    """The steps as [start, end) spans of characters that cover `text`. Each includes the delimiter that ends it."""
    cut = re.compile("|".join(re.escape(d) for d in sorted(ends, key=len, reverse=True)))
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


def split_steps(text: str, ends: Sequence[str] = LINES) -> list[str]:
    """The steps of a text. Joined, they give the text."""
    return [text[a:b] for a, b in step_spans(text, ends)]


def named_steps(response: str, prompt: str = "") -> list[tuple[int, str]]:
    """Where each step of a ReAct response begins, and what it is: Thought, Action, Observation or Unknown."""
    found = list(NAMED.finditer(response))
    opened = [m[1] for m in NAMED.finditer(prompt) if not prompt[m.end() :].strip()]
    steps: list[tuple[int, str]] = []
    if not found or response[: found[0].start()].strip():
        steps.append((0, opened[0] if opened else "Unknown"))
    for m, after in zip(found, [*(n.start() for n in found[1:]), len(response)]):
        says = response[m.start() + len(m[1]) : after].strip()
        if len(says) >= 5 or m[0] == "Thought 1:" or not steps:
            steps.append((m.start() if steps else 0, m[1]))
    return steps


# --- tokens -------------------------------------------------------------------------------------------------------


def token_borders(ends: Sequence[int], cuts: Sequence[int]) -> list[int]:
    """For each position in a text at which a step begins, the first token that ends after it. Token i ends at
    `ends[i]`."""
    return [bisect_right(ends, at) for at in cuts]


def token_steps(
    tokenizer: Any, tokens: Tokens, text: str, ends: Sequence[str] = LINES
) -> tuple[tuple[int, int], ...]:
    """The steps as spans that cover `tokens`. The offsets of the encoded text are used only if it encodes to exactly
    these tokens; else the tokens are decoded."""
    places: Sequence[int] | None = None
    if tokenizer.is_fast:
        ids, offsets = encode_with_places(tokenizer, text)
        if tuple(ids) == tokens[: len(ids)]:
            places = [*(b for _, b in offsets), *[len(text)] * (len(tokens) - len(ids))]
    if places is None:
        text = tokenizer.decode(tokens)
        places = _Lengths(tokenizer, tokens)
    cuts = [end for _, end in step_spans(text, ends)[:-1]]
    return tuple(pairwise(sorted({0, *token_borders(places, cuts), len(tokens)})))


class _Lengths(Sequence[int]):
    """The position in the decoded text at which each token ends. It is decoded only when it is needed."""

    def __init__(self, tokenizer: Any, tokens: Tokens):
        self.tokenizer, self.tokens = tokenizer, tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, k: Any) -> Any:
        return len(self.tokenizer.decode(self.tokens[: k + 1]))


def mark_steps(e: Episode, seat: str, tokenizer: Any, split: Split) -> Episode:
    """The episode with `steps` on the seat's turns that have none. `auto` splits by sentence if the prompt asks for a
    \\boxed{} answer, else by newline; `turn` leaves a whole turn as one step."""
    if split == "turn":
        return e
    turns = list(e.turns)
    for i, t in enumerate(turns):
        if t.seat == seat and t.tokens and not t.steps:
            sentences = split == "sentence" or (split == "auto" and "\\boxed" in tokenizer.decode(e.context(i)))
            turns[i] = replace(t, steps=token_steps(tokenizer, t.tokens, t.text, SENTENCES if sentences else LINES))
    return replace(e, turns=tuple(turns))
