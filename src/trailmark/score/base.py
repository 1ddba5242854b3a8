"""What a judge is: it is shown plays and gives each its outcome. A world that cannot judge itself (`judged = True`) has one."""

from __future__ import annotations

import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trailmark.errors import JudgeError
from trailmark.types import Annotation, Episode, Outcome, Scored

if TYPE_CHECKING:
    from trailmark.score.config import JudgeConfig


@dataclass(frozen=True, slots=True)
class Play:
    """One episode as a judge sees it: what was shown first, what was answered last, and the row of data it began from."""

    episode: Episode
    prompt: str
    answer: str
    row: Mapping[str, Any]
    messages: tuple[Mapping[str, str], ...] = ()  # what was shown first, if it was a conversation; `prompt` is its last

    @property
    def where(self) -> str:
        """The row's name for a message."""
        return f"row '{self.episode.task.id}'"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One outcome for everybody, or one for each side. `notes` are further numbers about the episode, such as marks by
    criterion, or about its turns."""

    outcome: Outcome | Mapping[str, Outcome]
    notes: tuple[Annotation, ...] = ()


class Judge(ABC):
    """`source` says what it is ("function my_file.py:score"), `fingerprint` changes when its verdicts may change. `earlier` are
    fingerprints that an older version gave to the same judge."""

    name: str = "judge"
    source: str = "judge"
    fingerprint: str = ""
    earlier: tuple[str, ...] = ()
    repeatable: bool = False  # asked again it says the same, at no cost: `verify` asks it again

    @abstractmethod
    async def judge(self, plays: Sequence[Play]) -> list[Verdict]:
        """One verdict for each play, in their order."""

    def keep(self, folder: str | Path) -> None:
        """Work for the run or the stage in whose `folder` this judge may keep what it needs, until it is told another one. A run
        has one judge from its first step to its last: one that has changed in between is refused."""
        file = Path(folder) / "judge.json"
        if why := self.changed(folder):
            raise JudgeError(
                f"{why}: its rewards would not be comparable. Put it back as it was, begin another run with out=DIR, or remove "
                f"{file} to go on."
            )
        now = {"name": self.name, "source": self.source, "fingerprint": self.fingerprint}
        try:
            if not file.exists() or json.loads(file.read_text("utf-8"))["fingerprint"] != self.fingerprint:  # of an older version
                file.parent.mkdir(parents=True, exist_ok=True)
                temp = file.with_name(".judge.json.tmp")
                temp.write_text(json.dumps(now, indent=1) + "\n", "utf-8")
                os.replace(temp, file)
        except OSError as problem:
            raise JudgeError(f"{file} cannot be used ({problem}): remove it and go on.") from None

    def changed(self, folder: str | Path) -> str:
        """What is another judge than the one that the note in `folder` is of; empty: it is the same, or there is no note."""
        file = Path(folder) / "judge.json"
        if not file.exists():
            return ""
        try:
            said = json.loads(file.read_text("utf-8"))
            before = said["fingerprint"]
            source = str(said.get("source", self.source))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
            raise JudgeError(f"{file} cannot be used ({problem}): remove it and go on.") from None
        if before in ("", self.fingerprint, *self.earlier):  # a judge without a fingerprint is known by nothing
            return ""
        prints = f"(fingerprint {before}, now {self.fingerprint})"
        if source != self.source:
            return f"{self.source} is not the judge that this run began with, {source} {prints}"
        return f"{self.source} has changed since this run began {prints}"

    @property
    def stamp(self) -> str:
        """What annotations have as their source."""
        return f"{self.source}@{self.fingerprint}"


def scored(reward: float, success: float | None) -> Scored:
    """A reward as an outcome; `success` is the reward from which on a play counts as a success."""
    return Scored(reward, None if success is None else reward >= success)


def digest(text: str | bytes) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text).hexdigest()[:16]


def filled(template: str, play: Play) -> str:
    """A template with {prompt}, {answer}, {dialogue} and keys of the row filled in. Braces inside what is filled in stay, and
    so do those of a command such as \\boxed{x}. A placeholder that the row has no key for is refused."""
    known = {**{k: str(v) for k, v in play.row.items()}, "prompt": play.prompt, "answer": play.answer}
    known["dialogue"] = "\n".join(f"{t.seat}: {t.text}" for t in play.episode.turns)


    def fill(m: re.Match[str]) -> str:
        name, before = m.group(1), template[: m.start()][-1:]
        if name not in known and name.isidentifier() and not before.isalnum():
            has = ", ".join(sorted(known))
            raise JudgeError(f"{play.where} has no key '{name}', which the reward's template asks for. It has: {has}.")
        return known.get(name, m.group(0))

    return re.sub(r"\{(\w+)\}", fill, template)


def open_judge(reward: JudgeConfig | str | Mapping[str, Any]) -> Judge:
    """The judge that a recipe names: a text such as `my_file.py:score`, or a section with a `kind`. The only place that makes
    judges from settings; models are loaded when they are first needed."""
    from trailmark.score import config

    settings = config.judge_config(reward)
    if isinstance(settings, config.FunctionJudgeConfig):
        from trailmark.score.function import open_function

        return open_function(settings)
    if isinstance(settings, config.ModelJudgeConfig):
        from trailmark.score.judge import ModelJudge

        return ModelJudge(settings)
    from trailmark.score.likelihood import LikelihoodJudge

    return LikelihoodJudge(settings)
