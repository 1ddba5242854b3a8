"""Re-enter a stored episode at any point and continue it: with another seat, temperature or seed, any number of times.

This serves Monte-Carlo values of intermediate states, search, and debugging by hand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from trailmark.errors import DataError, TaskError
from trailmark.rollout.bos import prompt_ids
from trailmark.rollout.play import Desk, Protocol, Seat, Start, play_starts
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


def must_be_shown(points: Sequence[Point], source: Any, tokenizer: Any) -> None:
    """A state can be completed if its world shows what it showed then."""
    if points and source.markov and (turn := points[0].episode.turns[0]).prompt:
        now = source.make().reset(points[0].episode.task).text
        if tuple(prompt_ids(tokenizer, now)) != turn.prompt:
            raise DataError(
                f"episode '{points[0].episode.id}' was shown another prompt than task '{source.name}' shows: states of "
                "solutions from elsewhere can be completed only if their prompts are those of the task."
            )


def told_starts(
    points: Sequence[Point], n: int, seed: int, source: Any, seat: str, tokenizer: Any
) -> tuple[list[Start], Protocol]:
    """Completions by a chat server: it is shown the question, and its answer begins with the words of the state."""
    starts = [dataclasses.replace(s, turns=(), forced=(), entered=None) for s in branch_starts(points, n, seed)]
    begun = {
        s.id: tokenizer.decode(p.episode.turns[p.turn].tokens[: p.token])
        for i, p in enumerate(points)
        for s in starts[i * n : (i + 1) * n]
    }

    async def goes_on(desk: Desk) -> None:
        seen = desk.observation
        asked = [*source.first_messages, *(seen.messages or ({"role": "user", "content": seen.text},))]
        turn = await desk.ask(seat, messages=asked, prefix=begun[desk.start.id], fresh=True)
        await desk.act(turn.text)

    return starts, goes_on
