"""Play tasks: many episodes at once, any number of seats, an engine per seat.

A *protocol* is an async function that decides who speaks when. It gets a `Desk`: `await desk.ask(seat, …)` lets a seat
decide, and `await desk.act(action)` passes an action to the world. The default, `solo`, lets one seat act on what the
world shows. Methods with two players write their own protocol, about a dozen lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from trailmark.chat import Conversation, end_of_turn
from trailmark.engines.base import Completion, Engine, EngineError, Request
from trailmark.errors import TaskError
from trailmark.failures import must_be_answered
from trailmark.memory import need_starts
from trailmark.rollout.bos import prompt_ids
from trailmark.rollout.encode import encode
from trailmark.rollout.judged import give_verdicts, judge_of
from trailmark.rollout.pool import LocalPool, Pool
from trailmark.run_async import wait
from trailmark.score.base import Judge
from trailmark.seats.seat import Seat
from trailmark.tasks.base import Observation, Step, TaskSource, World, declared
from trailmark.types import (
    Annotation,
    Episode,
    Failed,
    Invalid,
    Outcome,
    Parent,
    Player,
    SamplingLaw,
    Task,
    Tokens,
    Turn,
)


@dataclass(frozen=True)
class Start:
    """Where an episode begins: at its task, or inside a stored episode. `turns` are kept as they were. The next
    decision of `seat` begins with the `forced` tokens."""

    task: Task
    group: str
    id: str
    seed: int = 0
    parent: Parent | None = None
    turns: tuple[Turn, ...] = ()
    forced: Tokens = ()
    entered: Turn | None = None  # the stored turn that the next decision replaces
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
        self._heard: dict[str, list[Mapping[str, Any]]] = {}  # the conversation of each seat that gets messages
        self._forced, self._entered, self._goes_on = start.forced, start.entered, False
        self.observation = observation

    @property
    def over(self) -> bool:
        return self.step is not None and self.step.over

    @property
    def sides(self) -> list[str]:
        return list(dict.fromkeys(s.side for s in self.seats.values()))

    async def ask(
        self,
        seat: str,
        text: str | None = None,
        messages: Sequence[Mapping[str, str]] | None = None,
        allowed: Sequence[str] | None = None,
        max_tokens: int | None = None,
        law: SamplingLaw | None = None,
        prefix: str = "",
        fresh: bool = False,
    ) -> Turn:
        """Let a seat decide. With `text` the turn starts a new sequence with exactly this prompt. With `messages` the
        seat's conversation grows by them (`fresh`: a new conversation begins). `allowed` restricts the answer to one of
        these labels, each a single token. With a `prefix` the answer begins with this text."""
        player = self.seat(seat)
        if (text is None) == (messages is None):
            raise TaskError(f"seat '{seat}' must be asked with either text or messages")
        if fresh:
            self._talk.pop(seat, None)
            self._heard.pop(seat, None)
        if player.hears_messages:
            return await self._converse(player, text, messages, allowed, max_tokens, law, prefix)
        engine = player.engine
        prompt, continues = self._prompt(seat, engine, text, messages)
        if self._replay:
            return self._repeat(seat, prompt, messages is not None)
        forced = self._begun(seat, prompt) or tuple(encode(engine.tokenizer, prefix) if prefix else ())
        law = law or player.law
        stops: Tokens = ()
        if allowed is not None:
            law, budget = dataclasses.replace(law, allowed=label_ids(engine.tokenizer, tuple(allowed))), 1
        else:
            budget = max_tokens or player.max_tokens
            stops = stop_ids(engine.tokenizer, chat=messages is not None)
        law = dataclasses.replace(law, stop_ids=stops if law.min_tokens else ())
        if self._goes_on and self.start.parent:  # tokens that the stored turn had already written count
            done_before = self.start.parent.token
            budget, law = (
                max(1, budget - done_before),
                dataclasses.replace(law, min_tokens=max(0, law.min_tokens - done_before)),
            )
        context = self._context(continues) + prompt + forced
        (done,) = await engine.sample(
            Request(context, law, 1, budget, stops, player.stop_strings, self.start.seed, self._key())
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

    async def _converse(
        self,
        player: Seat,
        text: str | None,
        messages: Sequence[Mapping[str, str]] | None,
        allowed: Sequence[str] | None,
        max_tokens: int | None,
        law: SamplingLaw | None,
        prefix: str,
    ) -> Turn:
        """A turn of a seat that gets messages. Its tokens and log-probs are those that the server reports. Only the
        server knows the prompt's tokens, so the turn has no prompt and cannot be trained on."""
        engine: Any = player.engine
        told = (
            [*self._heard.get(player.name, ()), *messages]
            if messages is not None
            else [{"role": "user", "content": text}]
        )
        turn: Turn | None = None
        if self._replay:
            turn = self._replay.pop(0)
            self._must_equal(turn, player.name, ())
            turn = dataclasses.replace(turn, action=None, reward=0.0, rewards={})
        else:
            law = law or player.law
            if (allowed is not None or self._forced) and engine.tokenizer is None:
                wanted = (
                    "its answer cannot be held to labels" if allowed is not None else "it cannot go on inside a turn"
                )
                raise EngineError(f"seat '{player.name}' is a chat server whose tokenizer is not known here: {wanted}")
            begun = self._begun(player.name, ())
            prefix = engine.tokenizer.decode(begun) if begun else prefix
            forced = begun or tuple(encode(engine.tokenizer, prefix) if prefix and engine.tokenizer is not None else ())
            budget = max_tokens or player.max_tokens
            if allowed is not None:
                law, budget = dataclasses.replace(law, allowed=label_ids(engine.tokenizer, tuple(allowed))), 1
            elif self._goes_on and self.start.parent:
                budget = max(1, budget - self.start.parent.token)
            more = {"prefix": prefix} if prefix else {}
            (done,) = await engine.chat(told, law, budget, player.stop_strings, self.start.seed, self._key(), **more)
            turn = Turn(player.name, (), done.tokens, done.logp, done.logq, law, forced, stop=done.stop,
                        text=prefix + done.text, version=engine.version)  # fmt: skip
        if messages is not None:
            self._heard[player.name] = [*told, {"role": "assistant", "content": turn.text}]
        return self._note(turn, talking=False)

    def _key(self) -> str:
        """The name of the next decision. Its random draws depend on this name and the seed."""
        return f"{self.start.id}\0{len(self.turns)}"

    def seat(self, seat: str) -> Seat:
        if seat not in self.seats:
            raise TaskError(f"there is no seat '{seat}' (seats: {', '.join(self.seats)})")
        return self.seats[seat]

    def _begun(self, seat: str, prompt: Tokens) -> Tokens:
        """The tokens that a re-entered turn has already written; empty for every other turn."""
        entered, begun = self._entered, self._forced
        if entered is not None and (seat == entered.seat or begun):
            self._must_equal(entered, seat, prompt)
        self._entered, self._forced, self._goes_on = None, (), bool(begun)
        return begun

    async def act(self, action: str) -> Step:
        """Pass an action to the world. The turn that was just taken stores the action and its reward: for the side of
        its seat, and for other sides if the world pays several."""
        if not self.turns or self.turns[-1].action is not None:
            raise TaskError(
                "act was called twice after one turn, or before any turn: each turn has one action and its reward"
            )
        self.step = await _call(self.threads, self.world.step, action)
        last = len(self.turns) - 1
        reward, rewards = self.step.paid(self.seats[self.turns[-1].seat].side)
        if last < len(self.start.turns):
            stored = self.start.turns[last]
            if (stored.action, stored.reward, stored.rewards) != (action, reward, rewards):
                raise self.cannot_enter(
                    f"at turn {last} the world is now told or answers something else than was stored"
                )
        self.observation = self.step.observation
        self.turns[-1] = dataclasses.replace(self.turns[-1], action=action, reward=reward, rewards=rewards)
        return self.step

    def mark_steps(self, spans: Sequence[tuple[int, int]]) -> None:
        """Store where the reasoning steps of the last turn are among its tokens."""
        self.turns[-1] = dataclasses.replace(self.turns[-1], steps=tuple(spans))

    def _prompt(
        self, seat: str, engine: Engine, text: str | None, messages: Sequence[Mapping[str, str]] | None
    ) -> tuple[Tokens, int | None]:
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
        """Whether a re-entered episode has not yet reached the point where it continues."""
        return bool(self._replay) or self._entered is not None

    def _repeat(self, seat: str, prompt: Tokens, talking: bool) -> Turn:
        """For a re-entered episode: return the stored turn, if the world still asks the same."""
        turn = self._replay.pop(0)
        self._must_equal(turn, seat, prompt)
        return self._note(dataclasses.replace(turn, action=None, reward=0.0, rewards={}), talking)

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
            self._by_side(outcome, side),
            bool(self.step and self.step.terminated),
            bool(self.step and self.step.truncated),
            players,
            s.parent,
            s.seed,
        )

    def _by_side(self, outcome: Outcome | Mapping[str, Outcome], side: str) -> Mapping[str, Outcome]:
        """The outcomes by side. The side of the first seat comes first: its outcome is the episode's."""
        sides = [s or side for s in self.sides]
        if not isinstance(outcome, Mapping):
            return dict.fromkeys(sides, outcome)
        return {s: outcome[s] for s in dict.fromkeys([*sides, *outcome]) if s in outcome}


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

    async def play(self, start: Start, threads: Executor | None = None) -> tuple[Episode, Observation | None]:
        """One episode; and its first observation, if a judge must give it an outcome. If a world or an engine crashes,
        the episode is `Failed`."""
        desk: Desk | None = None
        try:
            world = self.source.make()
            desk = Desk(start, world, self.seats, await _call(threads, world.reset, start.task), threads)
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


