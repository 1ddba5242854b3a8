"""What a task is: a named source of starts, and a world that plays one start.

A world is used through `reset` and `step` only. `terminated` (the world ended) is kept apart from `truncated` (a limit
was reached). A world is deterministic given its task: the same actions after `reset(task)` give the same steps, so any
moment of a stored episode can be re-entered by replaying its actions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from trailmark.errors import TaskError
from trailmark.types import Outcome, Task


@dataclass(frozen=True, slots=True)
class Observation:
    """What an actor is shown. `state` is the situation; `menu` lists the actions, one per label, when they are listed.
    Kept as two fields so that nobody ever has to find the list again inside the text."""

    state: str
    menu: str = ""
    labels: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()  # the plain meaning of each label, for people and teachers
    seat: str = ""  # whose turn it is, in a world of several actors; empty: the only one's
    messages: tuple[Mapping[str, str], ...] = ()  # what is said now, where it is more than one message of the user

    @property
    def text(self) -> str:
        return self.state + self.menu


@dataclass(frozen=True, slots=True)
class Step:
    observation: Observation
    reward: float | Mapping[str, float]  # of the side that acted; by side where an action pays several
    terminated: bool
    truncated: bool
    outcome: Outcome | Mapping[str, Outcome] | None = (
        None  # set exactly when the episode is over; by side where there are several
    )
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        return self.terminated or self.truncated

    def paid(self, side: str = "") -> tuple[float, dict[str, float]]:
        """What the side that acted got, and what the others got. A side that is not named got nothing."""
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
    """A named task. `markov`: each observation says all there is to know, so every turn starts a new sequence;
    otherwise observations are messages of one growing conversation. A source with `slow = True` has worlds that wait (for a
    process, a network): their calls run in threads, so that one does not hold up the others. A source with `judged = True` has
    worlds whose last step has no outcome: a judge gives it (`score/base.py`), the source's own `judge` or one that `play` is
    given."""

    name: str
    markov: bool

    def tasks(self, split: str = "train", n: int | None = None, seed: int = 0) -> Sequence[Task]:
        """`n` starts of a split (None: all of them, where there is an end), the same for the same seed."""
        ...

    def make(self) -> World: ...


def bind(source: Any, tokenizer: Any) -> None:
    """Tell a world the policy's tokenizer, where it asks for it: it names actions by labels of one token, or counts tokens."""
    if hasattr(source, "bind"):
        source.bind(tokenizer)


def draw_tasks(source: TaskSource, split: str, n: int | None, seed: int) -> Sequence[Task]:
    """A task that cannot say its starts is the user's to mend, and is named."""
    try:
        return source.tasks(split, n, seed)
    except TaskError:
        raise
    except Exception as problem:
        raise TaskError(
            f"task '{source.name}' raised {type(problem).__name__} for split '{split}': {problem}"
        ) from problem
