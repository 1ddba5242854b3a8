"""Plays of a guide that mostly takes the best action, with a teacher's reflection on each step.

With probability `perturb` the action is random instead, so that the data show mistakes and recoveries. A step is
positive if the step before it was good. The teacher's reflection is stored with both labels: the one taken and the
best.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from trailmark.ask.client import NoAnswer, Unusable, run_limited
from trailmark.data.stages import Counts
from trailmark.errors import TaskError
from trailmark.formats.rows import Row
from trailmark.methods.reflect.decisions import Decision, from_row, write_decisions
from trailmark.methods.reflect.teacher import Moment, Teacher
from trailmark.run_async import wait
from trailmark.runs.atomic_files import whole_lines
from trailmark.runs.episode_json import object_from_json
from trailmark.runs.store import append_line
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


@dataclass(frozen=True, slots=True)
class Played:
    """The decisions of one play, and why its rest was left out ("": it was not). `again`: the teacher did not answer,
    and is to be asked again."""

    decisions: list[Decision]
    left_out: str = ""
    again: bool = False


async def _play(task: Task, guide: Guide, teacher: Teacher, perturb: float, seed: int) -> Played:
    """Play to the end, or to a step for which the guide or the teacher has no answer."""
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
        except Unusable as problem:
            return Played(out, f"rest of a play: {problem.reason}", isinstance(problem, NoAnswer))
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
    """Write steps.jsonl and both sets of five files under `out`. A play that its world refuses is counted. Finished
    plays are kept in plays.partial.jsonl, so a kill loses only the unfinished ones."""
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
        if not played.again:
            decisions = [asdict(d) for d in played.decisions]
            append_line(partial, {"play": index, "decisions": decisions, "left_out": played.left_out}, "play")
        return played

    plays = wait(run_limited(list(enumerate(tasks)), one, teacher.at_once, done))
    teacher.settle()
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
