"""The base class of judges. A judge sees plays and gives each an outcome. A world that cannot judge itself (`judged =
True`) has a judge."""

from __future__ import annotations

import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trailmark.errors import JudgeError
from trailmark.plain_files import read_json
from trailmark.types import Annotation, Episode, Outcome, Scored, Task


@dataclass(frozen=True, slots=True)
class Play:
    """One episode as a judge sees it: the first prompt, the last answer, and the row of data that it started from."""

    episode: Episode
    prompt: str
    answer: str
    row: Mapping[str, Any]
    # the first prompt if it was a conversation; `prompt` is its last message
    messages: tuple[Mapping[str, str], ...] = ()

    @property
    def where(self) -> str:
        """The name of the row, for error messages."""
        return f"row '{self.episode.task.id}'"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One outcome for all sides, or one for each side. `notes` are further numbers about the episode or its turns, such
    as marks by criterion."""

    outcome: Outcome | Mapping[str, Outcome]
    notes: tuple[Annotation, ...] = ()


class Judge(ABC):
    """`source` describes the judge ("function my_file.py:score"). `fingerprint` changes if its verdicts may change."""

    name: str = "judge"
    source: str = "judge"
    fingerprint: str = ""
    weights: Mapping[str, float] = {}  # of the named rewards whose sum its rewards are, if they are one
    repeatable: bool = False  # asking again is free and gives the same verdicts, so `verify` asks again

    @abstractmethod
    async def judge(self, plays: Sequence[Play]) -> list[Verdict]:
        """One verdict for each play, in order."""

    def bind(self, source: Any) -> None:
        """Learn whose plays will be judged, before the first one."""
        return None

    def must_read(self, rows: Sequence[Task], longest: int) -> None:
        """Refuse rows that this judge could not judge with an answer of `longest` tokens, before a run begins."""
        return None

    def compare(self, episodes: Sequence[Episode]) -> Sequence[Annotation]:
        """For plays of an evaluation: what else would explain their rewards, as further notes."""
        return []

    def afresh(self) -> Judge:
        """The same judge, that reads no number which was stored before."""
        return self

    def agrees(self, stored: Outcome | Mapping[str, Outcome], verdict: Verdict) -> bool:
        """Whether a verdict is the one that was stored when this judge was asked before."""
        return verdict.outcome == stored

    def metrics(self, notes: Sequence[Annotation]) -> dict[str, float]:
        """Numbers about a step or an evaluation, from this judge's notes on its plays."""
        return {}

    def keep(self, folder: str | Path) -> None:
        """Use `folder`, of a run or a stage, for files that this judge stores, until another folder is set. A run has
        one judge from its first to its last step: a judge that has changed is refused."""
        file = Path(folder) / "judge.json"
        if why := self.changed(folder):
            raise JudgeError(
                f"{why}: its rewards would not be comparable. Put it back as it was, begin another run with out=DIR, "
                f"or remove {file} to go on."
            )
        now = {"name": self.name, "source": self.source, "fingerprint": self.fingerprint}
        try:
            if not file.exists() or read_json(file)["fingerprint"] != self.fingerprint:
                file.parent.mkdir(parents=True, exist_ok=True)
                temp = file.with_name(".judge.json.tmp")
                temp.unlink(missing_ok=True)  # it may be a link
                temp.write_text(json.dumps(now, indent=1) + "\n", "utf-8")
                os.replace(temp, file)
        except OSError as problem:
            raise JudgeError(f"{file} cannot be used ({problem}): remove it and go on.") from None

    def changed(self, folder: str | Path) -> str:
        """A phrase that says how this judge differs from the one noted in `folder`. "" if it is the same, or if there
        is no note."""
        file = Path(folder) / "judge.json"
        if not file.exists():
            return ""
        try:
            said = read_json(file)
            before = said["fingerprint"]
            source = str(said.get("source", self.source))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
            raise JudgeError(f"{file} cannot be used ({problem}): remove it and go on.") from None
        if before in ("", self.fingerprint):  # without a fingerprint nothing can be compared
            return ""
        prints = f"(fingerprint {before}, now {self.fingerprint})"
        if source != self.source:
            return f"{self.source} is not the judge that this run began with, {source} {prints}"
        return f"{self.source} has changed since this run began {prints}"

    @property
    def asks_server(self) -> bool:
        """Whether a server gives its verdicts, so that a play may have to wait for another try."""
        return getattr(getattr(self, "config", None), "server", None) is not None

    @property
    def stamp(self) -> str:
        """The source that annotations record."""
        return f"{self.source}@{self.fingerprint}"


def scored(reward: float, success: float | None) -> Scored:
    """A reward as an outcome. A play is a success if its reward is at least `success`."""
    return Scored(reward, None if success is None else reward >= success)


def digest(text: str | bytes) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text).hexdigest()[:16]


def filled(template: str, play: Play) -> str:
    """Fill {prompt}, {answer}, {dialogue} and keys of the row into a template. Braces in the inserted text stay as they
    are, and so do those of commands such as \boxed{x}. An unknown placeholder is an error."""
    known = {**{k: str(v) for k, v in play.row.items()}, "prompt": play.prompt, "answer": play.answer}
    known["dialogue"] = "\n".join(f"{t.seat}: {t.text}" for t in play.episode.turns)

    def fill(m: re.Match[str]) -> str:
        name, before = m.group(1), template[: m.start()][-1:]
        if name not in known and name.isidentifier() and not before.isalnum():
            has = ", ".join(sorted(known))
            raise JudgeError(f"{play.where} has no key '{name}', which the reward's template asks for. It has: {has}.")
        return known.get(name, m.group(0))

    return re.sub(r"\{(\w+)\}", fill, template)
