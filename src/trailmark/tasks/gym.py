"""Any Gymnasium environment as a task: `get_task("gym", id="FrozenLake-v1", kwargs={"is_slippery": False})`.

Observations must be text or numbers, or `render` must turn them into text. Discrete actions become the labels "0", "1",
...; a Text action space accepts any text. Every reset seeds the environment with the task's seed. So a play can be
replayed as long as the environment draws only from its own generator.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trailmark.errors import TaskError
from trailmark.tasks.base import Observation, Step, TaskSource, World
from trailmark.types import Scored, Task


class GymWorld(World):
    def __init__(self, source: Gym):
        self.source, self.env, self.over = source, source.make_env(), True

    def reset(self, task: Task) -> Observation:
        seen, _ = self.env.reset(seed=task.seed)
        self.total, self.steps, self.over = 0.0, 0, False
        return self.source.observe(seen)

    def step(self, action: str) -> Step:
        if self.over:
            raise TaskError(f"this play of '{self.source.id}' is over; call reset before the next step.")
        source = self.source
        if source.labels and action not in source.labels:
            raise TaskError(f"'{source.id}' has no action {action!r}; its labels are {', '.join(source.labels)}.")
        act = source.first + source.labels.index(action) if source.labels else action
        seen, reward, terminated, truncated, info = self.env.step(act)
        self.total += float(reward)
        self.steps += 1
        limit = source.max_steps is not None and self.steps >= source.max_steps
        ended, cut = bool(terminated), bool(truncated) or (limit and not terminated)
        self.over = ended or cut
        outcome = None
        if self.over:
            outcome = Scored(self.total, None if source.success is None else self.total >= source.success)
        return Step(source.observe(seen), float(reward), ended, cut, outcome, dict(_plain(info)))


class Gym(TaskSource):
    """The task source.

    id         the registered environment; "my_module:Env-v0" imports the module first
    render     a function from the environment's observation to text, or its name: "my_module:show"
    names      the meaning of each action, listed in the menu; without them the menu has only the labels
    success    the return from which a play counts as a success (None: success is unknown)
    max_steps  cut a play off after so many steps, besides the environment's own TimeLimit
    kwargs     passed to `gymnasium.make`
    markov     whether one observation holds the whole state; otherwise the play is one growing conversation

    Terminated and truncated come from the environment. Both may be true if it ends on its last allowed step. There are
    unlimited tasks (`n=None`: 100); each split and seed has its own environment seeds. An unknown label raises
    TaskError, because no environment defines what it would do.
    """

    name = "gym"

    def __init__(
        self,
        id: str,
        render: Callable[[Any], str] | str | None = None,
        names: Sequence[str] | None = None,
        success: float | None = None,
        max_steps: int | None = None,
        kwargs: Mapping[str, Any] | None = None,
        markov: bool = True,
    ):
        for key, value, kinds in (("success", success, (int, float)), ("max_steps", max_steps, int)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
                raise TaskError(f"task 'gym': option '{key}' must be a number, not {value!r}.")
        self.id, self.success, self.max_steps, self.markov = id, success, max_steps, markov
        self.kwargs = dict(kwargs or {})
        if isinstance(render, str):
            from trailmark.tasks import load_object

            render = load_object(render, "render of task 'gym'")
        self.render = render
        if ":" in id:
            from trailmark.trust import find_here, may_run

            may_run(id, "id of task 'gym'")
            find_here()
        env = self.make_env()
        from gymnasium import spaces

        space, self.first, self.labels = env.action_space, 0, ()
        if isinstance(space, spaces.Discrete):
            self.first, self.labels = int(space.start), tuple(str(i) for i in range(int(space.n)))
        elif not isinstance(space, spaces.Text):
            raise TaskError(f"'{id}' has actions {space}; a model can write only Discrete and Text actions.")
        if render is None and not isinstance(env.observation_space, (spaces.Text, spaces.Discrete)):
            raise TaskError(f"'{id}' shows {env.observation_space}, which is not text; give render='my_module:show'.")
        if names is not None and len(names) != len(self.labels):
            raise TaskError(f"'{id}' has {len(self.labels)} actions, but {len(names)} names were given.")
        self.names = tuple(names) if names is not None else self.labels
        lines = (k if k == a else f"{k}. {a}" for k, a in zip(self.labels, self.names))
        self.menu = "Choose one action:\n" + "".join(f"{x}\n" for x in lines) if self.labels else ""
        env.close()

    def make_env(self) -> Any:
        try:
            import gymnasium
        except ImportError as e:
            raise TaskError("task 'gym' needs the package gymnasium; install it with: pip install gymnasium") from e
        try:
            return gymnasium.make(self.id, disable_env_checker=True, **self.kwargs)
        except (gymnasium.error.Error, ImportError, TypeError, ValueError) as e:
            raise TaskError(f"gymnasium cannot make '{self.id}': {e}") from e

    def observe(self, seen: Any) -> Observation:
        try:
            text = self.render(seen) if self.render is not None else str(seen)
        except Exception as e:  # the user's function may raise anything
            raise TaskError(f"render of '{self.id}' raised {type(e).__name__}: {e}") from e
        if not isinstance(text, str):
            raise TaskError(f"render of '{self.id}' gave {type(text).__name__}, not text.")
        return Observation(text if text.endswith("\n") else text + "\n", self.menu, self.labels, self.names)

    def tasks(self, split: str = "train", n: int | None = None, seed: int = 0) -> list[Task]:
        rng = random.Random(f"gym {split} {seed}")
        return [Task(f"gym-{self.id}-{split}-{seed}-{i}", rng.randrange(2**31), {"id": self.id})
                for i in range(100 if n is None else n)]  # fmt: skip

    def make(self) -> GymWorld:
        return GymWorld(self)


def _plain(info: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of an environment's info that are text, numbers or booleans."""
    plain = {str(k): v.item() if isinstance(v, np.generic) else v for k, v in info.items()}
    return {k: v for k, v in plain.items() if v is None or isinstance(v, (str, int, float, bool))}
