"""Play tasks: many episodes at once, any number of seats, an engine per seat.

A *protocol* is an async function that says who speaks when. It gets a `Desk`: `await desk.ask(seat, …)` lets a seat decide,
`await desk.act(action)` tells the world. The default, `solo`, lets one seat act on what the world shows; two-player methods
bring their own of a dozen lines.
"""

from __future__ import annotations

import asyncio
import dataclasses
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from trailmark.chat import Conversation, end_of_turn
from trailmark.engines.base import Completion, Engine, EngineError, Request
from trailmark.errors import TaskError
from trailmark.rollout.bos import prompt_ids
from trailmark.rollout.encode import encode
from trailmark.run_async import wait
from trailmark.tasks.base import Observation, Step, TaskSource, World
from trailmark.types import Episode, Failed, Invalid, Outcome, Parent, Player, SamplingLaw, Task, Tokens, Turn


@dataclass(frozen=True)
class Seat:
    """A named player: who writes its tokens, and how they are drawn."""

    name: str
    engine: Engine
    law: SamplingLaw = SamplingLaw()
    max_tokens: int = 64
    stop_strings: tuple[str, ...] = ()
    kind: Literal["trained", "frozen", "remote", "scripted", "person"] = "frozen"

    def player(self) -> Player:
        return Player(
            self.kind, self.engine.name, getattr(getattr(self.engine, "lm", None), "revision", ""), self.engine.version
        )


@dataclass(frozen=True)
class Start:
    """Where an episode begins: at its task, or inside a stored one. `turns` are kept as they were; the next decision of
    `seat` begins with `forced` tokens already written."""

    task: Task
    group: str
    id: str
    seed: int = 0
    parent: Parent | None = None
    turns: tuple[Turn, ...] = ()
    forced: Tokens = ()
    entered: Turn | None = None  # the stored turn that the next decision takes the place of
    players: Mapping[str, Player] = dataclasses.field(default_factory=dict)


