"""Start a run in its directory, or go on with it: what `trailmark train`, every training stage and every arm of a
study do."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trailmark.config import RunConfig, dump, resolve
from trailmark.errors import RecipeError, RunError, TrailmarkError
from trailmark.runs.data_files import named_files, note_files
from trailmark.runs.diff import IGNORED, diff_recipes
from trailmark.runs.older import translate
from trailmark.runs.stages import BEFORE, Stage
from trailmark.runs.store import Run, atomic_write, read_metrics


def launch(method: Any, config: RunConfig, resume: bool = False) -> Any:
    """What the method's `train` returns. With `resume`, a run that died before its first line starts anew."""
    text = dump(config)
    resume = resume and Run(config.out).recipe_file.is_file()
    with continue_run(config, text, method) if resume else Run.create(config.out, text) as run:
        try:
            if not resume:
                atomic_write(run.path / "versions.json", (json.dumps(versions(), indent=1) + "\n").encode())
                note_files(run, config, method.staged)
            return method.train(config, run, resume)
        except TrailmarkError:
            run.discard_if_empty()  # a mistake found before the first step leaves no run behind
            raise


def training_stage(
    name: str,
    method: Any,
    config: RunConfig,
    root: str | Path,
    inputs: Mapping[str, str | Path] | None = None,
    **more: Any,
) -> Stage:
    """A stage that is an ordinary run. `root` is the folder of the pipeline: paths below it are no part of the
    settings, so it may be moved. What lies there and is read belongs to `inputs`. Files of data that the recipe names
    are noted as well: where one has changed, the stage is made again."""

    def make(folder: Path) -> dict[str, Any]:
        launch(method, config.model_copy(update={"out": str(folder)}), resume=True)
        rows = read_metrics(folder)
        return rows[-1] if rows else {}

    # Without defaults: a key that a later version adds is no change.
    settings = {k: v for k, v in config.model_dump(mode="json", exclude_defaults=True).items() if k not in IGNORED}
    known = {os.path.realpath(p) for p in (inputs or {}).values()}
    files = {key: path for key, path in named_files(config).items() if os.path.realpath(path) not in known}
    return Stage(name, make, without_place(settings, str(root)), inputs or {}, files=files, **more)


def without_place(value: Any, root: str) -> Any:
    """JSON values in which paths below `root` do not say where it lies."""
    if isinstance(value, dict):
        return {k: without_place(v, root) for k, v in value.items()}
    if isinstance(value, list):
        return [without_place(v, root) for v in value]
    if isinstance(value, str) and (value == root or value.startswith(f"{root}/")):
        return "{root}" + value[len(root) :]
    return value


def versions() -> dict[str, str]:
    """What a run is made with."""
    names = ("trailmark", "torch", "transformers", "tokenizers", "peft", "numpy", "safetensors")
    found = {n: v for n in names if (v := _version(n))}
    return {**found, "python": platform.python_version()}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def continue_run(config: RunConfig, text: str, method: Any) -> Run:
    """The run in `config.out`, locked, if the recipe is still the one it was started with, in whichever words. Its
    `steps` may be changed, and keys that only its stages read (`method.staged`): the stages see to that."""

    def whole(recipe: Mapping[str, Any]) -> dict[str, Any]:
        today = translate(recipe)
        try:
            return resolve(today, type(config)).model_dump(mode="json")
        except RecipeError:  # of another method, or of a version that had other keys: it is compared as it stands
            return today

    out = config.out
    run = Run.open(out, lock=True)
    try:
        # An older version kept no records of stages.
        free = method.staged if any((run.path / "stages").rglob("*.json")) else ()
        if changed := diff_recipes(run.recipe, text, (*IGNORED, "steps", *free), whole):
            raise RunError(f"{out} belongs to another recipe ({changed[0]}): choose another directory with out=DIR.")
        method.can_go_on(config, run)
        note_files(run, config, method.staged)
    except TrailmarkError:
        run.close()
        raise
    if run.recipe != text:
        before = run.path / "stages" / BEFORE  # for what is set aside if a stage is made again
        if free and not before.exists() and diff_recipes(run.recipe, text, (*IGNORED, "steps"), whole):
            atomic_write(before, run.recipe_file.read_bytes())
        atomic_write(run.recipe_file, text.encode(), "recipe")
    return run
