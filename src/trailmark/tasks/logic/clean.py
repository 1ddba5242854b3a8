"""Raw responses to clean solutions. A response is kept or dropped, and every dropped one has a reason.

Always, in this order:
  1. the text is cut at the first "Context:" with a newline: there the model invents a new problem;
  2. exactly one line must begin with "Action " and contain "Finish[The answer is";
  3. the text ends with that line, and blanks around it are removed.

More rules are switches (`Cleaning`). STRICT has the first two and `distinct`.
  join      blank lines are left out, and a line without a step's name is put behind the line before it, with a space;
            then the last line must be a step of its own, the Finish line
  short     with join: steps with fewer than five characters behind their first word and a blank are left out
            ("Thought 3:" goes, "Thought 3: ok" stays)
  min_step  fewer lines than this: dropped
  distinct  of equal responses to one question, the first is kept

A first line without a name (the prompt may have said "Thought 1:") is a line of its own, and never short.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trailmark.answers import NEW_PROBLEM
from trailmark.steps import REACT, SHORT

MARK = "Finish[The answer is"
EMPTY, NO_FINISH, FINISHES, NOT_LAST, FEW, TWICE = DROPPED = (
    "empty", "no finish", "several finishes", "finish is not the last step", "too few steps", "twice",
)  # fmt: skip


@dataclass(frozen=True)
class Cleaning:
    join: bool = False
    short: bool = False
    min_step: int = 0
    distinct: bool = False


STRICT = Cleaning(join=True, short=True, distinct=True)


class Cleaned(NamedTuple):
    """The clean text, or the reason why there is none. `end` is where the Finish line ends in the raw response, so the
    tokens of the response can be cut there too."""

    text: str | None
    why: str = ""
    end: int = 0


def clean(response: str, rules: Cleaning = Cleaning()) -> Cleaned:
    """One response."""
    if not response.strip():
        return Cleaned(None, EMPTY)
    lines, at, ends = response.split(NEW_PROBLEM)[0].split("\n"), 0, []
    for line in lines:
        ends.append(at + len(line))
        at += len(line) + 1
    last = [k for k, line in enumerate(lines) if line.startswith("Action ") and MARK in line]
    if len(last) != 1:
        return Cleaned(None, FINISHES if last else NO_FINISH)
    kept, end = lines[: last[0] + 1], ends[last[0]]
    if rules.join:
        kept = _joined(kept)
        if rules.short:
            kept = [line for line in kept if not _is_short(line)]
        if not REACT.match(kept[-1]) or MARK not in kept[-1] or not kept[-1].startswith("Action "):
            return Cleaned(None, NOT_LAST)
    if sum(bool(line.strip()) for line in kept) < rules.min_step:
        return Cleaned(None, FEW)
    return Cleaned("\n".join(kept).strip(), "", end)


def _joined(lines: Sequence[str]) -> list[str]:
    out: list[str] = []
    for line in lines:
        if not line.strip():
            continue
        if out and not REACT.match(line):
            out[-1] += f" {line.strip()}"
        else:
            out.append(line)
    return out


def _is_short(line: str) -> bool:
    named = REACT.match(line)
    return bool(named) and len(line[len(named[1]) + 1 :].strip()) < SHORT


def clean_all(responses: Sequence[str], rules: Cleaning = Cleaning()) -> tuple[list[tuple[int, str]], Counter[str]]:
    """The clean responses of one question, each with its number among `responses`, and why the others were dropped."""
    kept: list[tuple[int, str]] = []
    dropped: Counter[str] = Counter()
    seen: set[str] = set()
    for k, response in enumerate(responses):
        text, why, _ = clean(response, rules)
        if text is not None and rules.distinct and text in seen:
            text, why = None, TWICE
        if text is None:
            dropped[why] += 1
            continue
        seen.add(text)
        kept.append((k, text))
    return kept, dropped
