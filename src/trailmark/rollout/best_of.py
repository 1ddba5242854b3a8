"""Best of n: play every task n times and keep the episode with the highest score."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trailmark.types import Episode, Scored


def best_of(episodes: Sequence[Episode], score: Callable[[Episode], float] | None = None) -> list[Episode]:
    """One episode per group: the first with the highest score (default: the reward). Failed episodes are left out, and
    so is a group in which all failed."""

    def reward(e: Episode) -> float:
        assert isinstance(e.outcome, Scored)
        return e.outcome.reward

    best: dict[str, tuple[float, Episode]] = {}
    for e in episodes:
        if isinstance(e.outcome, Scored):
            value = (score or reward)(e)
            if e.group not in best or value > best[e.group][0]:
                best[e.group] = (value, e)
    return [e for _, e in best.values()]