async def _call(threads: Executor | None, function: Callable[..., Any], *args: Any) -> Any:
    """Call a world's method: directly, or in a thread if worlds wait."""
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


def _joined(tokenizer: Any, forced: Tokens, done: Completion, stops: Tokens, strings: tuple[str, ...]) -> str:
    """The text of forced and written tokens together. They are decoded as one, because a character may be split between
    them."""
    body = done.tokens[:-1] if done.tokens and done.tokens[-1] in stops else done.tokens
    text, given = tokenizer.decode(forced + body), len(tokenizer.decode(forced))
    found = [at for s in strings if (at := text.find(s, given)) >= 0]
    return text[: min(found)] if found else text


def label_ids(tokenizer: Any, labels: tuple[str, ...]) -> Tokens:
    """The single token of each label. An error names a label of several tokens."""
    ids = []
    for label in labels:
        found = encode(tokenizer, label)
        if len(found) != 1:
            raise TaskError(
                f"label '{label}' is {len(found)} tokens in this tokenizer; labels must be single tokens: choose "
                "others or add it as a token"
            )
        ids.append(int(found[0]))
    if len(set(ids)) != len(ids):
        raise TaskError("two labels are the same token in this tokenizer")
    return tuple(ids)


def stop_ids(tokenizer: Any, chat: bool = False) -> Tokens:
    """The tokens that end a turn: the end-of-sequence token and, in a conversation, the template's end of turn."""
    if not chat:
        return () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
    if tokenizer not in _STOPS:
        turn = end_of_turn(tokenizer, template=_template(tokenizer))
        _STOPS[tokenizer] = tuple(dict.fromkeys(int(t) for t in (turn, tokenizer.eos_token_id) if t is not None))
    return _STOPS[tokenizer]


_STOPS: weakref.WeakKeyDictionary[Any, Tokens] = weakref.WeakKeyDictionary()


def _template(tokenizer: Any) -> str | None:
    return "own" if getattr(tokenizer, "chat_template", None) else None
