r"""Reasoning steps: where a text is split into steps, and which tokens belong to which step. All steps are made here.

A step ends after a delimiter: a newline (LINES), and in solutions of paragraphs also ". " and ".$ " (SENTENCES). "3.5"
has no blank after its point, so it stays whole. Blank pieces belong to the step before them, or to the first step if
they are at the top. ReAct texts name their steps instead ("Thought 1:", "Action 1:"). A token belongs to the step in
which it ends.

    split_steps, step_spans    by delimiters; the steps cover the text
    react_steps                the steps of a ReAct solution that a model wrote, without what belongs to no step
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from trailmark.texts import encode_with_places
from trailmark.types import Episode, Tokens

LINES = ("\n",)
SENTENCES = ("\n", ". ", ".$ ")
TYPED = re.compile(r"^(Thought|Action|Observation|SubQuestion|Answer) ?[0-9]*:", re.MULTILINE)
NAMES = {"react": ("Thought", "Action", "Observation"), "questions": ("SubQuestion", "Answer")}  # by way of splitting
OPENS = {  # the beginning of a line that opens a step, and the end of a prompt that opens one
    split: (re.compile(rf"({'|'.join(n)}) ([0-9]+):"), re.compile(rf"(?:^|\n)((?:{'|'.join(n)}) [0-9]+:)[ \t]*$"))
    for split, n in NAMES.items()
}
REACT = OPENS["react"][0]
SHORT = 5  # a step whose text behind its first word and a blank has fewer characters is none
Split = Literal["turn", "newline", "sentence", "auto", "react", "questions"]

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


class ReactStep(NamedTuple):
    """One step: [start, end) are its characters. The end lies behind its last line that is not blank, before the
    newline."""

    start: int
    end: int
    kind: str  # Thought, Action or Observation


def react_steps(response: str, prompt: str = "", split: str = "react") -> list[ReactStep]:
    """The steps of a ReAct solution. A line that begins with "Thought 3:" (any number; Action and Observation too)
    opens a step; other lines continue it, and blank lines do not move its end. Text before the first such line belongs
    to no step, unless the prompt's last words opened one. Short steps are left out, except the first "Thought 1:". With
    split `questions` the names are SubQuestion and Answer."""
    opens, at_the_end = OPENS[split]
    opened = at_the_end.search(prompt)
    before = f"{opened[1]} " if opened else ""
    found: list[list[Any]] = []
    at = -len(before)
    for line in (before + response).split("\n"):
        named = opens.match(line)
        if named:
            found.append([at, at + len(line), named[1], named[2]])
        elif found and line.strip():
            found[-1][1] = at + len(line)
        at += len(line) + 1
    whole, shift, out, first = before + response, len(before), [], True
    for start, end, kind, number in found:
        says = whole[start + shift + len(kind) + 1 : end + shift].strip()
        one = first and kind == "Thought" and int(number) == 1
        first = first and not one
        if end > 0 and (one or len(says) >= SHORT):  # what the prompt opened may have stayed empty
            out.append(ReactStep(max(0, start), max(0, end), kind))
    return out


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


def token_spans(
    tokenizer: Any, tokens: Tokens, text: str, cut: Callable[[str], Sequence[tuple[int, int]]]
) -> list[tuple[int, int]]:
    """The [start, end) spans of `tokens` that hold the spans of characters which `cut` finds in their text. The last
    token of a span is the one with the span's last character. A token that reaches into the next span belongs to the
    next. As in `token_steps`, the text is never encoded in the place of the tokens."""
    ids, offsets = encode_with_places(tokenizer, text) if tokenizer.is_fast else ([], [])
    if ids and tuple(ids) == tokens[: len(ids)]:
        offsets = [*offsets, *[(len(text), len(text))] * (len(tokens) - len(ids))]
        starts, ends = [a for a, _ in offsets], [b for _, b in offsets]
        found = [(bisect_right(ends, a), bisect_left(starts, b)) for a, b in cut(text)]
    else:
        decoded = tokenizer.decode(tokens)
        text = text if decoded.startswith(text) else decoded  # without the token that ends the turn
        lengths = _Lengths(tokenizer, tokens)
        found = [(bisect_right(lengths, a), _after(tokenizer, tokens, text, lengths, b)) for a, b in cut(text)]
    begins = [start for start, _ in found[1:]] + [len(tokens)]
    return [(min(start, e), e) for (start, end), after in zip(found, begins) for e in [min(end, after)]]


def _after(tokenizer: Any, tokens: Tokens, text: str, lengths: Sequence[int], end: int) -> int:
    """The number of tokens that write the text up to `end`. A letter may need several tokens, and half a letter decodes
    to one sign too, so lengths alone do not tell."""
    k = min(bisect_left(lengths, end) + 1, len(tokens))
    while k < len(tokens) and tokenizer.decode(tokens[:k])[:end] != text[:end]:
        k += 1
    return k


def react_token_steps(
    tokenizer: Any, tokens: Tokens, text: str, prompt: str = "", split: str = "react"
) -> tuple[tuple[tuple[int, int], ...], tuple[str, ...]]:
    """The steps of a ReAct solution as spans of its tokens, and their kinds."""
    kinds: list[str] = []

    def cut(said: str) -> list[tuple[int, int]]:
        steps = react_steps(said, prompt, split)
        kinds[:] = [s.kind for s in steps]
        return [(s.start, s.end) for s in steps]

    return tuple(token_spans(tokenizer, tokens, text, cut)), tuple(kinds)


class _Lengths(Sequence[int]):
    """The position in the decoded text at which each token ends. It is decoded only when it is needed."""

    def __init__(self, tokenizer: Any, tokens: Tokens):
        self.tokenizer, self.tokens = tokenizer, tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, k: Any) -> Any:
        return len(self.tokenizer.decode(self.tokens[: k + 1]))


def cut_tokens(
    tokenizer: Any, tokens: Tokens, text: str, split: Split, prompt: str = "", ends: Sequence[str] = LINES
) -> tuple[tuple[tuple[int, int], ...], tuple[str, ...]]:
    """The steps of an answer as spans of its tokens, and their kinds, which only the names of steps tell (`react`).
    `ends` are the delimiters of `newline`."""
    if split in NAMES:
        return react_token_steps(tokenizer, tokens, text, prompt, split)
    if split == "turn":
        return ((0, len(tokens)),), ("",)
    sentences = split == "sentence" or (split == "auto" and "\\boxed" in prompt)
    spans = token_steps(tokenizer, tokens, text, SENTENCES if sentences else ends)
    return spans, ("",) * len(spans)


def mark_steps(e: Episode, seat: str, tokenizer: Any, split: Split) -> Episode:
    """The episode with `steps` on the seat's turns that have none. `auto` splits by sentence if the prompt asks for a
    \\boxed{} answer, else by newline; `react` and `questions` split by the names of the steps; `turn` leaves a whole
    turn as one step."""
    if split == "turn":
        return e
    turns = list(e.turns)
    for i, t in enumerate(turns):
        if t.seat == seat and t.tokens and not t.steps and split in NAMES:
            prompt, done = tokenizer.decode(e.context(i)), len(t.forced)
            spans, _ = react_token_steps(tokenizer, t.forced + t.tokens, t.text, prompt, split)
            turns[i] = replace(t, steps=tuple((max(0, a - done), b - done) for a, b in spans if b > done))
        elif t.seat == seat and t.tokens and not t.steps:
            sentences = split == "sentence" or (split == "auto" and "\\boxed" in tokenizer.decode(e.context(i)))
            turns[i] = replace(t, steps=token_steps(tokenizer, t.tokens, t.text, SENTENCES if sentences else LINES))
    return replace(e, turns=tuple(turns))


def step_types(e: Episode, turn: int, tokenizer: Any) -> list[str]:
    """What each step of a turn is: Thought, Action, Observation, SubQuestion, Answer, or nothing. A file may have said
    so (`info["steps"]`); else the step's first word does, or for the first step the end of the prompt."""
    t = e.turns[turn]
    spans = t.steps or ((0, len(t.tokens)),)
    if len(told := e.info.get("steps", ())) == len(spans):
        return list(told)
    found = [TYPED.match(tokenizer.decode(t.tokens[a:b]).lstrip()) for a, b in spans]
    types = [m[1] if m else "" for m in found]
    if not types[0]:
        shown = tokenizer.decode(e.context(turn))
        opened = [m for m in TYPED.finditer(shown) if not shown[m.end() :].strip()]
        types[0] = opened[-1][1] if opened else ""
    return types


def without_end(e: Episode, seat: str, tokenizer: Any) -> Episode:
    """The episode in which no step holds the token that ends a turn: a value of a step is read where something is
    still to be written, behind the last token of the text."""
    ends, turns = {*tokenizer.all_special_ids}, list(e.turns)
    for i, t in enumerate(turns):
        if t.seat == seat and t.steps and t.ended and t.tokens[-1] in ends:
            steps = [(a, min(b, len(t.tokens) - 1)) for a, b in t.steps]
            turns[i] = replace(t, steps=tuple((a, b) for a, b in steps if a < b))
    return replace(e, turns=tuple(turns))


def token_border(tokenizer: Any, tokens: Tokens, text: str, chars: int) -> int:
    """How many of `tokens`, which say `text`, end within its first `chars` characters."""
    if tokenizer.is_fast:
        ids, offsets = encode_with_places(tokenizer, text)
        if tuple(ids) == tokens[: len(ids)]:
            return bisect_right([b for _, b in offsets], chars)
    return bisect_right(_Lengths(tokenizer, tokens), chars)
