"""Play tasks: many episodes at once, any number of seats, an engine per seat.

A *protocol* is an async function that decides who speaks when. It gets a `Desk`: `await desk.ask(seat, …)` lets a seat
decide, and `await desk.act(action)` passes an action to the world. The default, `solo`, lets one seat act on what the
world shows. Methods with two players write their own protocol, about a dozen lines.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from trailmark.engines.base import EngineError
from trailmark.failures import must_be_answered
from trailmark.memory import need_starts
from trailmark.rollout.desk import Desk, Start, label_ids, stop_ids
from trailmark.rollout.judging import give_verdicts, judge_of
from trailmark.rollout.pool import LocalPool, Pool
from trailmark.run_async import wait
from trailmark.score.base import Judge
from trailmark.seats.seat import Seat
from trailmark.tasks.base import Observation, TaskSource, declared
from trailmark.time_limits import TooLong, WorldCalls
from trailmark.types import Annotation, Episode, Failed, Invalid, Task

__all__ = [
    "Desk", "Game", "Protocol", "Seat", "Start", "label_ids", "must_show", "play", "play_all", "play_starts", "solo",
    "start_all", "stop_ids",
]  # fmt: skip


Protocol = Callable[[Desk], Awaitable[None]]


def solo(
    seat: str = "policy",
    markov: bool = True,
    chat: bool = False,
    suffix: str = "",
    opening: Sequence[Mapping[str, str]] = (),
    told: Callable[[Task], Sequence[Mapping[str, str]]] | None = None,
) -> Protocol:
    """One seat acts until the world ends; if the world says whose turn it is, that seat acts. If actions are listed,
    the answer is a label; otherwise the whole text is the action. `opening` are messages before the first observation.
    `told` are the messages of a task whose observation is a complete prompt with its template: they are for a seat that
    gets messages and applies its own template."""

    async def play_one(desk: Desk) -> None:
        begun: set[str] = set()
        while not desk.over:
            seen = desk.observation
            who = seen.seat or seat
            labels = seen.labels or None
            messages: list[Mapping[str, str]] = list(seen.messages) or [{"role": "user", "content": seen.text}]
            if desk.seat(who).hears_messages and (markov or told):  # every observation starts a new conversation
                asked = told(desk.start.task) if told else [*opening, *messages]
                turn = await desk.ask(who, messages=asked, allowed=labels, fresh=True)
            elif markov and not chat and not seen.messages:
                turn = await desk.ask(who, text=seen.text + suffix, allowed=labels)
            else:
                before = [] if who in begun else opening
                turn = await desk.ask(who, messages=[*before, *messages], allowed=labels)
                begun.add(who)
            await desk.act(turn.text)

    return play_one


@dataclass(frozen=True)
class Game:
    """What is played: a pool plays its starts, one by one or many at once."""

    source: TaskSource
    seats: Mapping[str, Seat]
    protocol: Protocol
    side: str = "self"
    judged: bool = False  # whether a judge gives outcomes to plays that end without one

    async def play(self, start: Start, calls: WorldCalls | None = None) -> tuple[Episode, Observation | None]:
        """One episode; and its first observation, if a judge must give it an outcome. If a world or an engine crashes,
        the episode is `Failed`."""
        desk: Desk | None = None
        try:
            calls, limits, world = calls or WorldCalls(), self.source.time_limits, self.source.make()
            shown = await calls.call(limits, "reset", world.reset, start.task)
            desk = Desk(start, world, self.seats, shown, calls, limits)
            first = desk.observation
            await self.protocol(desk)
            if desk.pending:
                raise desk.cannot_enter(f"the play is now over after {len(desk.turns)} turns")
            outcome = desk.step.outcome if desk.step is not None and desk.over else None
            if outcome is None and desk.over and self.judged:
                return desk.episode(Invalid("not judged yet"), self.side), first
            ended = Invalid("the protocol ended before the world did") if outcome is None else outcome
            return desk.episode(ended, self.side), None
        except EngineError as problem:
            failure = Failed(f"engine: {problem}")
        except TooLong as problem:
            failure = Failed(str(problem))
        except Exception as problem:  # a world may raise anything; the other episodes must go on
            failure = Failed(f"{type(problem).__name__}: {problem}")
        if desk is None:
            outcomes = {self.side: failure}
            return Episode(start.id, start.task, start.group, (), outcomes, parent=start.parent, seed=start.seed), None
        return desk.episode(failure, self.side), None


async def play_all(
    source: TaskSource,
    starts: Sequence[Start],
    seats: Sequence[Seat],
    protocol: Protocol | None = None,
    at_once: int = 256,
    side: str = "self",
    judge: Judge | None = None,
    notes: list[Annotation] | None = None,
    judge_each: bool = False,
    pool: Pool | None = None,
) -> AsyncGenerator[Episode, None]:
    """Play every start, once. Gives each episode as soon as it is finished and judged. Who plays a start (`pool`;
    default: this process, `at_once` at a time) cannot change it. A source may have `first_messages`, which come before
    its first observation. If a source is `judged`, its plays go to `judge` (or the source's own judge), whose
    annotations are added to `notes`: all together in the end, or with `judge_each` when they finish."""
    source = declared(source)
    judge, unjudged = judge_of(source, judge), dict[int, Observation]()
    notes = source.judge_notes if notes is None else notes
    played: dict[int, Episode] = {}
    asking = asyncio.Lock()
    if protocol is None:
        opening, told = source.first_messages, source.messages
        protocol = solo(seats[0].name, source.markov, opening=opening, told=told)
    game = Game(source, {s.name: s for s in seats}, protocol, side, judge is not None)
    pool = pool or LocalPool(at_once, source.slow)

    async def verdicts() -> None:
        async with asking:  # the first to get the lock asks about all episodes that are finished by then
            if judge is not None and unjudged:
                now = dict(unjudged)
                unjudged.clear()
                await give_verdicts(played, now, judge, notes)

    async def one(number: int, start: Start) -> Episode | None:
        played[number], first = await pool.play(game, start)
        if first is not None:
            unjudged[number] = first
            if not judge_each:
                return None
            await verdicts()
        return played.pop(number)

    finished: asyncio.Queue[asyncio.Task[Episode | None]] = asyncio.Queue()
    tasks = [asyncio.create_task(one(k, s)) for k, s in enumerate(starts)]
    try:
        for task in tasks:
            task.add_done_callback(finished.put_nowait)
        for _ in tasks:
            if (episode := (await finished.get()).result()) is not None:
                yield episode
        await verdicts()
        for number in sorted(played):
            yield played[number]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        pool.close()


def play_starts(
    source: TaskSource,
    starts: Sequence[Start],
    seats: Sequence[Seat],
    protocol: Protocol | None = None,
    at_once: int = 256,
    side: str = "self",
    judge: Judge | None = None,
    notes: list[Annotation] | None = None,
    each: Callable[[Episode], None] | None = None,
) -> list[Episode]:
    """`play_all` from synchronous code: the episodes in the order of the starts. `each` gets every episode when it is
    finished and judged."""

    async def all_of_them() -> dict[str, Episode]:
        found: dict[str, Episode] = {}
        playing = play_all(source, starts, seats, protocol, at_once, side, judge, notes, each is not None)
        async with contextlib.aclosing(playing):
            async for episode in playing:
                found[episode.id] = episode
                if each is not None:
                    each(episode)
        return found

    found = wait(all_of_them())
    return [found[s.id] for s in starts]


def play(
    source: TaskSource,
    tasks: Sequence[Task],
    seats: Sequence[Seat],
    protocol: Protocol | None = None,
    n: int = 1,
    seed: int = 0,
    prefix: str = "",
    at_once: int = 256,
    judge: Judge | None = None,
    notes: list[Annotation] | None = None,
    failures: float = 1.0,
) -> list[Episode]:
    """Play `n` episodes of every task. The episodes of one task form a group. Servers may fail to answer in at most a
    share `failures` of them."""
    starts = start_all(tasks, n, seed, prefix)
    played = play_starts(source, starts, seats, protocol, at_once, judge=judge, notes=notes)
    must_be_answered(played, failures)
    return played


def must_show(source: TaskSource, tasks: Sequence[Task], seats: Sequence[Seat]) -> None:
    """Refuse a row whose messages the chat template of a seat refuses: it is a mistake, and no lost play."""
    if (check := getattr(source, "must_render", None)) is not None:
        for seat in seats:
            if (tokenizer := getattr(seat.engine, "tokenizer", None)) is not None and not seat.hears_messages:
                check(tokenizer, tasks)


def start_all(tasks: Sequence[Task], n: int = 1, seed: int = 0, prefix: str = "") -> list[Start]:
    """`n` starts of each task. A task that is listed twice is played 2n times in one group, each time with other random
    draws."""
    need_starts(len(tasks) * n, f"{len(tasks):,} tasks, {n:,} times each", "play each fewer times")
    seen: dict[str, int] = {}
    out = []
    for t in tasks:
        for _ in range(n):
            k = seen[t.id] = seen.get(t.id, -1) + 1
            out.append(Start(t, f"{prefix}{t.id}", f"{prefix}{t.id}/{k}", seed))
    return out
