"""A language model that compares two answers, always in both orders.

Judges prefer what they are shown first (or last). So every pair is asked about twice, with the answers swapped, and
each criterion is averaged: 1 if the first answer is better, 0 if the second is, 0.5 for a tie. A judge that changes
its mind with the order gives 0.5, and `swayed` says so. Answers are read as JSON: a letter inside a word is no vote.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from trailmark.ask.client import Unreadable
from trailmark.score.base import digest
from trailmark.score.judge import ModelJudge, object_schema, read_object
from trailmark.types import Failed

CRITERIA = {
    "reasonable": "whose steps follow from what is given and from each other",
    "concise": "who needs fewer words for the same reasoning",
    "consistent": "whose steps agree with each other and with the final answer",
    "overall": "whose reasoning you would rather trust",
}
POINTS = {"a": 1.0, "b": 0.0, "tie": 0.5}


@dataclass(frozen=True)
class Compared:
    """For each criterion, how much better the first answer is (1, 0.75, 0.5, 0.25, 0), and if the order decided."""

    better: dict[str, float] = field(default_factory=dict)
    swayed: dict[str, bool] = field(default_factory=dict)
    failed: str = ""  # why there is no verdict


def question(prompt: str, first: str, second: str, criteria: dict[str, str] = CRITERIA) -> str:
    asked = "\n".join(f"- {name}: {what}" for name, what in criteria.items())
    return (
        f"Two answers to the same task are shown. Compare them by each criterion:\n{asked}\n\n"
        f"The task:\n{prompt}\n\nAnswer A:\n{first}\n\nAnswer B:\n{second}"
    )


def read_comparison(text: str, name: str, criteria: Sequence[str]) -> dict[str, float]:
    """The points of answer A by each criterion."""
    answer = read_object(text, name, criteria[0])
    out = {}
    for c in criteria:
        word = str(answer.get(c)).strip().lower() if c in answer else ""
        if word not in POINTS:
            raise Unreadable(f"Your answer says {answer.get(c)!r} for '{c}', which is none of A, B and tie")
        out[c] = POINTS[word]
    return out


async def compare_pair(
    judge: ModelJudge, prompt: str, first: str, second: str, criteria: dict[str, str] = CRITERIA
) -> Compared:
    """One pair, asked about in both orders at once."""
    keys = list(criteria)

    async def one(a: str, b: str) -> dict[str, float] | Failed:
        asked = question(prompt, a, b, criteria)
        name = digest(asked)
        parts = ", ".join(f'"{c}": "A", "B" or "tie"' for c in keys)
        form = f'Reply with one JSON object and nothing else:\n{{"id": "{name}", {parts}}}'
        schema = object_schema({"id": {"const": name}, **{c: {"enum": ["A", "B", "tie"]} for c in keys}})
        return await judge.ask_for(asked, form, lambda text: read_comparison(text, name, keys), schema)

    straight, turned = await asyncio.gather(one(first, second), one(second, first))
    for found in (straight, turned):
        if isinstance(found, Failed):
            return Compared(failed=found.error)
    assert isinstance(straight, dict) and isinstance(turned, dict)
    better = {c: (straight[c] + 1 - turned[c]) / 2 for c in keys}
    return Compared(better, {c: straight[c] != 1 - turned[c] for c in keys})
