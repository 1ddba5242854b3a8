"""A task's own worked answers as prompt and response, to imitate with `method: sft`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trailmark.data.decisions import json_lines
from trailmark.data.output_paths import new_file
from trailmark.errors import TrailmarkError
from trailmark.runs.store import atomic_write
from trailmark.tasks import get_task


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
