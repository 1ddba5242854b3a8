"""A curriculum: parts of a world that are played in order, easy ones first. A part is called a level here. The key
`meta["stage"]` of a start says which level it belongs to."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trailmark.errors import TaskError
from trailmark.methods.batches import batch_rows
from trailmark.methods.reflect.config import CurriculumConfig
from trailmark.tasks.base import TaskSource, draw_tasks
from trailmark.types import Task

MODES = ("pickup", "dropoff", "full")


@dataclass(frozen=True)
class Level:
    """A part of the world: the starts of one mode, or of some depths. With neither it is the whole world."""

    name: str = ""
    mode: str | None = None
    depths: frozenset[int] | None = None
    size: int = 1

    def holds(self, task: Task) -> bool:
        return self.depths is None or bool(self.depths & set(depths(task)))

    def mark(self, task: Task) -> Task:
        data = task.data if self.mode is None else {**task.data, "mode": self.mode}
        meta = {**task.meta, "stage": self.name} if self.name else task.meta
        name = task.id if self.mode is None else f"{self.mode}/{task.id}"
        return dataclasses.replace(task, id=name, data=data, meta=meta)

    def starts(self, source: TaskSource, split: str, n: int | None, seed: int) -> list[Task]:
        """`n` starts of a split that belong to the level (None: all)."""
        found = draw_tasks(source, split, None if self.depths is not None else n, seed)
        return [self.mark(t) for t in found if self.holds(t)][:n]

    def batch(self, source: TaskSource, n: int, seed: int, step: int, first: int) -> list[Task]:
        """The starts of training step `step`. A level with a finite list of starts is played in whole shuffled passes,
        counted from step `first`, after which the level began."""
        if self.depths is None:
            return [self.mark(t) for t in draw_tasks(source, "train", n, seed * 1_000_003 + step)]
        mine = self.starts(source, "train", None, seed)
        picks = [mine[r] for r in batch_rows(len(mine), n, step - first, seed)]
        # a new seed, so that the world draws new random numbers
        return [dataclasses.replace(t, seed=seed * 1_000_003 + step) for t in picks]


@dataclass(frozen=True)
class LevelTasks:
    """A level as a task source, for a teacher to play in."""

    source: Any
    level: Level

    def tasks(self, split: str = "train", n: int | None = None, seed: int = 0) -> list[Task]:
        return self.level.starts(self.source, split, n, seed)

    def make(self) -> Any:
        return self.source.make()


def depths(task: Task) -> list[int]:
    """The depths of the targets of a start: its `depth`, or else the number of "/" in each of its targets."""
    for place in (task.meta, task.data):
        if "depth" in place:
            found = place["depth"]
            return [int(d) for d in (found if isinstance(found, list | tuple) else [found])]
        found = place.get("targets") or place.get("target")
        if found:
            return [str(t).count("/") for t in ([found] if isinstance(found, str) else found)]
    raise TaskError(f"start '{task.id}' has neither depth nor target, so a curriculum by depth is not possible.")


def make_levels(config: CurriculumConfig, source: TaskSource) -> list[Level]:
    if config.kind == "none":
        return [Level()]
    if config.kind == "modes":
        if "mode" not in draw_tasks(source, "train", 1, 0)[0].data:
            raise TaskError(
                f"curriculum modes: the starts of task '{source.name}' have no mode. Only the taxi has modes."
            )
        return [Level(m, m) for m in MODES]
    groups = depth_groups([d for t in draw_tasks(source, "train", None, 0) for d in depths(t)], config)
    return [Level(f"depth {'+'.join(map(str, sorted(g)))}", None, frozenset(g), n) for g, n in groups]


def starts_of(levels: Sequence[Level], source: TaskSource, split: str, n: int | None, seed: int) -> list[Task]:
    """`n` starts of each level, for an evaluation."""
    return [t for level in levels for t in level.starts(source, split, n, seed)]


def depth_groups(found: Sequence[int], config: CurriculumConfig) -> list[tuple[set[int], int]]:
    """The depths that form one level, shallow ones first, each group with its number of records. A record with targets
    at two depths counts in both."""
    groups = [{d} for d in sorted(set(found))]
    if config.merge_first_two and len(groups) > 1:
        groups[:2] = [groups[0] | groups[1]]
    if len(groups) > config.keep:
        groups[config.keep - 1 :] = [set().union(*groups[config.keep - 1 :])]
    return [(g, sum(d in g for d in found)) for g in groups]


def level_starts(sizes: Sequence[int], steps: int) -> list[int]:
    """The step after which each level begins. Steps are shared in proportion to the size of the levels, and each level
    gets at least one step as long as there are enough."""
    out, before = [0], 0
    for i in range(1, len(sizes)):
        before += sizes[i - 1]
        wanted = max(out[-1] + 1, steps * before // sum(sizes))
        out.append(min(wanted, steps - (len(sizes) - i)) if steps >= len(sizes) else wanted)
    return out
