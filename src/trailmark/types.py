"""The basic types. All other code is functions over them. They import without torch.

    Task      one start of a world
    Turn      one decision by one seat: exact tokens in, exact tokens out, and the law they were sampled under
    Episode   one play of one task
    Annotation  a named number on a token, step, turn or episode, stored next to the episode
    Sample    one token sequence to train on, with per-token streams and its denominators

Conventions. A stream entry at index t belongs to token t: `logp[t]` is the log-probability of token t given the tokens
before it, `value[t]` is V of the state in which token t was chosen. Token 0 has no state before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Tokens = tuple[int, ...]

# Why a turn ended:
#     stopped       its seat wrote a token that ends turns (the end of a JSON schema is such a token)
#     stop_string   its seat wrote a text that ends turns
#     label         its seat chose one of the labels that it was offered
#     length        it had no tokens left (`max_tokens`)
#     context_full  the model's context was full, or a server gave fewer tokens than it was asked for
#     forced_end    a search came to its limit before it had finished an answer
#     failed        its engine failed: the turn is what was asked
#     ""            not known, as in many files
Stop = Literal["", "stopped", "stop_string", "label", "length", "context_full", "forced_end", "failed"]
ENDED = ("stopped", "stop_string")  # its seat ended it
CUT_OFF = ("length", "context_full", "forced_end")  # a limit ended it, where its seat would have gone on


@dataclass(frozen=True, slots=True)
class Task:
    """One start. `data` is what the world needs to begin (JSON); `meta` is further data (gold text, baseline)."""

    id: str
    seed: int = 0
    data: Mapping[str, Any] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SamplingLaw:
    """How the next token is drawn from a model's logits, in this order: keep `allowed` ids, ban `stop_ids` while fewer
    than `min_tokens` are written, divide by `temperature` (0: arg max), keep the `top_k` largest (0: all), keep the
    smallest set of largest tokens whose mass reaches `top_p`. The learner applies the same law to its own logits."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    allowed: Tokens | None = None
    min_tokens: int = 0
    stop_ids: Tokens = ()

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0 or self.allowed == ():
            raise ValueError(f"{self} is no law: temperature >= 0, 0 < top_p <= 1, top_k >= 0, and some token allowed")

    @property
    def plain(self) -> bool:
        """True when the law is the model's own distribution."""
        return (
            self.temperature == 1.0
            and self.top_p >= 1.0
            and not self.top_k
            and self.allowed is None
            and not self.min_tokens
        )


@dataclass(frozen=True, slots=True)
class Turn:
    """One decision by one seat.

    The context it saw is the whole sequence of turn `continues` (its context, forced and written tokens) followed by
    `prompt`. With `continues=None` the sequence starts here and `prompt` is all of it. `forced` tokens are the given
    beginning of the answer and are never trained on. `tokens` are what the seat wrote.
    """

    seat: str
    prompt: Tokens
    tokens: Tokens
    logp: tuple[float, ...] = ()  # under the model itself
    logq: tuple[float, ...] = ()  # under `law`, which the token was sampled from
    law: SamplingLaw = SamplingLaw()
    forced: Tokens = ()
    continues: int | None = None
    steps: tuple[tuple[int, int], ...] = ()  # reasoning steps as [start, end) spans of `tokens`
    stop: Stop = ""
    text: str = ""  # what it wrote, for people and for other seats
    action: str | None = None  # the action passed to the world after this turn; None: no action
    reward: float = 0.0  # the reward of the action for the side of this seat
    version: int = 0  # version of the weights that wrote its first token
    rewards: Mapping[str, float] = field(default_factory=dict)  # the rewards of the action for other sides
    last_version: int | None = None  # of its last token, if the weights changed in between

    @property
    def ended(self) -> bool:
        """Whether its seat ended it, by a token or a text that ends turns."""
        return self.stop in ENDED

    @property
    def cut_off(self) -> bool:
        """Whether a limit ended it."""
        return self.stop in CUT_OFF

    @property
    def versions(self) -> tuple[int, int]:
        """The versions of the weights that wrote its first and its last token."""
        return self.version, self.version if self.last_version is None else self.last_version


