"""Teachers for `method: reflect`: one that knows a world's best move and says why, and one that reads recorded
decisions (`trailmark data …`)."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from trailmark.errors import RecipeError, nearest
from trailmark.tasks import taxi


@dataclass(frozen=True, slots=True)
class Lesson:
    """One moment of a teacher's play: what was seen, the reflection, the best label, and the label taken. `labels` and
    `actions` are the menu's lines, if they are known, so that the menu can be written anew."""

    state: str
    menu: str
    reflection: str
    oracle: str
    action: str
    labels: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()


class Teacher(Protocol):
    @property
    def words(self) -> tuple[str, ...]:
        """Words of its reflections that become whole tokens of tiny models."""
        ...

    def lessons(self, source: Any, starts: int, perturb: float, seed: int) -> list[Lesson]: ...


class Bfs:
    """Shortest paths in the taxi's grid. With probability `perturb` it makes a random move that is not fatal, so that
    it also shows how to recover."""

    words = (
        "taxi",
        "passenger",
        "goal",
        "north",
        "south",
        "east",
        "west",
        "pick up",
        "drop off",
        " at ",
        "; go ",
        ", ",
    )

    def lessons(self, source: Any, starts: int, perturb: float, seed: int) -> list[Lesson]:
        draw, out = random.Random(f"bfs {seed}"), []
        for task in draw.sample(list(source.tasks("all")), min(starts, 300)):
            world = source.make()
            seen, over = world.reset(task), False
            while not over:
                best = taxi.optimal_action(world.state, world.mode)
                if best is None:
                    break
                moves = [a for a in range(6) if taxi.dynamics()[world.state][a][0] != world.state]
                action = draw.choice(moves) if draw.random() < perturb else best
                out.append(Lesson(seen.state, seen.menu, self.reflect(world, best), str(best), str(action)))
                step = world.step(str(action))
                seen, over = step.observation, step.over
        return out

    def reflect(self, world: Any, best: int) -> str:
        row, col, passenger, destination = taxi.decode(world.state)
        aim = taxi.CORNERS[passenger] if passenger < taxi.ABOARD else taxi.CORNERS[destination]
        name = "passenger" if passenger < taxi.ABOARD else "goal"
        return f"taxi at {row}{col}, {name} at {aim[0]}{aim[1]}; go {taxi.ACTIONS[best]}"


WORDS = 512  # most words of a file that become tokens of a tiny model
_WORD = re.compile(r" ?[A-Za-z]{2,} ?")


class File:
    """Recorded decisions: a steps.jsonl, or its folder. `starts` of its tasks are drawn by seed. With `perturb` 0 only
    steps that do not follow a mistake are used. The world of the recipe shows each of them again."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    @cached_property
    def decisions(self) -> list[Any]:
        from trailmark.methods.reflect.decisions import read_decisions

        return read_decisions(self.path)

    @property
    def words(self) -> tuple[str, ...]:
        """The most common words of its states, menus and reflections; those that save most letters come first."""
        found: Counter[str] = Counter()
        for d in self.decisions:
            found.update(_WORD.findall(d.reflection))
        for line in {line for d in self.decisions for line in (d.state + d.menu).splitlines()}:
            found.update(_WORD.findall(line))
        saved = {w: n * (len(w) - 1) for w, n in found.items() if n > 1}
        return tuple(sorted(saved, key=lambda w: (-saved[w], w))[:WORDS])

    def lessons(self, source: Any, starts: int, perturb: float, seed: int) -> list[Lesson]:
        from trailmark.methods.reflect.lesson_replay import replay_lessons

        tasks = list(dict.fromkeys(d.task for d in self.decisions))
        taken = set(random.Random(f"file {seed}").sample(tasks, min(starts, len(tasks))))
        replayed = replay_lessons(self.path, [d for d in self.decisions if d.task in taken], source)
        kept = [d for d in replayed if d.task in taken and (d.positive or perturb > 0)]
        return [Lesson(d.state, d.menu, d.reflection, d.oracle, d.action, d.labels, d.actions) for d in kept]


TEACHERS: dict[str, Teacher] = {"bfs": Bfs()}


def get_teacher(name: str, path: str | Path | None = None) -> Teacher:
    """The teacher 'bfs', or 'file' with the path of its decisions."""
    if name == "file":
        if path is None:
            raise RecipeError(
                "teacher 'file' needs a path: teacher: {name: file, path: DIR}, made by `trailmark data`."
            )
        return File(path)
    if name not in TEACHERS:
        raise RecipeError(f"unknown teacher '{name}'.{nearest(name, {*TEACHERS, 'file'})}")
    if path is not None:
        raise RecipeError(f"teacher '{name}' reads no file: leave out its path, or name it 'file'.")
    return TEACHERS[name]
