"""Order puzzles as a task: one turn, the answer is right (1) or not (0). See orders.py for the rules."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from trailmark.answers import leaf_value, read_answer
from trailmark.errors import TaskError, nearest
from trailmark.tasks.base import Observation, Step, TaskSource, World
from trailmark.tasks.puzzle.orders import (
    LEVELS,
    OPENING,
    Form,
    Puzzle,
    Truth,
    make_puzzle,
    read_lines,
    read_puzzle,
    true_step_values,
    written,
)
from trailmark.tasks.puzzle.policies import Policy, Walker, exact_value
from trailmark.tasks.splits import SPLITS, split_of
from trailmark.types import Episode, Scored, Task

TRIES = 20_000  # draws until a puzzle must be new


class PuzzleWorld(World):
    """A world of one turn: the action is the whole solution. The step's `info` has the answer, the reason, and the mean
    true value of the steps (`sound`)."""

    def __init__(self, form: Form):
        self.form: Form = form
        self.task: Task | None = None

    def reset(self, task: Task) -> Observation:
        try:
            puzzle, _ = read_puzzle(str(task.data["puzzle"]))
        except KeyError:
            raise TaskError(f"task '{task.id}' needs data 'puzzle', the text of one.") from None
        self.task, self.puzzle = task, puzzle
        return Observation(puzzle.text + (OPENING if self.form == "react" else ""))

    def step(self, action: str) -> Step:
        if self.task is None:
            raise TaskError("this puzzle is answered; call reset before the next step.")
        self.task, p = None, self.puzzle
        value, why = leaf_value(action, p.label, len(p.options))
        truth = true_step_values(p, action, self.form)
        info = {"answer": read_answer(action, len(p.options)).letter, "reason": why, "sound": truth.mean}
        return Step(Observation(""), value or 0.0, True, False, Scored(value or 0.0, value == 1.0), info)


class Puzzles(TaskSource):
    """The task source.

    level    1 to 5, or several of them to mix evenly; a chain of 2 to 6 relations
    form     "short": bare lines; "react": "Thought 1: eb" and "Action 4: Finish[The answer is B.]"
    errors, leaps, slips   the rates of the scripted teacher that writes meta["gold"] (see `Walker`); with
             none of them it writes the shortest sound solution

    `tasks` can draw any number; `n=None` gives 1000. Splits are disjoint by the hash of the puzzle. The puzzle of a
    task is `puzzle_of(task)`.
    """

    name = "puzzle"
    markov = True

    def __init__(
        self,
        level: int | Sequence[int] = 1,
        form: Form = "short",
        errors: float = 0.0,
        leaps: float = 0.0,
        slips: float = 0.0,
    ):
        self.levels = (level,) if isinstance(level, int) else tuple(level)
        if not self.levels or any(k not in LEVELS for k in self.levels):
            raise TaskError(f"puzzle has the levels 1 to {max(LEVELS)}, not {level!r}.")
        if form not in ("short", "react"):
            raise TaskError(f"puzzle has no form '{form}'.{nearest(str(form), ('short', 'react'))}")
        self.form: Form = form
        self.teacher = Walker(errors, leaps, slips)

    def tasks(self, split: str = "train", n: int | None = None, seed: int = 0) -> list[Task]:
        if split not in SPLITS:
            raise TaskError(f"puzzle has no split '{split}'.{nearest(split, SPLITS)}")
        rng, seen = random.Random(f"puzzle {split} {seed}"), set[str]()
        return [self._task(rng, split, seed, i, seen) for i in range(1000 if n is None else n)]

    def _task(self, rng: random.Random, split: str, seed: int, i: int, seen: set[str]) -> Task:
        level = self.levels[i % len(self.levels)]
        for _ in range(TRIES):
            puzzle = make_puzzle(rng, level)
            if split_of(puzzle.text) == split and puzzle.text not in seen:
                break
        else:
            raise TaskError(f"level {level} has hardly more than {i} different puzzles in '{split}': ask for fewer.")
        seen.add(puzzle.text)
        lines = self.teacher.draw(puzzle, random.Random(f"teacher {seed} {puzzle.text}"))
        data: dict[str, Any] = {"puzzle": puzzle.text, "options": list(puzzle.options), "label": puzzle.label,
                                "level": level, "form": self.form}  # fmt: skip
        name = f"puzzle-{'+'.join(map(str, self.levels))}-{split}-{seed}-{i}"
        return Task(name, seed, data, {"gold": written(lines, self.form), "id": name, "label": puzzle.label})

    def make(self) -> PuzzleWorld:
        return PuzzleWorld(self.form)

    def example_actions(self, task: Task) -> list[str]:
        """The teacher's solution, a guess, and a text without an answer."""
        return [task.meta["gold"], "Finish[A]", "I do not know"]

    def true_step_values(self, task: Task, text: str, direct: bool = False) -> Truth:
        """Which steps of a solution are sound, and their mean."""
        return true_step_values(puzzle_of(task), text, self.form, direct)

    def true_value(self, task: Task, text: str, policy: Policy) -> float:
        """The probability that a policy which goes on behind `text` answers right."""
        return exact_value(puzzle_of(task), read_lines(text, self.form), policy)[0]


def puzzle_of(task: Task) -> Puzzle:
    return read_puzzle(str(task.data["puzzle"]))[0]


def soundness(episode: Episode) -> float | None:
    """The mean true value of the steps that were written in a played puzzle; None if it is none, or has no step."""
    if "puzzle" not in episode.task.data or not episode.turns:
        return None
    form = episode.task.data.get("form", "short")
    return true_step_values(puzzle_of(episode.task), episode.turns[-1].text, form).mean