class Desk:
    """One episode in progress."""

    def __init__(
        self,
        start: Start,
        world: World,
        seats: Mapping[str, Seat],
        observation: Observation,
        threads: Executor | None = None,
    ):
        self.start, self.world, self.seats, self.threads = start, world, seats, threads
        self.turns: list[Turn] = []
        self.step: Step | None = None
        self._replay = list(start.turns)
        self._talk: dict[str, tuple[Conversation, int | None]] = {}
        self._forced, self._entered = start.forced, start.entered
        self.observation = observation

    @property
    def over(self) -> bool:
        return self.step is not None and self.step.over

    async def ask(
        self,
        seat: str,
        text: str | None = None,
        messages: Sequence[Mapping[str, str]] | None = None,
        allowed: Sequence[str] | None = None,
        max_tokens: int | None = None,
        law: SamplingLaw | None = None,
    ) -> Turn:
        """Let a seat decide. With `text` the turn starts a new sequence that is exactly this text; with `messages` the seat's
        conversation grows by them. `allowed` restricts the answer to one of these labels, each a single token."""
        player = self.seats[seat]
        engine = player.engine
        prompt, continues = self._prompt(seat, engine, text, messages)
        if self._replay:
            return self._repeat(seat, prompt, messages is not None)
        if self._entered is not None and (seat == self._entered.seat or self._forced):
            self._must_equal(self._entered, seat, prompt)
        self._entered = None
        law = law or player.law
        stops: Tokens = ()
        if allowed is not None:
            law, budget = dataclasses.replace(law, allowed=label_ids(engine.tokenizer, tuple(allowed))), 1
        else:
            budget = max_tokens or player.max_tokens
            stops = stop_ids(engine.tokenizer, chat=messages is not None)
        law = dataclasses.replace(law, stop_ids=stops if law.min_tokens else ())
        forced, self._forced = self._forced, ()
        if forced and self.start.parent:  # what the stored turn had already written counts
            done_before = self.start.parent.token
            budget, law = (
                max(1, budget - done_before),
                dataclasses.replace(law, min_tokens=max(0, law.min_tokens - done_before)),
            )
        context = self._context(continues) + prompt + forced
        (done,) = await engine.sample(
            Request(
                context,
                law,
                1,
                budget,
                stops,
                player.stop_strings,
                self.start.seed,
                f"{self.start.id}\0{len(self.turns)}",
            )
        )
        said = _joined(engine.tokenizer, forced, done, stops, player.stop_strings) if forced else done.text
        turn = Turn(
            seat,
            prompt,
            done.tokens,
            done.logp,
            done.logq,
            law,
            forced,
            continues,
            stop=done.stop,
            text=said,
            version=engine.version,
        )
        return self._note(turn, messages is not None)

    async def act(self, action: str) -> Step:
        """Tell the world. The turn that was just taken remembers the action and its reward."""
        if not self.turns or self.turns[-1].action is not None:
            raise TaskError(
                "the world was told twice after one turn, or before any: each turn carries one action and its reward"
            )
        self.step = await _call(self.threads, self.world.step, action)
        last = len(self.turns) - 1
        if last < len(self.start.turns):
            stored = self.start.turns[last]
            if (stored.action, stored.reward) != (action, float(self.step.reward)):
                raise self.cannot_enter(
                    f"at turn {last} the world is now told or answers something else than was stored"
                )
        self.observation = self.step.observation
        self.turns[-1] = dataclasses.replace(self.turns[-1], action=action, reward=float(self.step.reward))
        return self.step

    def mark_steps(self, spans: Sequence[tuple[int, int]]) -> None:
        """Say where the reasoning steps of the last turn lie among its tokens."""
        self.turns[-1] = dataclasses.replace(self.turns[-1], steps=tuple(spans))

    def _prompt(
        self, seat: str, engine: Engine, text: str | None, messages: Sequence[Mapping[str, str]] | None
    ) -> tuple[Tokens, int | None]:
        if (text is None) == (messages is None):
            raise TaskError(f"seat '{seat}' must be asked with either text or messages")
        if text is not None:
            return tuple(prompt_ids(engine.tokenizer, text)), None
        talk, last = self._talk.get(seat) or (
            Conversation(engine.tokenizer, template=_template(engine.tokenizer)),
            None,
        )
        talk.add(*messages or ())
        tokens, extends = talk.prompt()
        self._talk[seat] = (talk, last)
        return tuple(tokens), last if extends else None

    def _context(self, turn: int | None) -> Tokens:
        parts: list[Tokens] = []
        while turn is not None:
            t = self.turns[turn]
            parts.append(t.prompt + t.forced + t.tokens)
            turn = t.continues
        return tuple(token for part in reversed(parts) for token in part)

    def _must_equal(self, stored: Turn, seat: str, prompt: Tokens) -> None:
        if stored.seat != seat or stored.prompt != prompt:
            raise self.cannot_enter(
                f"at turn {len(self.turns)} seat '{seat}' is now shown something else than was stored"
            )

    def cannot_enter(self, why: str) -> TaskError:
        parent = self.start.parent
        return TaskError(f"episode '{parent.episode if parent else self.start.id}' cannot be re-entered: {why}")

    @property
    def pending(self) -> bool:
        """Whether a re-entered episode has not yet come to the point where it was to go on."""
        return bool(self._replay) or self._entered is not None

    def _repeat(self, seat: str, prompt: Tokens, talking: bool) -> Turn:
        """Re-entering a stored episode: its turns come back as they were, provided the world still asks the same."""
        turn = self._replay.pop(0)
        self._must_equal(turn, seat, prompt)
        return self._note(dataclasses.replace(turn, action=None, reward=0.0), talking)

    def _note(self, turn: Turn, talking: bool) -> Turn:
        self.turns.append(turn)
        if talking:
            talk, _ = self._talk[turn.seat]
            talk.wrote(turn.forced + turn.tokens, turn.text)
            self._talk[turn.seat] = (talk, len(self.turns) - 1)
        return turn

    def episode(self, outcome: Outcome | Mapping[str, Outcome], side: str) -> Episode:
        s = self.start
        players = {**s.players, **{n: seat.player() for n, seat in self.seats.items()}}
        return Episode(
            s.id,
            s.task,
            s.group,
            tuple(self.turns),
            outcome if isinstance(outcome, Mapping) else {side: outcome},
            bool(self.step and self.step.terminated),
            bool(self.step and self.step.truncated),
            players,
            s.parent,
            s.seed,
        )


Protocol = Callable[[Desk], Awaitable[None]]


def solo(
    seat: str = "policy",
    markov: bool = True,
    chat: bool = False,
    suffix: str = "",
    opening: Sequence[Mapping[str, str]] = (),
) -> Protocol:
    """One seat acts until the world ends. Listed actions are answered by a label; otherwise the whole text is the action.
    `opening` are messages of a conversation before its first observation."""

    async def play_one(desk: Desk) -> None:
        before = list(opening)
        while not desk.over:
            seen = desk.observation
            labels = seen.labels or None
            if markov and not chat:
                turn = await desk.ask(seat, text=seen.text + suffix, allowed=labels)
            else:
                turn = await desk.ask(seat, messages=[*before, {"role": "user", "content": seen.text}], allowed=labels)
                before = []
            await desk.act(turn.text)

    return play_one


