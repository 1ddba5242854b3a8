"""Start or resume a run in its directory. `trailmark train`, training stages and the arms of a study all use this."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trailmark.config import CheckpointConfig, RunConfig, dump, resolve
from trailmark.errors import RecipeError, RunError, TrailmarkError
from trailmark.memory import need_starts
from trailmark.runs.data_files import named_files, no_pipes, note_files
from trailmark.runs.diff import IGNORED, compared, diff_recipes
from trailmark.runs.stages import BEFORE, MADE, Stage
from trailmark.runs.store import Run, atomic_write, read_metrics


def launch(method: Any, config: RunConfig, resume: bool = False) -> Any:
    """Returns what the method's `train` returns. With `resume`, a run that died before its first metrics line starts
    again."""
    no_pipes(config)
    for section in ("eval", "final"):  # drawn only after steps of training
        need_starts(getattr(getattr(config, section, None), "n", None) or 0, f"{section}.n")
    text = dump(config)
    resume = resume and Run(config.out).recipe_file.is_file()
    with continue_run(config, text, method) if resume else Run.create(config.out, text) as run:
        try:
            if not resume:
                atomic_write(run.path / "versions.json", (json.dumps(versions(), indent=1) + "\n").encode())
                note_files(run, config, method.staged)
            return method.train(config, run, resume)
        except TrailmarkError as problem:  # one before the first step leaves no run behind
            run.discard_if_empty(answered=problem.code == 1)
            raise


def training_stage(
    name: str,
    method: Any,
    config: RunConfig,
    root: str | Path,
    inputs: Mapping[str, str | Path] | None = None,
    reread: bool = False,
    **more: Any,
) -> Stage:
    """A stage that is an ordinary run. `root` is the folder of the pipeline. Paths below it are no part of the
    settings, so the folder may be moved; files there that the stage reads belong to `inputs`. The stage is also made
    again if a data file that the recipe names has changed. `reread`: others read settings that are not compared in the
    run's recipe, so a change of these is written there."""

    def make(folder: Path) -> dict[str, Any]:
        launch(method, config.model_copy(update={"out": str(folder)}), resume=True)
        rows = read_metrics(folder)
        return rows[-1] if rows else {}

    def refresh(folder: Path) -> None:
        if not (folder / MADE).exists():
            atomic_write(folder / MADE, (folder / "recipe.yaml").read_bytes(), "recipe")
        text = dump(config.model_copy(update={"out": str(folder)}))
        atomic_write(folder / "recipe.yaml", text.encode(), "recipe")

    # Without defaults, so that a new key of a later version is no change, and without how often the clock makes a
    # checkpoint, beside which every other key of its section would be written.
    timeless = config.checkpoint.model_copy(update={"minutes": CheckpointConfig().minutes})
    plain = config.model_copy(update={"checkpoint": timeless})
    settings = compared(plain.model_dump(mode="json", exclude_defaults=True))
    known = {os.path.realpath(p) for p in (inputs or {}).values()}
    files = {key: path for key, path in named_files(config).items() if os.path.realpath(path) not in known}
    more |= {"strict": True, "refresh": refresh if reread else None}
    return Stage(name, make, without_place(settings, str(root)), inputs or {}, files=files, **more)


def without_place(value: Any, root: str) -> Any:
    """JSON values with paths below `root` written relative to it."""
    if isinstance(value, dict):
        return {k: without_place(v, root) for k, v in value.items()}
    if isinstance(value, list):
        return [without_place(v, root) for v in value]
    if isinstance(value, str) and (value == root or value.startswith(f"{root}/")):
        return "{root}" + value[len(root) :]
    return value


def versions() -> dict[str, str]:
    """The versions of Python and of the libraries that a run was made with."""
    names = ("trailmark", "torch", "transformers", "tokenizers", "peft", "numpy", "safetensors")
    found = {n: v for n in names if (v := _version(n))}
    return {**found, "python": platform.python_version()}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def continue_run(config: RunConfig, text: str, method: Any) -> Run:
    """The run in `config.out`, locked. Its recipe must be the one that it started with. Only `steps` may change,
    and keys that only stages read (`method.staged`): the stages check these."""

    def whole(recipe: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return resolve(recipe, type(config)).model_dump(mode="json")
        except RecipeError:  # another method, or other keys: compare the recipe as it is
            return dict(recipe)

    out = config.out
    run = Run.open(out, lock=True)
    try:
        free = method.staged if any((run.path / "stages").rglob("*.json")) else ()
        files = str(run.recipe_file), "recipe.yaml"
        if changed := diff_recipes(run.recipe, text, (*IGNORED, "steps", *free), whole, files):
            raise RunError(f"{out} belongs to another recipe ({changed[0]}): choose another directory with out=DIR.")
        note_files(run, config, method.staged)
    except TrailmarkError:
        run.close()
        raise
    if run.recipe != text:
        before = run.path / "stages" / BEFORE  # the recipe for the old results, if a stage is made again
        if free and not before.exists() and diff_recipes(run.recipe, text, (*IGNORED, "steps"), whole):
            atomic_write(before, run.recipe_file.read_bytes())
        atomic_write(run.recipe_file, text.encode(), "recipe")
    return run
