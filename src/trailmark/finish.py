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
from dataclasses import dataclass

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
