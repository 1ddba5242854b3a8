"""Start or resume a run in its directory. `trailmark train`, training stages and the arms of a study all use this."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

from trailmark.config import RunConfig, dump, resolve
from trailmark.errors import RecipeError, RunError, TrailmarkError
from trailmark.memory import need_starts
from trailmark.plain_files import read_json
from trailmark.runs.atomic_files import atomic_write
from trailmark.runs.data_files import no_pipes, note_files
from trailmark.runs.recipe_keys import IGNORED, diff_recipes
from trailmark.runs.stages import BEFORE
from trailmark.runs.store import Run


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
                made_with = {**versions(), "products": _products()}
                atomic_write(run.path / "versions.json", (json.dumps(made_with, indent=1) + "\n").encode())
                note_files(run, config, method.staged)
            else:
                _compare_products(run)
            return method.train(config, run, resume)
        except TrailmarkError as problem:  # one before the first step leaves no run behind
            run.discard_if_empty(answered=problem.code == 1)
            raise


def versions() -> dict[str, str]:
    """The versions of Python and of the libraries that a run was made with."""
    names = ("trailmark", "torch", "transformers", "tokenizers", "peft", "numpy", "safetensors")
    found = {n: v for n in names if (v := _version(n))}
    return {**found, "python": platform.python_version()}


def _products() -> str:
    """What computes products in float32 on this CPU: numbers of another way differ in the last digits."""
    from trailmark.models.products import path

    return path()


def _compare_products(run: Run) -> None:
    """One line if a run goes on with other products than it began with."""
    try:
        before = read_json(run.path / "versions.json")["products"]
    except (OSError, ValueError, KeyError, TypeError):  # an older run, or the file was removed
        return
    if before != (now := _products()):
        print(
            f"{run.path}: float32 products on the CPU were computed by '{str(before)[:60]}' and are now by '{now}': "
            "numbers differ in the last digits from a run that was not moved",
            file=sys.stderr,
        )


@cache
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
