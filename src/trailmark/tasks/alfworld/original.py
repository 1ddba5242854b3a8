"""The original engine with the same interface, for comparison (optional: `pip install 'trailmark[alfworld]'`).

    with OriginalGame(domain, problem, grammar, id="…") as game:
        play = game.start()

It is textworld's PDDL environment over a compiled planner: a second or more per start, about a tenth of a second per
step, one play at a time in a game. Names of things come from alfworld if it is installed, otherwise from our own
`grammar.thing_names`, which is checked against it; `OriginalGame.named_by` says which. A copy replays the commands.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from trailmark.errors import TaskError
from trailmark.tasks.alfworld.grammar import thing_names
from trailmark.tasks.alfworld.pddl import Fact


def available() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("textworld", "fast_downward"))


class OriginalGame:
    """One game in the original engine. Close it, and the next game reuses its environment. Each environment holds its
    own library, and unloading more than one crashes the process at exit."""

    def __init__(
        self,
        domain: str,
        problem: str,
        grammar: str,
        *,
        id: str,
        walkthrough: Sequence[str] = (),
        task_type: str = "",
    ):
        if not available():
            raise TaskError("the original ALFWorld engine is not installed: pip install 'trailmark[alfworld]'.")
        self.id, self.walkthrough, self.task_type = id, tuple(walkthrough), task_type
        self._data = {
            "pddl_domain": domain,
            "grammar": grammar,
            "pddl_problem": problem,
            "walkthrough": list(walkthrough),
        }
        with _own_arguments():
            self._env = self._load()

    def _load(self) -> Any:
        env = _IDLE.pop() if _IDLE else _environment()
        try:
            env.load(self._data)
            self.named_by = _name(env._entity_infos)
        except BaseException:
            _IDLE.append(env)
            raise
        return env

    def start(self) -> OriginalPlay:
        """Start a new play; the play before ends."""
        return OriginalPlay(self)

    def close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            _IDLE.append(env)

    def __enter__(self) -> OriginalGame:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OriginalPlay:
    def __init__(self, game: OriginalGame):
        if game._env is None:
            raise TaskError(f"game '{game.id}' is closed.")
        self.game, self.done, self.score = game, False, 0
        self._said: list[str] = []
        with _own_arguments():
            self._state = game._env.reset()

    @property
    def observation(self) -> str:
        return self._state.feedback

    @property
    def moves(self) -> int:
        return self._state["moves"]

    @property
    def won(self) -> bool:
        return bool(self._state["won"])

    @property
    def facts(self) -> frozenset[Fact]:
        """All facts that are true now."""
        found = (f for f in self._state["_facts"] if not f.is_negation)
        return frozenset((f.name, *(v.name for v in f.arguments)) for f in found)

    def commands(self) -> tuple[str, ...]:
        return tuple(self._state["admissible_commands"])

    def step(self, command: str) -> str:
        if self._state is not self.game._env.state:
            raise TaskError("the original engine has gone on to another play; only the last play can be stepped.")
        self._said.append(command)
        self._state, score, self.done = self.game._env.step(command)
        self.score = int(score)
        return self.observation

    def copy(self) -> OriginalPlay:
        """The same state in a new play; this play cannot be stepped any more."""
        other = OriginalPlay(self.game)
        for command in self._said:
            other.step(command)
        return other


def _name(infos: dict[str, Any]) -> str:
    """Name things as alfworld does."""
    try:
        misc = importlib.import_module("alfworld.agents.utils.misc")
    except ImportError:
        names = thing_names(infos)
        for x, info in infos.items():
            info.name = names[x]
        return "trailmark"
    demangler = misc.Demangler(game_infos=infos)
    for info in infos.values():
        info.name = demangler.demangle_alfred_name(info.id)
    return "alfworld"


_IDLE: list[Any] = []  # environments of closed games


def _environment() -> Any:
    textworld = importlib.import_module("textworld")
    pddl = importlib.import_module("textworld.envs.pddl")
    return pddl.PddlEnv(textworld.EnvInfos(admissible_commands=True, won=True, moves=True))


@contextlib.contextmanager
def _own_arguments() -> Iterator[None]:
    """Restore sys.argv: the planner's translator writes its own words into it."""
    before = sys.argv
    try:
        yield
    finally:
        sys.argv = before
