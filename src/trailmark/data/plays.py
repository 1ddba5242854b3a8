"""Plays of a guide that mostly takes the best action, with a teacher's reflection on each step.

With probability `perturb` the action is random instead, so that the data show mistakes and recoveries. A step is
positive if the step before it was good. The teacher's reflection is stored with both labels: the one taken and the
best.
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
    """The last action in plain words, and whether it was good."""

    action: str
    good: bool


class Guide(Protocol):
    """Knows the inner state of a world while it is played."""

    world: World

    def best(self, seen: Observation) -> str | None:
        """The best label; None if there is nothing left to do."""
        ...

    def choices(self, seen: Observation) -> Sequence[str]:
        """The labels that a random action is drawn from."""
        ...

    def good(self, label: str, best: str) -> bool:
        """Whether a label is as good as the best one."""
        ...

    def moment(self, seen: Observation, best: str, last: Last | None) -> Moment: ...


async def _play(
    task: Task, guide: Guide, teacher: Teacher, perturb: float, seed: int, counts: Counts
) -> list[Decision]:
    """Play to the end, or to a step for which the guide or the teacher has no answer."""
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
    """Write steps.jsonl and both sets of five files under `out`. A play that its world refuses is counted."""
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
