"""Re-enter a stored episode at any point and continue it: with another seat, temperature or seed, any number of times.

This serves Monte-Carlo values of intermediate states, search, and debugging by hand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from trailmark.errors import TaskError
from trailmark.rollout.play import Protocol, Seat, Start, play_starts
from trailmark.score.base import Judge
from trailmark.tasks.base import TaskSource
from trailmark.types import Annotation, Episode, Parent


@dataclasses.dataclass(frozen=True)
class Point:
    """The point before token `token` of turn `turn` of an episode."""

    episode: Episode
    turn: int
    token: int = 0


def branch(
    source: TaskSource,
    points: Sequence[Point],
    seats: Sequence[Seat],
    protocol: Protocol | None = None,
    n: int = 1,
    seed: int = 0,
    at_once: int = 256,
    judge: Judge | None = None,
    notes: list[Annotation] | None = None,
) -> list[list[Episode]]:
    """`n` continuations from every point. The stored actions are replayed to bring the world to the point, and the
    earlier turns are kept as they are. If the point is inside a turn, its tokens so far are forced on the seat that
    continues it."""
    starts = branch_starts(points, n, seed)
    episodes = play_starts(source, starts, seats, protocol, at_once, judge=judge, notes=notes)
    return [episodes[k * n : (k + 1) * n] for k in range(len(points))]


def branch_starts(points: Sequence[Point], n: int = 1, seed: int = 0) -> list[Start]:
    """`n` starts from every point, for callers that play them themselves, such as a long collection
    (`runs/collect.py`)."""
    return [s for p in points for s in _starts(p, n, seed)]


def _starts(point: Point, n: int, seed: int) -> list[Start]:
    e = point.episode
    if not 0 <= point.turn < len(e.turns):
        raise TaskError(
            f"episode '{e.id}' has turns 0 to {len(e.turns) - 1}: it cannot be entered at turn {point.turn}"
        )
    turn = e.turns[point.turn]
    if not 0 <= point.token <= len(turn.tokens):
        raise TaskError(
            f"turn {point.turn} of episode '{e.id}' has {len(turn.tokens)} tokens: it cannot be entered at token "
            f"{point.token}"
        )
    if point.token and point.token == len(turn.tokens) and (turn.ended or turn.law.allowed is not None):
        raise TaskError(
            f"turn {point.turn} of episode '{e.id}' is complete at token {point.token}: enter it earlier, or at the "
            "next turn"
        )
    parent = Parent(e.id, point.turn, point.token)
    name = f"{e.id}>{point.turn}.{point.token}"
    forced = turn.forced + turn.tokens[: point.token]
    return [
        Start(e.task, name, f"{name}/{k}", seed, parent, e.turns[: point.turn], forced, turn, e.players)
        for k in range(n)
    ]
