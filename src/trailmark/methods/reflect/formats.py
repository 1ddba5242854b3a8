"""The five text files that Reflect-RL is fine-tuned on. A row is {"text": prompt + response}. The prompt ends with a
marker, and the response is the text after its *last* occurrence.

    sft.jsonl             before + choices + ACTION + label                          reflect-policy
    sft_policy.jsonl      before + ANALYZE + reflection + choices + ACTION + label   reflect-policy
    sft_reflection.jsonl  before + ANALYZE + reflection                              reflect-reflector
    sft_policy_positive.jsonl, sft_reflection_positive.jsonl: the same without recoveries from mistakes

A reflection ends with an eos, or the reflector would never stop. A label does not: the policy writes one token and is
then cut, so an eos after it is never sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trailmark.errors import DataError
from trailmark.formats.rows import Row
from trailmark.formats.turns import Imported, Reader, Writer, episode, plain, prompt_of, row_of, turns_of
from trailmark.types import Episode

ANALYZE = " # Analyze:\n"
ACTION = " # Action:\n"


@dataclass(frozen=True, slots=True)
class SftStep:
    """One decision of a teacher in parts: the state without its choices, the reflection, the listed choices with their
    heading, the label taken. `positive` is false if the step before was a mistake."""

    before: str
    reflection: str
    choices: str
    label: str
    positive: bool = True

    def texts(self) -> dict[str, str]:
        """The text of this step for each kind of file."""
        thought = self.before + ANALYZE
        return {
            "sft": join(self.before + self.choices + ACTION, self.label, ACTION),
            "sft_policy": join(thought + self.reflection + self.choices + ACTION, self.label, ACTION),
            "sft_reflection": join(thought, self.reflection, ANALYZE),
        }


def split(text: str, marker: str) -> tuple[str, str]:
    """The prompt, with its marker, and the response."""
    head, found, response = text.rpartition(marker)
    if not found:
        raise DataError(f"the text has no marker {marker!r}: where does the response begin?")
    return head + found, response


def join(prompt: str, response: str, marker: str) -> str:
    """The inverse of `split`. A text that could not be split again is refused."""
    if not prompt.endswith(marker) or marker in response:
        raise DataError(f"the response {response[:40]!r} must follow the marker {marker!r} and not contain it.")
    return prompt + response


def _from_row(r: Reader, row: Row, marker: str, name: str) -> Imported:
    v = row.fields(row.value, "", ["text"])
    text = row.text(v["text"], "text")
    try:
        prompt, response = split(text, marker)
    except DataError as problem:
        raise row.bad(str(problem), "text") from None
    info = {"format": name, "row": {k: x for k, x in v.items() if k != "text"}}
    turn = plain(r, prompt, response, end=marker == ANALYZE)
    return Imported([episode(r.starts.name(prompt), {"prompt": prompt}, [turn], None, info)])


def _to_rows(w: Writer, episodes: Sequence[Episode], marker: str, name: str) -> list[dict[str, Any]]:
    """One row per turn of the seat."""
    turns = [(e, i) for e in episodes for i in turns_of(w, e)]
    return [{"text": join(prompt_of(w, e, i), e.turns[i].text, marker), **row_of(e, name)} for e, i in turns]


def reflect_policy_from_row(r: Reader, row: Row) -> Imported:
    return _from_row(r, row, ACTION, "reflect-policy")


def reflect_policy_to_rows(w: Writer, episodes: Sequence[Episode]) -> list[dict[str, Any]]:
    return _to_rows(w, episodes, ACTION, "reflect-policy")


def reflect_reflector_from_row(r: Reader, row: Row) -> Imported:
    return _from_row(r, row, ANALYZE, "reflect-reflector")


def reflect_reflector_to_rows(w: Writer, episodes: Sequence[Episode]) -> list[dict[str, Any]]:
    return _to_rows(w, episodes, ANALYZE, "reflect-reflector")
