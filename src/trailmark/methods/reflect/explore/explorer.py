"""The repository world in which data are made: whole repositories, labels in the order of the list (or shuffled), and
the best next command."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trailmark.errors import DataError
from trailmark.methods.reflect.explore.records import Record
from trailmark.tasks.auto_explore.oracle import best_command, label_of
from trailmark.tasks.auto_explore.source import AutoExplore
from trailmark.tasks.auto_explore.world import ExploreWorld
from trailmark.tasks.base import Observation
from trailmark.types import Task


@dataclass(frozen=True, slots=True)
class Last:
    """The last command, and whether it was the best one."""

    command: str
    good: bool


class Seeker:
    """One play. `seen` is what is shown now. Pages are turned when needed."""

    def __init__(self, world: ExploreWorld, seen: Observation):
        self.world, self.seen, self.over = world, seen, False
        self.last: Last | None = None

    @property
    def best(self) -> str:
        return best_command(self.world)

    @property
    def best_label(self) -> str:
        return self.label(self.best)

    def label(self, command: str) -> str:
        """The label of a command, or of the page turn towards it. A DataError if it cannot be done (any more)."""
        if self.over or command not in self.world.commands:
            raise DataError(f"'{command}' is not offered after {self.world.steps} steps.")
        return label_of(self.seen, command, self.world.commands)

    def do(self, label: str) -> str:
        """Answer with a label. Returns its command."""
        command = self.seen.actions[self.seen.labels.index(label)]
        if command in self.world.commands:
            self.last = Last(command, command == self.best)
        step = self.world.step(label)
        self.seen, self.over = step.observation, step.over
        return command

    def go(self, command: str) -> None:
        """Do a command. If it is on another page, turn the pages first."""
        while self.do(self.label(command)) != command:
            pass


class Explorer:
    """Starts plays of records over a folder of repositories. With a tokenizer, labels and token limits come from it."""

    def __init__(self, repos: Path, tasks: Path, horizon: int = 15, tokenizer: Any = None, shuffle: bool = False):
        self.source = AutoExplore(str(tasks), str(repos), horizon=horizon, leaveout=0.0, shuffle_labels=shuffle)
        if tokenizer is not None:
            self.source.bind(tokenizer)

    def start(self, record: Record, commands: Iterable[str] = (), name: str = "") -> Seeker:
        """A play of `record` after these commands. `name` gives each walk its own shuffled labels. A DataError if it
        has no readable target, or the commands do not fit."""
        targets = self.source.readable(record.repo, record.version, record.targets)
        if not targets:
            raise DataError(f"record '{record.key}' has no target that can be read in its repository.")
        data = {"repo": record.repo, "version": record.version, "query": record.query, "targets": targets}
        world = self.source.make()
        seeker = Seeker(world, world.reset(Task(f"{record.key}{name and ' '}{name}", 0, data)))
        for command in commands:
            seeker.go(command)
        return seeker