@dataclass(frozen=True, slots=True)
class Scored:
    reward: float
    success: bool | None = None
    # the rewards behind it and metrics beside it, by name: logged and shown, never paid
    parts: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return f"reward {self.reward}{'' if self.success is None else ', won' if self.success else ', not won'}"


@dataclass(frozen=True, slots=True)
class Invalid:
    """The play ended, but its result must not be trusted (no parsable answer if one is required, leaked gold text)."""

    reason: str

    def __str__(self) -> str:
        return f"invalid: {self.reason}"


@dataclass(frozen=True, slots=True)
class Failed:
    """A world, an engine or a judge crashed. The episode has no reward: it is never a zero, and is in no average."""

    error: str

    def __str__(self) -> str:
        return self.error


Outcome = Scored | Invalid | Failed


@dataclass(frozen=True, slots=True)
class Player:
    """Who played in a seat."""

    kind: Literal["trained", "frozen", "remote", "scripted", "person"]
    model: str = ""
    revision: str = ""
    version: int = 0
    side: str = ""  # the side that this seat plays for; empty: the only side


@dataclass(frozen=True, slots=True)
class Parent:
    """The point at which a branch left its origin: before token `token` of turn `turn`."""

    episode: str
    turn: int
    token: int = 0


@dataclass(frozen=True, slots=True)
class Episode:
    id: str
    task: Task
    group: str  # episodes of one group share a start
    turns: tuple[Turn, ...]
    outcomes: Mapping[str, Outcome]  # one per side
    terminated: bool = False  # the world ended
    truncated: bool = False  # the play was cut off
    players: Mapping[str, Player] = field(default_factory=dict)
    parent: Parent | None = None
    seed: int = 0
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def outcome(self) -> Outcome:
        """The outcome of the only, or first named, side."""
        return next(iter(self.outcomes.values()))

    def context(self, turn: int) -> Tokens:
        """All tokens that turn `turn` saw before its forced and written ones."""
        parts: list[Tokens] = [self.turns[turn].prompt]
        at = self.turns[turn].continues
        while at is not None:
            t = self.turns[at]
            parts += [t.tokens, t.forced, t.prompt]
            at = t.continues
        return tuple(token for part in reversed(parts) for token in part)

    def sequence(self, turn: int) -> Tokens:
        """The context of a turn, what was forced on it and what it wrote."""
        t = self.turns[turn]
        return self.context(turn) + t.forced + t.tokens


@dataclass(frozen=True, slots=True)
class Annotation:
    """`values` holds one number per token or step of turn `turn`, or a single number for a turn or episode."""

    episode: str
    name: str
    level: Literal["token", "step", "turn", "episode"]
    values: tuple[float, ...]
    turn: int | None = None
    source: str = ""


@dataclass(frozen=True, eq=False)
class Sample:
    """One token sequence ready to train on.

    `streams` are per-token arrays of the sequence's length. A component of a loss named c is
    sum over tokens of weight_c[t] * f_c[t], divided by the sum of mass[c] over the *whole* batch; so every
    mean over tokens, turns, trajectories is written in the data before the first backward pass.
    `law[t]` is an index into `laws` (-1: the model's own distribution). `unit` and `role` tie rows that an objective
    needs together (`role` "chosen"/"rejected" of one pair).
    """

    tokens: np.ndarray
    streams: Mapping[str, np.ndarray] = field(default_factory=dict)
    mass: Mapping[str, float] = field(default_factory=dict)
    laws: tuple[SamplingLaw, ...] = ()
    episode: str = ""
    group: str = ""
    unit: str = ""
    role: str = ""

    def __post_init__(self) -> None:
        n = len(self.tokens)
        for name, s in self.streams.items():
            if s.shape[:1] != (n,):
                raise ValueError(
                    f"stream '{name}' of sample {self.episode or self.unit!r} has shape {s.shape}, not ({n},)"
                )
