"""Questions about episodes that more than one package asks: which were won, which belong together, which rewards are
equal, and which few of many to look at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np

from trailmark.types import Episode, Failed, Invalid, Scored

T = TypeVar("T")
SAME = 1e-6  # of the range of rewards: below this, the rewards of a group are equal


def evenly(things: Sequence[T], most: int) -> list[T]:
    """At most `most` of the things: the first, the last and evenly between."""
    if len(things) <= most or most < 2:
        return list(things[: max(most, 1)])
    return [things[round(i * (len(things) - 1) / (most - 1))] for i in range(most)]


def won(e: Episode) -> bool:
    """Whether an episode is a success: as its world says, or else if its reward is positive."""
    outcome = e.outcome
    if not isinstance(outcome, Scored):
        return False
    return outcome.reward > 0 if outcome.success is None else outcome.success


def counted(episodes: Sequence[Episode]) -> dict[str, int]:
    """How many episodes there are, and how many of them are scored, invalid and failed."""
    kinds = {"scored": Scored, "invalid": Invalid, "failed": Failed}
    counts = {name: sum(isinstance(e.outcome, kind) for e in episodes) for name, kind in kinds.items()}
    return {"episodes": len(episodes), **counts}


def by_group(episodes: Iterable[Episode]) -> dict[str, list[Episode]]:
    groups: dict[str, list[Episode]] = {}
    for e in episodes:
        groups.setdefault(e.group, []).append(e)
    return groups


def group_rewards(episodes: Iterable[Episode]) -> dict[str, list[float]]:
    """The rewards of the scored episodes of each group."""
    groups: dict[str, list[float]] = {}
    for e in episodes:
        if isinstance(e.outcome, Scored):
            groups.setdefault(e.group, []).append(e.outcome.reward)
    return groups


def same_groups(episodes: Iterable[Episode]) -> tuple[int, int]:
    """How many groups of several scored episodes all earned the same, and how many such groups there are."""
    rewards = group_rewards(episodes)
    every = [r for group in rewards.values() for r in group]
    several = [g for g in rewards.values() if len(g) > 1]
    return sum(equal(g, every) for g in several), len(several)


def equal(group: Sequence[float], batch: Sequence[float]) -> bool:
    """Whether the rewards of a group are equal, among the rewards of its batch."""
    return max(group) - min(group) < least_range(batch)


def least_range(rewards: Sequence[float]) -> float:
    """The smallest range of a group that is a difference and no rounding: relative to the rewards of the batch, so that
    rewards in any unit count."""
    known = [r for r in rewards if np.isfinite(r)]
    return max(SAME * (max(known) - min(known)) if known else 0.0, float(np.finfo(np.float64).tiny))
