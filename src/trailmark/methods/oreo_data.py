"""The data of OREO: one sample per trajectory, and collecting trajectories.

samples      one sequence per trajectory, with the states and the actions as streams
collection   n samples of each start, or a balanced number of right and wrong ones
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from trailmark.methods.collect import collect_starts, play_left
from trailmark.methods.offline import won
from trailmark.rollout.play import Protocol, Seat, start_all
from trailmark.runs.collect import Collection
from trailmark.samples import build_samples
from trailmark.tasks.base import TaskSource
from trailmark.types import Episode, Sample, Scored, Task

# --- samples ------------------------------------------------------------------------------------------------------


def trajectory_samples(
    episodes: Sequence[Episode],
    seat: str = "policy",
    states: Literal["token", "step"] = "token",
    mean: Literal["sequence", "token"] = "sequence",
    mul: float = 1.0,
    add: float = 0.0,
) -> list[Sample]:
    """One sample per trajectory. Streams: `action` (1 / number of actions), `weight` (the states: every action, or the
    first of each step; 1 / their number, or with mean "token" 1), `reward` (R = mul * reward + add), `first` and `won`
    (1 on the first state, the second only of a success), `step`."""
    rewards = {}
    for e in episodes:
        assert isinstance(e.outcome, Scored), f"episode '{e.id}' has no reward"
        rewards[e.id] = [mul * e.outcome.reward + add] * sum(t.seat == seat and bool(t.tokens) for t in e.turns)
    rows = build_samples(episodes, seat, {"reward": rewards}, "sequence", weight="action")
    return [_states(s, won(e), states, mean) for s, e in zip(rows, episodes, strict=True)]


def _states(s: Sample, success: bool, states: str, mean: str) -> Sample:
    acts, step = s.streams["action"] != 0, s.streams["step"]
    begins = acts & (step != np.concatenate([[-1], step[:-1]])) if states == "step" else acts
    number = float(begins.sum())
    first = np.zeros(len(acts))
    first[np.argmax(begins)] = 1.0
    streams = {
        "action": s.streams["action"],
        "weight": begins / number if mean == "sequence" else begins.astype(float),
        "reward": s.streams["reward"],
        "first": first,
        "won": first * success,
        "step": step,
    }
    mass = {"action": 1.0, "weight": 1.0 if mean == "sequence" else number, "first": 1.0, "won": float(success)}
    return Sample(s.tokens, streams, mass, episode=s.episode, group=s.group)


def advantages(s: Sample, beta: float) -> tuple[np.ndarray, np.ndarray]:
    """For each step of a scored sample (streams value, policy_logp, ref): what the value says it was worth, A = V(s') -
    V(s), with R in the place of V(s') at the end; and what the policy says, beta * sum l. At the optimum they are
    equal."""
    at = np.nonzero(s.streams["weight"])[0]
    v = np.append(s.streams["value"][at], s.streams["reward"][at[-1]])
    ratio = np.where(s.streams["action"] != 0, s.streams["policy_logp"] - s.streams["ref"], 0.0)
    return np.diff(v), beta * np.add.reduceat(ratio, at)


# --- collection ---------------------------------------------------------------------------------------------------


def collect(
    path: Path, source: TaskSource, tasks: Sequence[Task], seats: Sequence[Seat], n: int = 10, seed: int = 0,
    prefix: str = "", protocol: Protocol | None = None,
) -> Path:  # fmt: skip
    """`n` episodes of each task, every one kept, those of a task next to one another. They are written as they
    finish."""
    collect_starts(path, source, start_all(tasks, n, seed, prefix), seats, protocol)
    return path


def collect_balanced(
    path: Path, source: TaskSource, tasks: Sequence[Task], seats: Sequence[Seat], rounds: int = 16, want: int = 4,
    seed: int = 0, prefix: str = "", protocol: Protocol | None = None,
) -> Path:  # fmt: skip
    """Up to `rounds` episodes of each task, one a round, until `want` are right and `want` wrong; then the balanced
    part."""
    kept = Collection(path)
    found: dict[str, list[Episode]] = {t.id: [] for t in tasks}
    open_ = list(tasks)
    for number in range(rounds):
        if not open_:
            break
        starts = start_all(open_, 1, seed, f"{prefix}{number}:")
        for t, e in zip(open_, play_left(kept, source, starts, seats, protocol), strict=True):
            found[t.id].append(replace(e, group=f"{prefix}{t.id}"))
        open_ = [t for t in open_ if not _enough(found[t.id], want)]
    return kept.finish([e for name, plays in found.items() for e in balanced(plays, want, f"{seed} {prefix}{name}")])


def _enough(plays: Sequence[Episode], want: int) -> bool:
    good = [won(e) for e in plays if isinstance(e.outcome, Scored)]
    return sum(good) >= want and len(good) - sum(good) >= want


def balanced(plays: Sequence[Episode], want: int = 4, seed: int | str = 0) -> list[Episode]:
    """At most `want` failures, and min(successes, max(failures, 1), want) successes, drawn without replacement and left
    in their order. What has no result is left out."""
    plays = [e for e in plays if isinstance(e.outcome, Scored)]
    draw = random.Random(f"balanced {seed}")
    good, bad = [e for e in plays if won(e)], [e for e in plays if not won(e)]
    few = min(len(bad), want)
    bad = draw.sample(bad, few)
    good = draw.sample(good, min(len(good), max(few, 1), want))
    kept = {e.id for e in (*good, *bad)}
    return [e for e in plays if e.id in kept]
