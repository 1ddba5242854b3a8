"""Asking a judge. A user may have written its class, so its verdicts are checked before anything is stored."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from trailmark.errors import JudgeError, TrailmarkError, shorten
from trailmark.score.base import Judge, Play, Verdict
from trailmark.types import Outcome, Scored


async def verdicts_of(judge: Judge, plays: Sequence[Play]) -> list[Verdict]:
    """The verdicts of a judge."""
    name = judge.name if judge.name != Judge.name else type(judge).__name__  # a user's class may set no name
    who = f"judge '{name}'"
    try:
        verdicts = await judge.judge(plays)
    except Exception as problem:
        if isinstance(problem, TrailmarkError) or type(judge).__module__.startswith("trailmark."):
            raise
        raise JudgeError(f"reward: {who} raised {type(problem).__name__}: {problem}.") from problem
    if not isinstance(verdicts, Sequence) or isinstance(verdicts, str):
        raise JudgeError(f"reward: {who} returned {_shown(verdicts)}: it must return a list of verdicts.")
    if len(verdicts) != len(plays):
        raise JudgeError(f"reward: {who} gave {len(verdicts)} verdicts for {len(plays)} plays.")
    for play, verdict in zip(plays, verdicts):
        if why := _unusable(play, verdict):
            raise JudgeError(f"reward: {who} {why}.")
    return list(verdicts)


def _unusable(play: Play, verdict: Any) -> str:
    """What is wrong with a verdict; "" if nothing is."""
    if not isinstance(verdict, Verdict):
        return f"gave {_shown(verdict)} for {play.where}: it must give a Verdict"
    sides = set(play.episode.outcomes)
    if isinstance(verdict.outcome, Mapping) and set(verdict.outcome) != sides:
        return f"gave outcomes to {_listed(verdict.outcome)} in {play.where}, where {_listed(sides)} played"
    for outcome in verdict.outcome.values() if isinstance(verdict.outcome, Mapping) else [verdict.outcome]:
        if not isinstance(outcome, Outcome):
            return f"gave {_shown(outcome)} as the outcome of {play.where}: it must be Scored, Invalid or Failed"
        if isinstance(outcome, Scored) and not _finite(outcome.reward):
            return f"gave the reward {_shown(outcome.reward)} for {play.where}: it must be a finite int or float"
        if isinstance(outcome, Scored) and not all(map(_finite, outcome.parts.values())):
            return f"gave the parts {_shown(dict(outcome.parts))} for {play.where}: they must be finite numbers"
    for note in verdict.notes:
        if note.episode != play.episode.id:
            return f"answered for episode '{note.episode}' where '{play.episode.id}' was asked"
        if not all(map(_finite, note.values)):
            return f"noted {_shown(list(note.values))} as '{note.name}' of {play.where}: only finite numbers are stored"
    return ""


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _shown(value: Any) -> str:
    return shorten(repr(value))


def _listed(sides: Any) -> str:
    return ", ".join(f"'{s}'" for s in sorted(sides)) or "nobody"
