"""A task's own worked answers: as prompt and response, to imitate with `method: sft`, or as an episode."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from trailmark.data.output_paths import new_file
from trailmark.errors import DataError, TrailmarkError
from trailmark.formats.rows import json_lines
from trailmark.formats.turns import Reader, Starts, plain
from trailmark.runs.atomic_files import atomic_write
from trailmark.tasks import get_task
from trailmark.types import Episode, Task


def make(task: str, out: Path, options: dict[str, Any], n: int, split: str, seed: int) -> int:
    """Write `n` rows of {"prompt", "response"} and return their number. An existing `out` is never overwritten."""
    new_file(out)
    source = get_task(task, **options)
    world, rows = source.make(), []
    for start in source.tasks(split, n, seed):
        if not isinstance(start.meta.get("gold"), str):
            raise TrailmarkError(f"task '{task}' has no gold answers to imitate (start '{start.id}').")
        rows.append({"prompt": world.reset(start).text, "response": start.meta["gold"]})
    atomic_write(out, json_lines(rows))
    return len(rows)


def worked(source: Any, task: Task, tokenizer: Any, seat: str) -> Episode:
    """A task's own worked answer as an episode, written by a seat."""
    if not isinstance(gold := task.meta.get("gold"), str):
        raise DataError(f"teacher.gold: task '{task.id}' has no worked solution: name a seat teacher instead.")
    world = source.make()
    shown = world.reset(task).text
    step = world.step(gold)
    turn = replace(plain(Reader(tokenizer, seat, Starts()), shown, gold), action=gold, reward=step.paid()[0])
    return Episode(f"0:{task.id}/0", task, f"0:{task.id}", (turn,), {"self": step.outcome}, step.terminated)
