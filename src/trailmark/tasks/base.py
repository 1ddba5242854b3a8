"""What a task is: a named source of starts, and a world that plays one start.

A world is used only through `reset` and `step`. `terminated` (the world ended) differs from `truncated` (a limit was
reached). A world is deterministic given its task: the same actions after `reset(task)` give the same steps. So any
moment of a stored episode can be reached again by replaying its actions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from trailmark.errors import TaskError
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


@runtime_checkable
class World(Protocol):
    """Plays one task at a time. An instance belongs to one episode at a time."""

    def reset(self, task: Task) -> Observation: ...

    def step(self, action: str) -> Step: ...


@runtime_checkable
class TaskSource(Protocol):
    """A named task. With `markov=True` each observation holds the whole state, so every turn starts a new sequence.
    Otherwise observations are messages of one growing conversation. A source with `slow = True` has worlds that wait
    for a process or a network. Their calls run in threads, so a slow world does not delay the others. A source
    with `judged = True` has worlds whose last step has no outcome: a judge gives it (`score/base.py`). That is the
    source's own `judge`, or the one given to `play`."""

    name: str
    markov: bool

    def tasks(self, split: str = "train", n: int | None = None, seed: int = 0) -> Sequence[Task]:
        """`n` starts of a split, the same for the same seed. None: all of them, if their number is finite."""
        ...

    def make(self) -> World: ...


def bind(source: Any, tokenizer: Any) -> None:
    """Give a world the policy's tokenizer if it asks for it. It needs the tokenizer for labels of one token, or to
    count tokens."""
    if hasattr(source, "bind"):
        source.bind(tokenizer)


def draw_tasks(source: TaskSource, split: str, n: int | None, seed: int) -> Sequence[Task]:
    """`source.tasks(...)`. If it raises, the error names the task, because the task may be the user's own code."""
    try:
        return source.tasks(split, n, seed)
    except TaskError:
        raise
    except Exception as problem:
        raise TaskError(
            f"task '{source.name}' raised {type(problem).__name__} for split '{split}': {problem}"
        ) from problem
