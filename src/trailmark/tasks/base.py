"""What a task is: a named source of starts, and a world that plays one start.

A world is used only through `reset` and `step`. `terminated` (the world ended) differs from `truncated` (a limit was
reached). A world is deterministic given its task: the same actions after `reset(task)` give the same steps. So any
moment of a stored episode can be reached again by replaying its actions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from trailmark.errors import TaskError
from trailmark.memory import need_starts
from trailmark.time_limits import TimeLimits
from trailmark.types import Outcome, Task


@dataclass(frozen=True, slots=True)
class Observation:
    """What an actor is shown. `state` is the situation; `menu` lists the actions, one per label, if they are listed.
    They are two fields, so no code has to search the text for the list."""

    state: str
    menu: str = ""
    labels: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()  # the meaning of each label, for people and teachers
    seat: str = ""  # whose turn it is, in a world with several actors; empty: the only actor's
    messages: tuple[Mapping[str, str], ...] = ()  # the messages to show, if they are not one message of the user

    @property
    def text(self) -> str:
        return self.state + self.menu


@dataclass(frozen=True, slots=True)
class Step:
    observation: Observation
    reward: float | Mapping[str, float]  # of the side that acted; a mapping by side if an action pays several
    terminated: bool
    truncated: bool
    # Set exactly when the episode is over; a mapping by side if there are several sides.
    outcome: Outcome | Mapping[str, Outcome] | None = None
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        return self.terminated or self.truncated

    def paid(self, side: str = "") -> tuple[float, dict[str, float]]:
        """The reward of the side that acted, and those of the others. A side that is not named gets nothing."""
        if not isinstance(self.reward, Mapping):
            return float(self.reward), {}
        return float(self.reward.get(side, 0.0)), {s: float(r) for s, r in self.reward.items() if s != side}


class World:
    """Plays one task at a time. An instance belongs to one episode at a time."""

    def reset(self, task: Task) -> Observation:
        raise NotImplementedError(f"{type(self).__name__} must define reset(task)")

    def step(self, action: str) -> Step:
        raise NotImplementedError(f"{type(self).__name__} must define step(action)")

    def oracle(self) -> str | None:
        """The label of a best action now, None if there is none. A world that knows best actions defines this."""
        return None


class TaskSource:
    """A named task: its starts, and worlds that play them. It needs `name`, `markov`, `tasks` and `make`; the rest has
    defaults. A source that does not derive from this class works too: `declared` gives it the defaults."""

    name: str
    markov: bool  # each observation holds the whole state, so every turn starts a new sequence; else one conversation
    slow: bool = False  # its worlds wait for a process or a network: their calls run in threads
    judged: bool = False  # the last step of its worlds has no outcome: a judge gives it (`score/base.py`)
    judge: Any = None  # the judge, unless `play` is given another one
    judge_notes: Any = None  # a list that collects the judge's notes, unless `play` gets another list
    additive: bool | None = None  # whether an outcome is the sum of its rewards; None: not known
    binds: bool = False  # whether it defines `bind`; set by the class itself
    labels: tuple[str, ...] = ()  # the labels that its worlds may list, once it is bound
    commands: ClassVar[Mapping[str, str]] = {}  # what each label means, if its worlds need not list them
    finite: bool = False  # `tasks(split)` lists all starts of a split; training walks them in shuffled passes
    step_ends: Any = ("\n",)  # texts that end a reasoning step of an answer
    first_messages: Any = ()  # messages before the first observation of a conversation
    time_limits: TimeLimits = TimeLimits()  # of its worlds' methods; `get_task` sets what a recipe says
    messages: Any = None  # of a task that is one question: a function from a start to its messages

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls.binds = cls.bind is not TaskSource.bind

    def tasks(self, split: str = "train", n: int | None = None, seed: int = 0) -> Sequence[Task]:
        """`n` starts of a split, the same for the same seed. None: all of them, if their number is finite."""
        raise NotImplementedError(f"{type(self).__name__} must define tasks(split, n, seed)")

    def make(self) -> World:
        raise NotImplementedError(f"{type(self).__name__} must define make()")

    def bind(self, tokenizer: Any) -> None:
        """Take the policy's tokenizer, for labels of one token or to count tokens. It is called before play."""
        return None

    def left_out_of(self, split: str) -> Sequence[str]:
        """Sentences on what a split's file holds and the task does not play."""
        return ()

    def menus(self) -> Iterable[tuple[str, str]] | None:
        """(place, menu) of every list of actions that its worlds may show. None: not known in advance."""
        return None


class _Undeclared(TaskSource):
    """A source of a class of its own: what it has is used, and what it lacks has the default."""

    def __init__(self, own: Any):
        object.__setattr__(self, "_own", own)

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "_own")
        if name == "binds":
            return hasattr(own, "bind")
        return getattr(own, name) if hasattr(own, name) else object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_own"), name, value)


def declared(source: Any) -> TaskSource:
    """The source with a default for every hook that it does not have."""
    return source if isinstance(source, TaskSource) else _Undeclared(source)


def has_oracle(source: Any) -> bool:
    """Whether the worlds of a source know a best action."""
    return getattr(type(source.make()), "oracle", World.oracle) is not World.oracle


def draw_tasks(source: TaskSource, split: str, n: int | None, seed: int) -> Sequence[Task]:
    """`source.tasks(...)`. If it raises, the error names the task, because the task may be the user's own code. More
    starts than fit into memory are refused, because a task that makes its starts would go on making them."""
    need_starts(n or 0, f"task '{source.name}'", "ask for fewer starts (n)")
    try:
        return source.tasks(split, n, seed)
    except TaskError:
        raise
    except Exception as problem:
        raise TaskError(
            f"task '{source.name}' raised {type(problem).__name__} for split '{split}': {problem}"
        ) from problem
