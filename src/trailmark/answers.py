"""The option that a solution names: one parser for predictions, labels, rewards and imported records.

The answer stands in the first `Finish[...]` that is closed. In it, the letters of the options are looked for as whole
words: with four options A to D, with two A and B. Exactly one distinct letter is the answer.

    Finish[The answer is B.]               B
    Finish[B. B follows from the rules]    B
    Finish[The answer is A and B.]         none: "multiple"
    Finish[The answer is E.]               none with four options: "missing"; E with five
    Finish[The answer is B                 none: "invalid", because it is not closed
    (no Finish)                            none: "invalid"

Give it what the model wrote, never the prompt: the instruction there names `Finish` too. Where the model went on to
invent a new problem ("Context:" and a newline), the text is cut before it is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from trailmark.types import Episode, Task

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
NEW_PROBLEM = "Context:\n"
FINISH = re.compile(r"Finish\[((?:(?!Finish\[)[^\]])*)\]")


@dataclass(frozen=True, slots=True)
class Answer:
    """The letter of an answer, or an empty letter and the reason."""

    letter: str
    why: str = ""

    @property
    def index(self) -> int | None:
        return LETTERS.index(self.letter) if self.letter else None


def read_answer(text: str, options: int) -> Answer:
    """The answer in a solution of a question with so many options."""
    if not 2 <= options <= len(LETTERS):
        raise ValueError(f"a question has 2 to {len(LETTERS)} options, not {options}")
    found = FINISH.search(text.split(NEW_PROBLEM)[0])
    if found is None:
        return Answer("", "invalid")
    named = set(re.findall(rf"\b[A-{LETTERS[options - 1]}]\b", found[1]))
    if len(named) == 1:
        return Answer(named.pop())
    return Answer("", "multiple" if named else "missing")


HIDDEN = -1  # the label of a question whose answer is not told


def leaf_value(text: str, label: int, options: int) -> tuple[float | None, str]:
    """1 if the answer is the label, else 0; None if the label is hidden. With it the reason: right, wrong, hidden,
    invalid, missing or multiple."""
    answer = read_answer(text, options)
    if label == HIDDEN:
        return None, "hidden"
    if not answer.letter:
        return 0.0, answer.why
    return (1.0, "right") if answer.index == label else (0.0, "wrong")


def most_common(letters: Iterable[str]) -> str:
    """The self-consistent answer: the letter with the most votes. Blanks do not vote. Of equal ones, the one that was
    given first."""
    counts: dict[str, int] = {}
    for letter in letters:
        if letter:
            counts[letter] = counts.get(letter, 0) + 1
    return max(counts, key=lambda letter: counts[letter]) if counts else ""


def of_options(e: Episode) -> str | None:
    """The letter that an episode of a question with options answers, "" if none; None if it is no such question."""
    options = e.task.data.get("options")
    if not isinstance(options, list | tuple) or len(options) < 2 or "label" not in e.task.data:
        return None
    return read_answer(e.turns[-1].text if e.turns else "", len(options)).letter


def original_index(task: Task, shown: int) -> int:
    """The place of an option in the file, from its place in the prompt."""
    return LETTERS.index(task.data["order"][shown]) if "order" in task.data else shown
