"""What a judge is: it is shown plays and gives each its outcome. A world that cannot judge itself (`judged = True`) has one."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trailmark.types import Annotation, Episode, Outcome, Scored

if TYPE_CHECKING:
    from trailmark.config import ModelConfig
    from trailmark.score.config import JudgeConfig


@dataclass(frozen=True, slots=True)
class Play:
    """One episode as a judge sees it: what was shown first, what was answered last, and the row of data it began from."""

    episode: Episode
    prompt: str
    answer: str
    row: Mapping[str, Any]

    @property
    def where(self) -> str:
        """The row's name for a message."""
        return f"row '{self.episode.task.id}'"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`notes` are further numbers about the episode, such as marks by criterion."""

    outcome: Outcome
    notes: tuple[Annotation, ...] = ()


class Judge(ABC):
    """`source` says what it is ("function my_file.py:score"), `fingerprint` changes when its verdicts may change."""

    name: str = "judge"
    source: str = "judge"
    fingerprint: str = ""
    repeatable: bool = False  # asked again it says the same, at no cost: `verify` asks it again

    @abstractmethod
    async def judge(self, plays: Sequence[Play]) -> list[Verdict]:
        """One verdict for each play, in their order."""

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
    """A template with {prompt}, {answer}, {dialogue} and keys of the row filled in. Braces inside what is filled in stay."""
    known = {**{k: str(v) for k, v in play.row.items()}, "prompt": play.prompt, "answer": play.answer}
    known["dialogue"] = "\n".join(f"{t.seat}: {t.text}" for t in play.episode.turns)
    return re.sub(r"\{(\w+)\}", lambda m: known.get(m.group(1), m.group(0)), template)


def open_judge(reward: JudgeConfig | str | Mapping[str, Any], model: ModelConfig | None = None, folder: str | Path | None = None) -> Judge:
    """The judge that a recipe names: a text such as `my_file.py:score`, or a section with a `kind`. `model` is the model that
    scores where the section names none. `folder` is where paid answers are kept."""
    from trailmark.score import config

    settings = config.judge_config(reward)
    cache = None if folder is None else Path(folder) / "judge" / "answers.jsonl"
    if isinstance(settings, config.FunctionJudgeConfig):
        from trailmark.score.function import open_function

        return open_function(settings, model, cache)
    if isinstance(settings, config.ModelJudgeConfig):
        from trailmark.score.judge import ModelJudge

        return ModelJudge(settings, cache=cache)
    from trailmark.score.likelihood import LikelihoodJudge

    return LikelihoodJudge(settings, model, cache)
