"""Several rewards with names: the reward of a play is the sum of weight x reward. A weight of 0 makes a metric.

Each reward is stored by its name in the outcome (`Scored.parts`), before its weight. If one of them has no number for a
play, the play has none: a part that is missing is not a part of 0.
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trailmark.errors import JudgeError
from trailmark.score.base import Judge, Play, Verdict, digest
from trailmark.score.checked import verdicts_of
from trailmark.score.config import SeveralConfig
from trailmark.types import Annotation, Episode, Failed, Invalid, Outcome, Scored, Task


def open_several(config: SeveralConfig) -> Judge:
    from trailmark.score.open_judge import open_judge

    parts = {name: open_judge(named.reward) for name, named in config.of.items()}
    return SeveralJudge(parts, {name: named.weight for name, named in config.of.items()}, config.success)


class SeveralJudge(Judge):
    """A play is a success if its reward is at least `success`; if that is None, if it is one to every part that says
    so. The notes of a part have its name: NAME.judge_score."""

    def __init__(self, parts: Mapping[str, Judge], weights: Mapping[str, float], success: float | None = None):
        self.parts, self.weights, self.success = dict(parts), dict(weights), success
        self.name = " + ".join(f"{weights[n]:g} {n}" for n in parts)
        self.source = "rewards " + ", ".join(f"{n} ({p.source})" for n, p in parts.items())
        said = [[n, weights[n], p.source, p.fingerprint] for n, p in parts.items()]
        self.fingerprint = digest(json.dumps([said, success]))
        # `agrees` compares whole outcomes, so it holds only if every part compares them too
        self.repeatable = all(p.repeatable and type(p).agrees is Judge.agrees for p in parts.values())

    async def judge(self, plays: Sequence[Play]) -> list[Verdict]:
        asked = [asyncio.ensure_future(verdicts_of(p, plays)) for p in self.parts.values()]
        try:
            found = dict(zip(self.parts, await asyncio.gather(*asked)))
        finally:
            for one in asked:  # if a part raises an error, the others need not go on
                one.cancel()
        return [self._total(play, {n: v[k] for n, v in found.items()}) for k, play in enumerate(plays)]

    def _total(self, play: Play, verdicts: Mapping[str, Verdict]) -> Verdict:
        notes = tuple(_named(a, name) for name, v in verdicts.items() for a in v.notes)
        given = {name: v.outcome for name, v in verdicts.items()}
        if not any(isinstance(o, Mapping) for o in given.values()):
            return Verdict(self._sum(given), notes)
        of = lambda side: {n: o[side] if isinstance(o, Mapping) else o for n, o in given.items()}
        return Verdict({side: self._sum(of(side)) for side in play.episode.outcomes}, notes)

    @property
    def asks_server(self) -> bool:
        return any(part.asks_server for part in self.parts.values())

    def _sum(self, outcomes: Mapping[str, Any]) -> Outcome:
        for name, o in outcomes.items():
            if isinstance(o, Failed):
                return Failed(f"reward '{name}': {o.error}")
        for name, o in outcomes.items():
            if isinstance(o, Invalid):
                return Invalid(f"reward '{name}': {o.reason}")
        parts = {name: o.reward for name, o in outcomes.items()}
        total = weighted(self.weights, parts)
        said = [o.success for o in outcomes.values() if o.success is not None]
        won = total >= self.success if self.success is not None else all(said) if said else None
        return Scored(total, won, parts)

    def bind(self, source: Any) -> None:
        for part in self.parts.values():
            part.bind(source)

    def must_read(self, rows: Sequence[Task], longest: int) -> None:
        for part in self.parts.values():
            part.must_read(rows, longest)

    def compare(self, episodes: Sequence[Episode]) -> Sequence[Annotation]:
        return [_named(a, name) for name, part in self.parts.items() for a in part.compare(episodes)]

    def afresh(self) -> Judge:
        other = copy.copy(self)
        other.parts = {name: part.afresh() for name, part in self.parts.items()}
        return other

    def metrics(self, notes: Sequence[Annotation]) -> dict[str, float]:
        out = {}
        for name, part in self.parts.items():
            mine = [replace(a, name=a.name.removeprefix(f"{name}.")) for a in notes if a.name.startswith(f"{name}.")]
            out |= {f"{name}/{key}": value for key, value in part.metrics(mine).items()}
        return out

    def keep(self, folder: str | Path) -> None:
        for name, part in self.parts.items():
            part.keep(Path(folder) / name)
        super().keep(folder)

    def changed(self, folder: str | Path) -> str:
        found = (f"'{n}': {why}" for n, part in self.parts.items() if (why := part.changed(Path(folder) / n)))
        return next(found, "") or super().changed(folder)


def weighted(weights: Mapping[str, float], parts: Mapping[str, float]) -> float:
    """The sum of weight x reward, rounded once, so that the order of the names does not matter."""
    try:
        total = math.fsum(weights[name] * value for name, value in parts.items())
    except (OverflowError, ValueError):
        total = math.inf
    if not math.isfinite(total):
        raise JudgeError(f"reward: the weighted sum of {dict(parts)} is no finite number: use smaller weights.")
    return total


def _named(note: Annotation, name: str) -> Annotation:
    return replace(note, name=f"{name}.{note.name}")
