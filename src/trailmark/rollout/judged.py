"""Plays of a world that cannot judge itself: a judge gives each its outcome before anybody sees the episode."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from trailmark.errors import JudgeError, TaskError
from trailmark.score.base import Judge, Play
from trailmark.types import Annotation, Episode, Scored, Turn


def judge_of(source: Any, given: Judge | None) -> Judge | None:
    """Who judges the plays of a source: the one that was given, or the source's own. None: the world judges itself."""
    if not source.judged:
        return None
    judge = given or source.judge
    if judge is None:
        raise TaskError(
            f"task '{source.name}' cannot judge what is played: name who gives the reward, such as reward: my_file.py:score."
        )
    return judge


async def give_verdicts(
    episodes: dict[int, Episode], prompts: Mapping[int, str], judge: Judge, notes: list[Annotation] | None = None
) -> None:
    """Ask the judge about the episodes whose numbers are in `prompts`, all at once, and put what it says into them."""
    plays = [as_play(episodes[k], prompt) for k, prompt in sorted(prompts.items())]
    verdicts = await judge.judge(plays)
    if len(verdicts) != len(plays):
        raise JudgeError(f"judge '{judge.name}' gave {len(verdicts)} verdicts for {len(plays)} plays.")
    for k, play, verdict in zip(sorted(prompts), plays, verdicts):
        wrong = next((n.episode for n in verdict.notes if n.episode != play.episode.id), None)
        if wrong is not None:
            raise JudgeError(f"judge '{judge.name}' answered for episode '{wrong}' where '{play.episode.id}' was asked.")
        e, outcome = play.episode, verdict.outcome
        about: dict[str, Any] = {"name": judge.name, "source": judge.source, "fingerprint": judge.fingerprint}
        turns, acted = list(e.turns), last_act(e)
        if isinstance(outcome, Scored) and acted is not None:
            if own := turns[acted].reward:
                about["world_reward"] = own
            turns[acted] = dataclasses.replace(turns[acted], reward=own + outcome.reward)
            if notes is not None:
                notes.append(Annotation(e.id, "reward", "episode", (outcome.reward,), None, judge.stamp))
        if notes is not None:
            notes.extend(verdict.notes)
        outcomes = dict.fromkeys(e.outcomes, outcome)
        episodes[k] = dataclasses.replace(e, turns=tuple(turns), outcomes=outcomes, info={**e.info, "judge": about})


def as_play(e: Episode, prompt: str) -> Play:
    acted = last_act(e)
    answer = "" if acted is None else e.turns[acted].action or ""
    return Play(e, prompt, answer, {**e.task.data, **e.task.meta})


def last_act(e: Episode) -> int | None:
    return max((i for i, t in enumerate(e.turns) if t.action is not None), default=None)


def as_played(e: Episode) -> tuple[Turn, ...]:
    """The turns of an episode with the rewards that its world gave, without what a judge added."""
    acted = last_act(e)
    if "judge" not in e.info or acted is None:
        return e.turns
    own = float(e.info["judge"].get("world_reward", 0.0))
    return tuple(dataclasses.replace(t, reward=own) if i == acted else t for i, t in enumerate(e.turns))
