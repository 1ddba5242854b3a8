"""Plays of one who mostly does what is best, with a teacher's words on each step.

With probability `perturb` chance chooses instead, so that the data show mistakes and how to come back from them. A
step is positive when the one before it was good. What the teacher says stands beside both labels: the one taken and
the best one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from trailmark.data.decisions import Decision, from_row, write_decisions
from trailmark.data.stages import Counts
from trailmark.data.teacher import Moment, Teacher, TeacherFailed, at_once
from trailmark.errors import TaskError
from trailmark.formats.rows import Row
from trailmark.run_async import wait
from trailmark.runs.episode_json import object_from_json
from trailmark.runs.store import append_line, whole_lines
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


@dataclass(frozen=True, slots=True)
class Played:
    """The decisions of one play, and why its rest was left out ("": it was not)."""

    decisions: list[Decision]
    left_out: str = ""


async def _play(task: Task, guide: Guide, teacher: Teacher, perturb: float, seed: int) -> Played:
    """Up to the end, or to a step on which guide or teacher has nothing to say."""
    draw, out = random.Random(f"plays {seed} {task.id}"), []
    seen, over, last = guide.world.reset(task), False, None
    while not over:
        try:
            best = guide.best(seen)
        except TaskError:
            best = None
        if best is None:
            return Played(out, "rest of a play: no best action")
        by_chance = draw.random() < perturb
        label = draw.choice(guide.choices(seen)) if by_chance else best
        try:
            words = await teacher.reflect(guide.moment(seen, best, last))
        except TeacherFailed as problem:
            return Played(out, f"rest of a play: {problem.reason}")
        who = teacher.name, last is None or last.good, by_chance
        at = seen.state, seen.menu, seen.labels, seen.actions
        out.append(Decision(task.id, "positive0", len(out), *at, words, label, best, *who))
        last = Last(seen.actions[seen.labels.index(label)], guide.good(label, best))
        step = guide.world.step(label)
        seen, over = step.observation, step.over
    return Played(out)


def make(
    out: Path, tasks: Sequence[Task], guide: Callable[[], Guide], teacher: Teacher, perturb: float, seed: int,
    done: Callable[[int], None] = lambda n: None,
) -> Counts:  # fmt: skip
    """steps.jsonl and the five files of both kinds under `out`. A play that its world cannot go on with is counted.
    Plays are kept in plays.partial.jsonl as they finish, so that a kill loses those under way only."""
    partial = out / "plays.partial.jsonl"
    kept = _kept(partial) if partial.exists() else {}

    async def one(place: tuple[int, Task]) -> Played:
        index, task = place
        if index in kept:
            return kept[index]
        try:
            played = await _play(task, guide(), teacher, perturb, seed)
        except TaskError:
            played = Played([], "play that its world refuses")
        append_line(partial, {"play": index, **asdict(played)}, "play")
        return played

    plays = wait(at_once(list(enumerate(tasks)), one, teacher.at_once, done))
    counts = Counts()
    counts.left_out.update(p.left_out for p in plays if p.left_out)
    decisions = [d for play in plays for d in play.decisions]
    counts.kept["plays"] = sum(1 for p in plays if p.decisions)
    counts.kept["steps"] = len(decisions)
    counts.kept["positive"] = sum(d.positive for d in decisions)
    counts.kept["by chance"] = sum(d.perturbed for d in decisions)
    write_decisions(out, decisions)
    partial.unlink(missing_ok=True)
    return counts


def _kept(path: Path) -> dict[int, Played]:
    out = {}
    for i, line in enumerate(whole_lines(path), 1):
        row = Row(object_from_json(line, path, i), path, i)
        v = row.fields(row.value, "", ["play", "decisions", "left_out"])
        out[v["play"]] = Played([from_row(Row(d, path, i)) for d in v["decisions"]], v["left_out"])
    return out
