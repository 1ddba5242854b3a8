"""A desk: one episode in progress. A protocol asks its seats and passes their actions to the world.

    turn = await desk.ask("policy", text=…)        a prompt of its own
    turn = await desk.ask("policy", messages=…)    the seat's conversation goes on
    step = await desk.act(turn.text)
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trailmark.chat import Conversation, end_of_turn
from trailmark.engines.base import Completion, Engine, EngineError, Request
from trailmark.errors import TaskError
from trailmark.rollout.bos import prompt_ids
from trailmark.rollout.encode import encode
from trailmark.seats.seat import Seat
from trailmark.tasks.base import Observation, Step, World
from trailmark.time_limits import TimeLimits, WorldCalls
from trailmark.types import Episode, Outcome, Parent, Player, SamplingLaw, Task, Tokens, Turn

Messages = Sequence[Mapping[str, Any]]


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


@dataclass(frozen=True)
class _Terms:
    """What a turn begins with, and how it may go on."""

    forced: Tokens
    prefix: str  # what a server's answer begins with
    law: SamplingLaw
    budget: int
    stops: Tokens
    label: bool


class Desk:
    """One episode in progress."""

    def __init__(
        self,
        start: Start,
        world: World,
        seats: Mapping[str, Seat],
        observation: Observation,
        calls: WorldCalls | None = None,
        limits: TimeLimits = TimeLimits(),
    ):
        self.start, self.world, self.seats = start, world, seats
        self.calls, self.limits = calls or WorldCalls(), limits
        self.turns: list[Turn] = []
        self.step: Step | None = None
        self._replay = list(start.turns)
        self._talk: dict[str, tuple[Conversation, int | None]] = {}
        self._heard: dict[str, list[Mapping[str, Any]]] = {}  # the conversation of each seat that gets messages
        self._forced, self._entered = start.forced, start.entered
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
        these labels, each a single token. With a `prefix` the answer begins with this text.

        A seat that gets messages sends them to a server, which alone knows the prompt's tokens. So its turn has no
        prompt and cannot be trained on; its tokens and log-probs are those that the server reports."""
        player = self.seat(seat)
        if (text is None) == (messages is None):
            raise TaskError(f"seat '{seat}' must be asked with either text or messages")
        if fresh:
            self._talk.pop(seat, None)
            self._heard.pop(seat, None)
        heard: Messages | None = None
        if player.hears_messages:
            prompt, continues = (), None
            heard = [*self._heard.get(seat, ()), *messages] if messages is not None else [_user(text)]
        else:
            prompt, continues = self._prompt(seat, player.engine, text, messages)
        if self._replay:  # of a re-entered episode: the stored turn, if the world still asks the same
            turn = self._replay.pop(0)
            self._must_equal(turn, seat, prompt)
            turn = dataclasses.replace(turn, action=None, reward=0.0, rewards={})
        else:
            terms = self._terms(player, prompt, allowed, max_tokens, law, prefix, chat=messages is not None)
            turn = await self._written(player, prompt, continues, terms, heard)
        self.turns.append(turn)
        if messages is not None and heard is not None:
            self._heard[seat] = [*heard, {"role": "assistant", "content": turn.text}]
        elif messages is not None:
            talk, _ = self._talk[seat]
            talk.wrote(turn.forced + turn.tokens, turn.text)
            self._talk[seat] = (talk, len(self.turns) - 1)
        return turn

    def _terms(
        self,
        player: Seat,
        prompt: Tokens,
        allowed: Sequence[str] | None,
        max_tokens: int | None,
        law: SamplingLaw | None,
        prefix: str,
        chat: bool,
    ) -> _Terms:
        """What the next turn of a seat begins with, and how it may go on."""
        tokenizer = player.engine.tokenizer
        if tokenizer is None and (allowed is not None or self._forced):
            wanted = "its answer cannot be held to labels" if allowed is not None else "it cannot go on inside a turn"
            raise EngineError(f"seat '{player.name}' is a chat server whose tokenizer is not known here: {wanted}")
        begun = self._begun(player.name, prompt)
        forced = begun or tuple(encode(tokenizer, prefix) if prefix and tokenizer is not None else ())
        law, budget, stops = law or player.law, max_tokens or player.max_tokens, ()
        if allowed is not None:
            law, budget = dataclasses.replace(law, allowed=label_ids(tokenizer, tuple(allowed))), 1
        elif not player.hears_messages:  # to a chat server its own template says where a turn ends
            stops = stop_ids(tokenizer, chat)
        law = dataclasses.replace(law, stop_ids=stops if law.min_tokens else ())
        if begun and self.start.parent:  # tokens that the stored turn had already written count
            written = self.start.parent.token
            budget = max(1, budget - written)
            law = dataclasses.replace(law, min_tokens=max(0, law.min_tokens - written))
        return _Terms(forced, tokenizer.decode(begun) if begun else prefix, law, budget, stops, allowed is not None)

    async def _written(
        self, player: Seat, prompt: Tokens, continues: int | None, terms: _Terms, heard: Messages | None
    ) -> Turn:
        """The turn that the seat's engine writes. If it fails, the turn is kept as what was asked."""
        engine: Any = player.engine
        seed, key, strings = self.start.seed, f"{self.start.id}\0{len(self.turns)}", player.stop_strings
        turn = Turn(player.name, prompt, (), law=terms.law, forced=terms.forced, continues=continues, stop="failed",
                    version=engine.version)  # fmt: skip
        try:
            if heard is not None:
                more = {"prefix": terms.prefix} if terms.prefix else {}
                (done,) = await engine.chat(heard, terms.law, terms.budget, strings, seed, key, **more)
                text = terms.prefix + done.text
            else:
                context = self._context(continues) + prompt + terms.forced
                ask = Request(context, terms.law, 1, terms.budget, terms.stops, strings, seed, key)
                (done,) = await engine.sample(ask)
                text = _joined(engine.tokenizer, terms, done, strings) if terms.forced else done.text
        except EngineError:
            self.turns.append(turn)
            raise
        first, last = done.versions or (turn.version, engine.version)
        return dataclasses.replace(
            turn, tokens=done.tokens, logp=done.logp, logq=done.logq, stop="label" if terms.label else done.stop,
            text=text, version=first, last_version=None if last == first else last,
        )  # fmt: skip

    def seat(self, seat: str) -> Seat:
        if seat not in self.seats:
            raise TaskError(f"there is no seat '{seat}' (seats: {', '.join(self.seats)})")
        return self.seats[seat]

    def _begun(self, seat: str, prompt: Tokens) -> Tokens:
        """The tokens that a re-entered turn has already written; empty for every other turn."""
        entered, begun = self._entered, self._forced
        if entered is not None and (seat == entered.seat or begun):
            self._must_equal(entered, seat, prompt)
        self._entered, self._forced = None, ()
        return begun

    async def act(self, action: str) -> Step:
        """Pass an action to the world. The turn that was just taken stores the action and its reward: for the side of
        its seat, and for other sides if the world pays several."""
        if not self.turns or self.turns[-1].action is not None:
            raise TaskError(
                "act was called twice after one turn, or before any turn: each turn has one action and its reward"
            )
        self.step = await self.calls.call(self.limits, "step", self.world.step, action)
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


def _user(text: str | None) -> Mapping[str, Any]:
    return {"role": "user", "content": text}


def _joined(tokenizer: Any, terms: _Terms, done: Completion, strings: tuple[str, ...]) -> str:
    """The text of forced and written tokens together. They are decoded as one, because a character may be split between
    them."""
    body = done.tokens[:-1] if done.tokens and done.tokens[-1] in terms.stops else done.tokens
    text, given = tokenizer.decode(terms.forced + body), len(tokenizer.decode(terms.forced))
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
