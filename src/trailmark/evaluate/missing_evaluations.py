"""Evaluate runs that have no evaluation, before a comparison: they play the starts of a run that has one, with its
settings.

A run that only imitates has no task of its own, and many recipes have no evaluation. What the evaluated run played is
known from its episodes (starts, seed of the draws, plays of each start) and its recipe (task, sampling). So the others
can play exactly the same.
"""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from trailmark.config import SamplingConfig, resolve
from trailmark.errors import DataError, Unfinished
from trailmark.evaluate.players import local_seat, plays_alone
from trailmark.evaluate.stored_episodes import NotEvaluated, evaluated, is_run
from trailmark.failures import listed, unanswered
from trailmark.runs.store import read_recipe
from trailmark.score.config import pin_options
from trailmark.seats.model_names import locate
from trailmark.types import Episode


def all_evaluated(runs: Sequence[Path], within: str | None = None) -> list[tuple[list[Episode], Path]]:
    """The evaluation of each run, and its path (the checkpoint, if the run was evaluated just now)."""
    found: dict[Path, tuple[list[Episode], Path]] = {}
    for path in runs:
        try:
            found[path] = evaluated(path, within)
        except NotEvaluated:
            continue
    missing = [path for path in runs if path not in found]
    if missing:
        like = next((path for path in found if is_run(path) and plays_alone(read_recipe(path))), None)
        if within is not None or like is None or any(not plays_alone(read_recipe(path)) for path in missing):
            raise DataError(_advice(missing[0], runs))
        for path in missing:
            found[path] = _play_like(path, like, found[like][0])
            if lost := unanswered(found[path][0]):
                why = f"{len(lost)} of {len(found[path][0])} plays of {path} failed: {listed(list(lost.values()))}."
                raise Unfinished(f"{why} {_advice(path, runs)}")
    return [found[path] for path in runs]


def _play_like(run: Path, like: Path, episodes: Sequence[Episode]) -> tuple[list[Episode], Path]:
    """Play the starts of `episodes`, which `like` played, with `run`."""
    from trailmark.rollout.play import play
    from trailmark.tasks import get_task

    found, recipe = locate(str(run)), read_recipe(like)
    task = recipe["task"]
    sampling = resolve(recipe.get("sampling") or {}, SamplingConfig)
    source = get_task(task["name"], **pin_options(task.get("options") or {}, like))
    found = dataclasses.replace(found, recipe={**found.recipe, "engine": recipe.get("engine") or {}})
    seat = local_seat(found, "auto", sampling, source)
    tasks = {e.task.id: e.task for e in episodes}
    times = Counter(e.task.id for e in episodes)
    print(f"{run} has no evaluation: it plays the {len(tasks)} starts of {like} now", file=sys.stderr, flush=True)
    each = [t for t in tasks.values() for _ in range(times[t.id])]
    return play(source, each, [seat], seed=episodes[0].seed, prefix="eval:"), Path(found.folder)


def _advice(run: Path, runs: Sequence[Path]) -> str:
    """The commands to type if nothing can be compared."""
    known = [t for path in runs if is_run(path) and (t := read_recipe(path).get("task"))]
    options = [
        f"{k}={v}" for k, v in ((known[0].get("options") or {}) if known else {}).items() if isinstance(v, str | int)
    ]
    task = shlex.join(["--task", known[0]["name"], *options]) if known else "--task TASK KEY=VALUE"
    lines = [
        f"  trailmark eval {shlex.quote(str(path))} {task} --split test --n 200 --seed 0 --out "
        f"{shlex.quote(str(path / 'evaluation' / 'compared.jsonl'))}"
        for path in runs
    ]
    both = shlex.join(["trailmark", "compare", *map(str, runs), "--episodes", "compared"])
    return f"{run} has no evaluation. Evaluate all of them on the same starts, then compare:\n" + "\n".join(
        [*lines, f"  {both}"]
    )
