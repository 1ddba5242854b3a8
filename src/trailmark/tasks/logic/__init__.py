"""Logical reasoning with options: questions, prompts, the answer parser, and the cleaning of solutions."""

from trailmark.tasks.logic.answer import Answer, leaf_value, most_common, read_answer
from trailmark.tasks.logic.clean import STRICT, Cleaned, Cleaning, clean, clean_all
from trailmark.tasks.logic.prompts import join
from trailmark.tasks.logic.source import Logic

__all__ = [
    "STRICT", "Answer", "Cleaned", "Cleaning", "Logic", "clean", "clean_all", "join", "leaf_value", "most_common",
    "read_answer",
]  # fmt: skip
