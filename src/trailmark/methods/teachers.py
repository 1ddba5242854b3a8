"""Teachers that can be asked offline: they know a world's best move and say why."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Protocol

from trailmark.errors import RecipeError, nearest
from trailmark.tasks import taxi


@dataclass(frozen=True, slots=True)
class Lesson:
    """One moment of a teacher's play: what was seen, what it says of it, what is best, and what was done."""

    state: str
    menu: str
    reflection: str
    oracle: str
    action: str


class Teacher(Protocol):
    @property
    def words(self) -> tuple[str, ...]:
        """Of its reflections, as whole tokens for tiny models."""
        ...

    def lessons(self, source: Any, starts: int, perturb: float, seed: int) -> list[Lesson]: ...


class Bfs:
    """Shortest ways in the taxi's grid. With probability `perturb` it makes a random move that is not fatal, so that it also
    shows how to come back."""

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


TEACHERS: dict[str, Teacher] = {"bfs": Bfs()}


def get_teacher(name: str) -> Teacher:
    if name not in TEACHERS:
        raise RecipeError(f"unknown teacher '{name}'.{nearest(name, TEACHERS)}")
    return TEACHERS[name]
