"""What a solution answers (`trailmark/finish.py` reads it), what it is worth, and what most of several answer."""

from __future__ import annotations

from collections.abc import Iterable

from trailmark.finish import FINISH, LETTERS, NEW_PROBLEM, Answer, read_answer

__all__ = ["FINISH", "HIDDEN", "LETTERS", "NEW_PROBLEM", "Answer", "leaf_value", "most_common", "read_answer"]

HIDDEN = -1  # the label of a question whose answer is not told
REASONS = ("invalid", "missing", "multiple")  # why a text has no answer


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
