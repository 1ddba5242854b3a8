"""The models that a recipe names, pinned to what each name meant when the run began.

A recipe may say `model.name: runs/first`, and that run may train further while this one runs. So the names are looked
up once, before anything is loaded, and RUN/models.json stores what they meant:

    {"model.name": {"name": "runs/first", "folder": "runs/first/checkpoints/000200/policy"}}

The stored recipe keeps the original names. Resuming and checking a run read this file. A run that names only folders
and models on the hub has none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from trailmark.config import Config, NamesModel
from trailmark.errors import ModelError
from trailmark.runs.atomic_files import atomic_write
from trailmark.runs.named_models import MODELS, read_models
from trailmark.runs.store import Run
from trailmark.seats.model_names import locate

C = TypeVar("C", bound=Config)
Models = dict[str, dict[str, str]]
Pin = Callable[[str, str, NamesModel], str]


def pin_models(config: C, run: Run | None = None, write: bool = True) -> C:
    """The config with a folder in place of every run and checkpoint that it names. With a `run`, earlier meanings are
    kept, and new ones are stored."""
    earlier = read_models(run.path) if run else {}
    found = dict(earlier)
    pinned = _walk(config, "", lambda key, name, mark: _folder(key, name, mark, earlier, found))
    if run is not None and write and found != earlier:
        atomic_write(run.path / MODELS, (json.dumps(found, indent=1) + "\n").encode(), "models")
    return pinned


def pin_part(part: Mapping[str, Any], key: str, run: Path | None) -> dict[str, Any]:
    """The same for a part of the recipe of an existing run, such as its seats. `key` is where it stands."""
    earlier = read_models(run) if run else {}
    return _walk(part, key, lambda key, name, mark: _folder(key, name, mark, earlier, {}))


def named_models(config: Config) -> dict[str, str]:
    """The models that a recipe names, by key."""
    found: dict[str, str] = {}

    def noted(key: str, name: str, mark: NamesModel) -> str:
        found[key] = name
        return name

    _walk(config, "", noted)
    return found


def _folder(key: str, name: str, mark: NamesModel, earlier: Models, found: Models) -> str:
    """What `name` at `key` means: its earlier meaning (in `earlier`), or its meaning now (added to `found`)."""
    if (before := earlier.get(key)) and before["name"] == name:
        if not Path(before["folder"]).is_dir():
            raise ModelError(
                f"{key}: this run began from {before['folder']} (its {MODELS} says so), which is gone: put it back, or "
                "start a new run with out=DIR."
            )
        return before["folder"]
    if mark.stored and not Path(name).is_dir():
        raise ModelError(f"{key}: there is no folder '{name}'")
    at = locate(name, mark.seat, key)
    if at.kind == "server":
        raise ModelError(
            f"{key}: {name} is a server, and this model must be here: name a run, a folder or a model on the hub."
        )
    if at.kind in ("run", "checkpoint"):
        found[key] = {"name": name, "folder": at.folder}
    return at.folder


def _walk(value: Any, key: str, pin: Pin) -> Any:
    """`value` with `pin` applied to every text whose field is marked with NamesModel."""
    if isinstance(value, Mapping):
        return {k: _walk(v, f"{key}.{k}", pin) for k, v in value.items()}
    if not isinstance(value, Config):
        return value
    changed = {}
    for name, field in type(value).model_fields.items():
        old, here = getattr(value, name), f"{key}.{name}" if key else name
        mark = next((m for m in field.metadata if isinstance(m, NamesModel)), None)
        new = pin(here, old, mark) if mark and isinstance(old, str) else _walk(old, here, pin)
        if new is not old and new != old:
            changed[name] = new
    return value.model_copy(update=changed) if changed else value
