"""Plays of one who mostly does what is best, with a teacher's words on each step.

With probability `perturb` chance chooses instead, so that the data show mistakes and how to come back from them. A step is
positive when the one before it was good. What the teacher says stands beside both labels: the one taken and the best one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trailmark.data.decisions import Decision, write_decisions
from trailmark.data.stages import Counts
from trailmark.data.teacher import Moment, Teacher, TeacherFailed, at_once
from trailmark.errors import TaskError
from trailmark.run_async import wait
from trailmark.tasks.base import Observation, World
from trailmark.types import Task


@dataclass(frozen=True, slots=True)
class Last:
    """What was done last, in plain words, and whether it was good."""

    action: str
    good: bool


class Guide(Protocol):
    """One who knows a world from the inside while it is played."""

    world: World

    def best(self, seen: Observation) -> str | None:
        """The best label; None where there is nothing left to do."""
        ...

    def choices(self, seen: Observation) -> Sequence[str]:
        """The labels that chance may choose from."""
        ...

    def good(self, label: str, best: str) -> bool:
        """Whether a label is as good as the best one."""
        ...

    def moment(self, seen: Observation, best: str, last: Last | None) -> Moment: ...


async def _play(
    task: Task, guide: Guide, teacher: Teacher, perturb: float, seed: int, counts: Counts
) -> list[Decision]:
    """Up to the end, or to a step on which guide or teacher has nothing to say."""
    draw, out = random.Random(f"plays {seed} {task.id}"), []
    seen, over, last = guide.world.reset(task), False, None
    while not over:
        try:
            best = guide.best(seen)
        except TaskError:
            best = None
        if best is None:
            counts.left_out["rest of a play: no best action"] += 1
            break
        by_chance = draw.random() < perturb
        label = draw.choice(guide.choices(seen)) if by_chance else best
        try:
            words = await teacher.reflect(guide.moment(seen, best, last))
        except TeacherFailed as problem:
            counts.left_out[f"rest of a play: {problem.reason}"] += 1
            break
        who = teacher.name, last is None or last.good, by_chance
        at = seen.state, seen.menu, seen.labels, seen.actions
        out.append(Decision(task.id, "positive0", len(out), *at, words, label, best, *who))
        last = Last(seen.actions[seen.labels.index(label)], guide.good(label, best))
        step = guide.world.step(label)
        seen, over = step.observation, step.over
    return out


def make(
    out: Path, tasks: Sequence[Task], guide: Callable[[], Guide], teacher: Teacher, perturb: float, seed: int,
    done: Callable[[int], None] = lambda n: None,
) -> Counts:  # fmt: skip
    """steps.jsonl and the five files of both kinds under `out`. A play that its world cannot go on with is counted."""
    counts = Counts()

    async def one(task: Task) -> list[Decision]:
        try:
            return await _play(task, guide(), teacher, perturb, seed, counts)
        except TaskError:
            counts.left_out["play that its world refuses"] += 1
            return []

    plays = wait(at_once(tasks, one, teacher.at_once, done))
    decisions = [d for play in plays for d in play]
    counts.kept["plays"] = sum(1 for p in plays if p)
    counts.kept["steps"] = len(decisions)
    counts.kept["positive"] = sum(d.positive for d in decisions)
    counts.kept["by chance"] = sum(d.perturbed for d in decisions)
    write_decisions(out, decisions)
    return counts
