"""Staged methods: a list of stages, each with what it reads.

    recipe_stage("states-1", make, config, root, keys=["states", "seed"], after=["cleaned-1"])
    training_stage("prm-1", recipe, root)

The first is a function that fills a folder. It reads some keys of the recipe and the folders of earlier stages. The
second is a run of its own. What it reads is in its recipe: models and files of the pipeline, and others. The settings,
files and inputs of a stage (`runs/stages.py`), which decide whether it is made again, follow from these lists.

A stage called NAME-K belongs to round K. When the last stage of a round is done, the summaries of its stages become
line K of the run's metrics. `Pipeline` is the base class of methods that have nothing but stages.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trailmark.config import CheckpointConfig, RunConfig, dump
from trailmark.errors import RecipeError, nearest
from trailmark.methods import get_method
from trailmark.methods.base import Method
from trailmark.runs.atomic_files import atomic_write
from trailmark.runs.checkpoints import is_run
from trailmark.runs.data_files import named_files
from trailmark.runs.fingerprints import MADE
from trailmark.runs.launch import launch
from trailmark.runs.recipe_keys import compared
from trailmark.runs.stages import Stage, Summary, run_stages, without_keys
from trailmark.runs.store import Run, read_metrics, truncate_metrics
from trailmark.seats.pinned_models import named_models, pin_models


def recipe_stage(
    name: str, make: Callable[[Path], Summary | None], config: RunConfig, root: str | Path, keys: Sequence[str] = (),
    after: Sequence[str] = (), inputs: Mapping[str, str | Path] | None = None, **more: Any,
) -> Stage:  # fmt: skip
    """A stage that reads `keys` of the recipe ("-a.b" leaves a key out again), the stages `after` which it is made, and
    `inputs`, which are files from elsewhere. It also reads the files that these keys name, and the models that sections
    name (a model that is listed as a key is no more than a name)."""
    settings = without_place(_values(config, keys), str(root))
    files = {k: p for k, p in named_files(config).items() if _among(k, keys)}
    found = {k: p for k, p in _models(config).items() if k not in keys and _among(k, keys)}
    return Stage(
        name, make, settings, {**{n: Path(root) / n for n in after}, **found, **(inputs or {})}, files, **more
    )


def training_stage(
    name: str, config: RunConfig, root: str | Path, unread: Sequence[str] = (),
    inputs: Mapping[str, str | Path] | None = None, method: type[Method] | None = None, **more: Any,
) -> Stage:  # fmt: skip
    """A stage that is an ordinary run, of the method that its recipe names (or of `method`). `root` is the folder of
    the pipeline. What the recipe names below it is an
    input, and its place is no part of the settings, so the folder may be moved. Keys that do not change what is trained
    (`method.unread`, and `unread`) do not make it again. `inputs` are files that it reads and does not name."""

    cls = method or get_method(config.method)

    def make(folder: Path) -> dict[str, Any]:
        launch(cls, config.model_copy(update={"out": str(folder)}), resume=True)
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
    settings = without_place(compared(plain.model_dump(mode="json", exclude_defaults=True)), str(root))
    unread = (*cls.unread(config), *unread)
    found: dict[str, str | Path] = {p: Path(root) / p for p in _places(without_keys(settings, unread))}
    found |= {k: p for k, p in _models(config).items() if not _inside(p, root) and not _among(k, unread)}
    known = {os.path.realpath(p) for p in found.values()}
    files = {
        k: p for k, p in named_files(config).items() if os.path.realpath(p) not in known and not _among(k, unread)
    }
    more |= {"unread": unread, "refresh": refresh if cls.reread else None}
    return Stage(name, make, settings, {**found, **(inputs or {})}, files, **more)


class Pipeline(Method):
    """A method that has nothing but stages. Each of its trainings is a run of its own."""

    @classmethod
    def ready(cls, config: Any) -> None:
        """Raise an error if a recipe cannot be run. Default: it can."""

    @classmethod
    def train(cls, config: Any, run: Run, resume: bool = False) -> dict[str, float]:
        """Make all stages that are not done. Returns the metrics of the last round."""
        config = pin_models(config, run)
        cls.ready(config)
        stages, rounds = cls.stages(config, run), Rounds(run)
        last = {round_of(s.name)[1]: s.name for s in stages}

        def each(stage: Stage, summary: Summary) -> None:
            kind, k = round_of(stage.name)
            ends = cls.only is None and k > 0 and last[k] == stage.name
            rounds.add(max(k, 1), (stage.metrics or _prefixed(f"{kind}/"))(summary), ends)

        run_stages(run.path, stages, only=cls.only, redo=cls.redo, each=each, alone=True)
        return rounds.metrics.get(config.steps, {})


class Rounds:
    """The metrics of rounds: line k of metrics.jsonl has those of round k."""

    def __init__(self, run: Run):
        self.run, self.metrics = run, dict[int, dict[str, Any]]()
        self.logged = {row["step"]: row for row in read_metrics(run.path)}

    def add(self, k: int, metrics: Mapping[str, Any], ends: bool) -> None:
        """Add the metrics of a stage to those of round k. `ends`: this is its last stage."""
        now = self.metrics.setdefault(k, {})
        now |= metrics
        if ends and self.logged.get(k) != {"step": k, **now}:  # not logged yet, or a stage was made again
            truncate_metrics(self.run, k - 1)
            self.logged = {step: row for step, row in self.logged.items() if step < k}
            self.run.log(k, now)
            self.run.sync()


def round_of(name: str) -> tuple[str, int]:
    """The kind of a stage and its round: ("states", 1) of states-1; 0 before the first round."""
    kind, _, number = name.rpartition("-")
    return (kind, int(number)) if kind and number.isdigit() else (name, 0)


def numbers(summary: Summary) -> dict[str, Any]:
    """The numbers of a summary, without the step of a training."""
    return {n: v for n, v in summary.items() if isinstance(v, int | float) and not isinstance(v, bool) and n != "step"}


def _prefixed(prefix: str) -> Callable[[Summary], dict[str, Any]]:
    return lambda summary: {f"{prefix}{n}": v for n, v in numbers(summary).items()}


def some(method: type[Method], only: Sequence[str], redo: Sequence[str] = ()) -> type[Method]:
    """The method that makes only these stages. Those before them must be done."""
    return type(method.__name__, (method,), {"only": tuple(only), "redo": tuple(redo)})


def stage_named(method: type[Method], config: RunConfig, name: str, number: int) -> str:
    """The stage that somebody means: its whole name, or its kind in a round."""
    names = [s.name for s in method.stages(config, Run(config.out))]
    if (found := next((n for n in (name, f"{name}-{number}") if n in names), None)) is not None:
        return found
    near = [n for n in names if round_of(n)[1] in (0, number)] or names
    raise RecipeError(f"there is no stage '{name}' of round {number} in this recipe.{nearest(name, near)}")


# --- what a stage reads ----------------------------------------------------------------------------------------------


def _values(config: RunConfig, keys: Sequence[str]) -> dict[str, Any]:
    """The values of keys, without those that are defaults: a new key of a later version is no change."""
    whole = json.loads(json.dumps(config.model_dump(mode="json", exclude_defaults=True)))
    found: dict[str, Any] = {}
    for key in keys:
        *way, last = key.removeprefix("-").split(".")
        assert (way or [last])[0] in type(config).model_fields, f"the recipe has no key {key}"
        at, into = whole, found
        for part in way:
            at = at.get(part) or {}
            into = into.get(part, {}) if key[0] == "-" else into.setdefault(part, {})
        if key[0] == "-":
            into.pop(last, None)
        elif last in at:
            into[last] = at[last]
    return found


def _among(key: str, keys: Sequence[str]) -> bool:
    """Whether a key is one of `keys`, or below one."""
    within = lambda some: any(key == k or key.startswith(f"{k}.") for k in some)
    key = "task.options.path" if key == "data" else key  # as `named_files` calls it in a recipe of prompts
    return within(k for k in keys if k[0] != "-") and not within(k[1:] for k in keys if k[0] == "-")


def _models(config: RunConfig) -> dict[str, str]:
    """The folders of models that a recipe names. A run is none: what it means was fixed when the pipeline began."""
    return {k: name for k, name in named_models(config).items() if Path(name).is_dir() and not is_run(Path(name))}


def _inside(path: str | Path, root: str | Path) -> bool:
    return Path(path).is_relative_to(root)


def _places(value: Any) -> Iterator[str]:
    """The paths below the pipeline's folder that settings name."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _places(inner)
    elif isinstance(value, str) and value.startswith("{root}/"):
        yield value.removeprefix("{root}/")


def without_place(value: Any, root: str) -> Any:
    """JSON values with paths below `root` written relative to it."""
    if isinstance(value, dict):
        return {k: without_place(v, root) for k, v in value.items()}
    if isinstance(value, list):
        return [without_place(v, root) for v in value]
    if isinstance(value, str) and (value == root or value.startswith(f"{root}/")):
        return "{root}" + value[len(root) :]
    return value
