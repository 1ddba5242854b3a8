"""The five files of text that Reflect-RL is fine-tuned on. A row is {"text": prompt + response}; the prompt ends with a marker,
and what stands behind its *last* occurrence is the response.

    sft.jsonl             before + choices + ACTION + label                          reflect-policy
    sft_policy.jsonl      before + ANALYZE + reflection + choices + ACTION + label   reflect-policy
    sft_reflection.jsonl  before + ANALYZE + reflection                              reflect-reflector
    sft_policy_positive.jsonl, sft_reflection_positive.jsonl: the same without recoveries from mistakes

A reflection ends with an eos, or the reflector would never stop. A label does not: the policy writes one token and is then
cut, so an eos behind it is never sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trailmark.errors import DataError
from trailmark.formats.rows import Row, dump, each
from trailmark.formats.turns import Imported, Starts, episode, plain, prompt_of, row_of, turns_of
from trailmark.types import Annotation, Episode

ANALYZE = " # Analyze:\n"
ACTION = " # Action:\n"


@dataclass(frozen=True, slots=True)
class SftStep:
    """One decision of a teacher, part by part: the state without its choices, what was thought about it, the listed choices with
    the line above them, the label taken. `positive` is false where the step before was a mistake."""

    before: str
    reflection: str
    choices: str
    label: str
    positive: bool = True

    def texts(self) -> dict[str, str]:
        """The text of this step in each file; the last marker in it is the one that was put there, or it is refused."""
        thought = self.before + ANALYZE
        parts = {
            "sft": (self.before + self.choices + ACTION, self.label, ACTION),
            "sft_policy": (thought + self.reflection + self.choices + ACTION, self.label, ACTION),
            "sft_reflection": (thought, self.reflection, ANALYZE),
        }
        return {name: _join(prompt, response, marker) for name, (prompt, response, marker) in parts.items()}


def split(text: str, marker: str) -> tuple[str, str]:
    """Prompt, with its marker, and response."""
    head, found, response = text.rpartition(marker)
    if not found:
        raise DataError(f"has no marker {marker!r}: where does the response begin?")
    return head + found, response


def _join(prompt: str, response: str, marker: str) -> str:
    if split(prompt + response, marker) != (prompt, response):
        raise DataError(f"the response {response[:40]!r} must stand behind the marker {marker!r} and not hold it.")
    return prompt + response


def write_sft_files(folder: str | Path, steps: Iterable[SftStep]) -> dict[str, Path]:
    """All five files; their paths by name. A step that could not be read back is refused before anything is written."""
    files: dict[str, list[dict[str, str]]] = {}
    for step in steps:
        for name, text in step.texts().items():
            files.setdefault(name, []).append({"text": text})
            if step.positive and name != "sft":
                files.setdefault(f"{name}_positive", []).append({"text": text})
    paths = {name: Path(folder) / f"{name}.jsonl" for name in files}
    for name, rows in files.items():
        dump(paths[name], rows, "lines")
    return paths


def _read(path: str | Path, tokenizer: Any, seat: str, prefix: str, skip_bad: bool, marker: str, name: str) -> Imported:
    starts = Starts(prefix)

    def one(row: Row) -> Episode:
        v = row.object(row.value, "", ["text"])
        try:
            prompt, response = split(row.text(v["text"], "text"), marker)
        except DataError as problem:
            raise problem if problem.file else row.bad(str(problem), "text") from None
        turn = plain(tokenizer, prompt, response, seat, end=marker == ANALYZE)
        info = {"format": name, "row": {k: x for k, x in v.items() if k != "text"}}
        return episode(starts.name(prompt), {"prompt": prompt}, [turn], None, info)

    made, skipped = each(path, one, skip_bad)
    return Imported(made, [], skipped)


def _write(
    path: str | Path, episodes: Iterable[Episode], tokenizer: Any, seat: str | None, marker: str, name: str
) -> None:
    rows = []
    for e in episodes:
        for i in turns_of(e, seat):
            rows.append({"text": _join(prompt_of(e, i, tokenizer), e.turns[i].text, marker), **row_of(e, name)})
    dump(path, rows, "lines")


def read_reflect_policy(
    path: str | Path, tokenizer: Any, *, seat: str = "policy", prefix: str = "", skip_bad: bool = False
) -> Imported:
    return _read(path, tokenizer, seat, prefix, skip_bad, ACTION, "reflect-policy")


def read_reflect_reflector(
    path: str | Path, tokenizer: Any, *, seat: str = "reflector", prefix: str = "", skip_bad: bool = False
) -> Imported:
    return _read(path, tokenizer, seat, prefix, skip_bad, ANALYZE, "reflect-reflector")


def write_reflect_policy(
    path: str | Path,
    episodes: Iterable[Episode],
    tokenizer: Any,
    *,
    annotations: Sequence[Annotation] = (),
    seat: str | None = None,
) -> None:
    """One row per turn of the seat."""
    _write(path, episodes, tokenizer, seat, ACTION, "reflect-policy")


def write_reflect_reflector(
    path: str | Path,
    episodes: Iterable[Episode],
    tokenizer: Any,
    *,
    annotations: Sequence[Annotation] = (),
    seat: str | None = None,
) -> None:
    """One row per turn of the seat."""
    _write(path, episodes, tokenizer, seat, ANALYZE, "reflect-reflector")
