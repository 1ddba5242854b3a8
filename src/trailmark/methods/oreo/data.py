"""The data of OREO: one sample per trajectory, and collecting trajectories.

samples      one sequence per trajectory; streams mark its states and actions
collection   n episodes of each start, or a balanced number of right and wrong ones
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from trailmark.episodes import won
from trailmark.methods.collect import collect_starts, play_left
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
    """One sample per trajectory. Its streams: `action` is 1 / number of actions. `weight` marks the states (every
    action, or the first of each step) with 1 / their number, or with 1 if mean is "token". `reward` is R = mul * reward
    + add. `first` is 1 on the first state, and `won` too if the trajectory is a success. `step` numbers the steps."""
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
    """Two estimates for each step of a scored sample (streams value, policy_logp, ref). From the value: A = V(s') -
    V(s), with R in place of V(s') at the end. From the policy: beta * sum l. At the optimum they are equal."""
    at = np.nonzero(s.streams["weight"])[0]
    v = np.append(s.streams["value"][at], s.streams["reward"][at[-1]])
    ratio = np.where(s.streams["action"] != 0, s.streams["policy_logp"] - s.streams["ref"], 0.0)
    return np.diff(v), beta * np.add.reduceat(ratio, at)


# --- collection ---------------------------------------------------------------------------------------------------


def collect(
    path: Path, source: TaskSource, tasks: Sequence[Task], seats: Sequence[Seat], n: int = 10, seed: int = 0,
    prefix: str = "", protocol: Protocol | None = None, failures: float = 0.0,
) -> Path:  # fmt: skip
    """`n` episodes of each task. All are kept, and the episodes of a task stand together. Each is written as it
    finishes."""
    collect_starts(path, source, start_all(tasks, n, seed, prefix), seats, protocol, failures=failures)
    return path


def collect_balanced(
    path: Path, source: TaskSource, tasks: Sequence[Task], seats: Sequence[Seat], rounds: int = 16, want: int = 4,
    seed: int = 0, prefix: str = "", protocol: Protocol | None = None, failures: float = 0.0,
) -> Path:  # fmt: skip
    """Play rounds of one episode per task: at most `rounds`, until a task has `want` right and `want` wrong episodes.
    Then keep a balanced part."""
    kept = Collection(path)
    found: dict[str, list[Episode]] = {t.id: [] for t in tasks}
    open_ = list(tasks)
    for number in range(rounds):
        if not open_:
            break
        starts = start_all(open_, 1, seed, f"{prefix}{number}:")
        played = play_left(kept, source, starts, seats, protocol, failures=failures)
        for t, e in zip(open_, played, strict=True):
            found[t.id].append(replace(e, group=f"{prefix}{t.id}"))
        open_ = [t for t in open_ if not _enough(found[t.id], want)]
    return kept.finish([e for name, plays in found.items() for e in balanced(plays, want, f"{seed} {prefix}{name}")])


def _enough(plays: Sequence[Episode], want: int) -> bool:
    good = [won(e) for e in plays if isinstance(e.outcome, Scored)]
    return sum(good) >= want and len(good) - sum(good) >= want


def balanced(plays: Sequence[Episode], want: int = 4, seed: int | str = 0) -> list[Episode]:
    """At most `want` failures and min(successes, max(failures, 1), want) successes. They are drawn without replacement
    and keep their order. Episodes without a result are left out."""
    plays = [e for e in plays if isinstance(e.outcome, Scored)]
    draw = random.Random(f"balanced {seed}")
    good, bad = [e for e in plays if won(e)], [e for e in plays if not won(e)]
    few = min(len(bad), want)
    bad = draw.sample(bad, few)
    good = draw.sample(good, min(len(good), max(few, 1), want))
    kept = {e.id for e in (*good, *bad)}
    return [e for e in plays if e.id in kept]
