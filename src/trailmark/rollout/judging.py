"""Plays of a world that cannot judge itself: a judge gives each its outcome before the episode is returned or written.

A judge may give one outcome, or one for each side. The reward of a single outcome goes to the turn that acted last. The
reward of a side's own outcome goes to the turn of that side that acted last.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trailmark.credit.turns import side_of
from trailmark.errors import TaskError
from trailmark.run_async import wait
from trailmark.score.base import Judge, Play, Verdict
from trailmark.score.checked import verdicts_of
from trailmark.tasks.base import Observation, TaskSource, declared
from trailmark.types import Annotation, Episode, Outcome, Scored, Turn


def judge_of(source: Any, given: Judge | None) -> Judge | None:
    """The judge of a source's plays: the given one, or the source's own. None: the world judges itself."""
    source = declared(source)
    if not source.judged:
        return None
    judge = given or source.judge
    if judge is None:
        raise TaskError(
            f"task '{source.name}' cannot judge what is played: name who gives the reward, such as reward: "
            "my_file.py:score."
        )
    return judge


@contextlib.contextmanager
def collecting_notes(source: Any) -> Iterator[list[Annotation]]:
    """Collect the judge's notes on all plays of a source in this block, even if other functions call `play`."""
    source = declared(source)
    if not source.judged:
        yield []
        return
    before, source.judge_notes = source.judge_notes, []
    try:
        yield source.judge_notes
    finally:
        source.judge_notes = before


async def give_verdicts(
    episodes: dict[int, Episode], first: Mapping[int, Observation], judge: Judge, notes: list[Annotation] | None = None
) -> None:
    """Ask the judge about the episodes with the numbers in `first`, all at once, and store its verdicts in them.
    `first` maps a number to the first prompt."""
    numbers = sorted(first)
    plays = [as_play(episodes[k], first[k]) for k in numbers]
    for k, play, verdict in zip(numbers, plays, await verdicts_of(judge, plays)):
        episodes[k] = _with_verdict(play.episode, verdict, judge, notes)


def judge_episodes(source: TaskSource, episodes: Sequence[Episode], judge: Judge) -> list[Verdict]:
    """One verdict for each finished play, even if it already has an outcome. The episodes stay as they are."""
    return wait(verdicts_of(judge, [as_play(e, source.make().reset(e.task)) for e in episodes]))


def _with_verdict(e: Episode, verdict: Verdict, judge: Judge, notes: list[Annotation] | None) -> Episode:
    about: dict[str, Any] = {"name": judge.name, "source": judge.source, "fingerprint": judge.fingerprint}
    if judge.weights:
        about["weights"] = dict(judge.weights)
    given, turns = verdict.outcome, list(e.turns)
    outcomes = {s: given[s] for s in e.outcomes} if isinstance(given, Mapping) else dict.fromkeys(e.outcomes, given)
    if isinstance(given, Mapping):
        about["sides"] = True
    own = {}
    for i, reward in judged_rewards(dataclasses.replace(e, outcomes=outcomes, info={**e.info, "judge": about})).items():
        if turns[i].reward:
            own[str(i)] = turns[i].reward
        turns[i] = dataclasses.replace(turns[i], reward=turns[i].reward + reward)
    if own:  # one number if there is one outcome
        about |= {"world_rewards": own} if isinstance(given, Mapping) else {"world_reward": next(iter(own.values()))}
    if notes is not None:
        for k, (side, outcome) in enumerate(outcomes.items()):
            if isinstance(outcome, Scored) and (k == 0 or isinstance(given, Mapping)):
                name = f"reward_{side}" if k else "reward"
                notes.append(Annotation(e.id, name, "episode", (outcome.reward,), None, judge.stamp))
        notes.extend(verdict.notes)
    return dataclasses.replace(e, turns=tuple(turns), outcomes=outcomes, info={**e.info, "judge": about})


def as_play(e: Episode, first: Observation) -> Play:
    """An episode as a judge sees it. `first` is its first prompt. The row is a copy, which a user's function may
    change."""
    acted = last_act(e)
    answer = "" if acted is None else e.turns[acted].action or ""
    return Play(e, first.text, answer, copy.deepcopy({**e.task.data, **e.task.meta}), first.messages)


def last_act(e: Episode, side: str | None = None) -> int | None:
    """The turn that acted last: of all turns, or of one side."""
    acted = [i for i, t in enumerate(e.turns) if t.action is not None and side in (None, side_of(e, t.seat))]
    return max(acted, default=None)


def judged_rewards(e: Episode) -> dict[int, float]:
    """The rewards from the judge, by turn."""
    about: Mapping[str, Any] = e.info.get("judge", {})
    named = {p.side for p in e.players.values()}
    whose: list[tuple[str | None, Outcome]] = [(None, e.outcome)]
    if about.get("sides"):  # the only side has no name
        whose = [(side if side in named else "", outcome) for side, outcome in e.outcomes.items()]
    found = {}
    for side, outcome in whose:
        acted = last_act(e, side)
        if about and acted is not None and isinstance(outcome, Scored):
            found[acted] = outcome.reward
    return found


def as_played(e: Episode) -> tuple[Turn, ...]:
    """The turns of an episode with the rewards of its world only, without the judge's."""
    about: Mapping[str, Any] = e.info.get("judge", {})
    turns = list(e.turns)
    for i in judged_rewards(e):
        own = about.get("world_rewards", {}).get(str(i), 0.0) if about.get("sides") else about.get("world_reward", 0.0)
        turns[i] = dataclasses.replace(turns[i], reward=float(own))
    return tuple(turns)