async def play_all(
    source: TaskSource,
    starts: Sequence[Start],
    seats: Sequence[Seat],
    protocol: Protocol | None = None,
    at_once: int = 256,
    side: str = "self",
    each: Callable[[Episode], None] = lambda episode: None,
) -> list[Episode]:
    """Play every start; results in the order of the starts. A crash of a world or an engine is a `Failed` episode. A source
    may have `first_messages` that are said before its first observation. `each` is given every episode when it is over."""
    table = {s.name: s for s in seats}
    protocol = protocol or solo(seats[0].name, source.markov, opening=getattr(source, "first_messages", ()))
    gate = asyncio.Semaphore(at_once)
    threads = ThreadPoolExecutor(min(at_once, 64)) if getattr(source, "slow", False) else None

    async def one(start: Start) -> Episode:
        async with gate:
            desk: Desk | None = None
            try:
                world = source.make()
                desk = Desk(start, world, table, await _call(threads, world.reset, start.task), threads)
                await protocol(desk)
                if desk.pending:
                    raise desk.cannot_enter(f"the play is now over after {len(desk.turns)} turns")
                if desk.step is None or not desk.over or desk.step.outcome is None:
                    outcome: Outcome | Mapping[str, Outcome] = Invalid("the protocol ended before the world did")
                else:
                    outcome = desk.step.outcome
                return desk.episode(outcome, side)
            except EngineError as problem:
                outcome = Failed(f"engine: {problem}")
            except Exception as problem:  # a world may raise anything; it must not take the others with it
                outcome = Failed(f"{type(problem).__name__}: {problem}")
            if desk is None:
                return Episode(
                    start.id, start.task, start.group, (), {side: outcome}, parent=start.parent, seed=start.seed
                )
            return desk.episode(outcome, side)

    async def told(start: Start) -> Episode:
        episode = await one(start)
        each(episode)
        return episode

    try:
        return list(await asyncio.gather(*(told(s) for s in starts)))
    finally:
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)


async def _call(threads: Executor | None, function: Callable[..., Any], *args: Any) -> Any:
    """A world's method: here and now, or in a thread when worlds wait."""
    if threads is None:
        return function(*args)
    return await asyncio.get_running_loop().run_in_executor(threads, function, *args)


def play(
    source: TaskSource,
    tasks: Sequence[Task],
    seats: Sequence[Seat],
    protocol: Protocol | None = None,
    n: int = 1,
    seed: int = 0,
    prefix: str = "",
    at_once: int = 256,
) -> list[Episode]:
    """`n` episodes of every task; those of one task form a group."""
    return wait(play_all(source, start_all(tasks, n, seed, prefix), seats, protocol, at_once))


def start_all(tasks: Sequence[Task], n: int = 1, seed: int = 0, prefix: str = "") -> list[Start]:
    """`n` starts of each task. A task that is listed twice is played 2n times in one group, each with draws of its own."""
    seen: dict[str, int] = {}
    out = []
    for t in tasks:
        for _ in range(n):
            k = seen[t.id] = seen.get(t.id, -1) + 1
            out.append(Start(t, f"{prefix}{t.id}", f"{prefix}{t.id}/{k}", seed))
    return out


def _joined(tokenizer: Any, forced: Tokens, done: Completion, stops: Tokens, strings: tuple[str, ...]) -> str:
    """What forced and written tokens say together; decoded as one, for a letter may be cut in two."""
    body = done.tokens[:-1] if done.tokens and done.tokens[-1] in stops else done.tokens
    text, given = tokenizer.decode(forced + body), len(tokenizer.decode(forced))
    found = [at for s in strings if (at := text.find(s, given)) >= 0]
    return text[: min(found)] if found else text


def label_ids(tokenizer: Any, labels: tuple[str, ...]) -> Tokens:
    """The single token of each label; a label of several tokens is refused by name."""
    ids = []
    for label in labels:
        found = encode(tokenizer, label)
        if len(found) != 1:
            raise TaskError(
                f"label '{label}' is {len(found)} tokens in this tokenizer; labels must be single tokens: choose others or add it as a token"
            )
        ids.append(int(found[0]))
    if len(set(ids)) != len(ids):
        raise TaskError("two labels are the same token in this tokenizer")
    return tuple(ids)


def stop_ids(tokenizer: Any, chat: bool = False) -> Tokens:
    """What ends a turn: the end-of-sequence token and, in a conversation, the template's end of turn."""
    if tokenizer not in _STOPS:
        turn = end_of_turn(tokenizer, template=_template(tokenizer))
        _STOPS[tokenizer] = tuple(dict.fromkeys(int(t) for t in (turn, tokenizer.eos_token_id) if t is not None))
    plain = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
    return _STOPS[tokenizer] if chat else plain


_STOPS: weakref.WeakKeyDictionary[Any, Tokens] = weakref.WeakKeyDictionary()


def _template(tokenizer: Any) -> str | None:
    return "own" if getattr(tokenizer, "chat_template", None) else None
