"""What a quickstart of a method returns, and helpers to write one.

A quickstart is a function of `(out, seed, resume, say)` (`PROVIDES["quickstarts"]`): it trains under `out`, tells a
person with `say` what it does, and returns what `trailmark quickstart` shows at the end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trailmark.methods import get_method, resolve_recipe
from trailmark.recipe import load_recipe
from trailmark.runs.launch import launch


@dataclass(frozen=True)
class Results:
    """Each row of the table is a file of episodes. `run` gets a page, `main` is the row whose command is printed,
    `read_next` names the pages that say more, and `note` says what the table shows and what it does not."""

    files: Mapping[str, Path]
    run: Path
    title: str
    main: str
    metrics: Sequence[str] = ("success", "reward")
    read_next: str = ""
    note: str = ""


def trained(out: Path, seed: int, resume: bool, name: str, folder: str, *words: str) -> Path:
    """A run of a packaged recipe in a folder of the quickstart."""
    where = out / folder
    given = [*words, *further(folder), f"seed={seed}", f"model.seed={seed}", file("out", where), f"name={folder}"]
    config = resolve_recipe(load_recipe(packaged(name), given))
    launch(get_method(config.method), config, resume and where.exists())
    return where


def packaged_recipe(name: str, out: Path, seed: int) -> dict[str, Any]:
    """The keys of a packaged recipe, for a run in the folder `out`."""
    raw = load_recipe(packaged(name)).raw
    return {**raw, "out": str(out), "name": out.name, "seed": seed, "model": {**raw["model"], "seed": seed}}


def packaged(name: str) -> Path:
    """The file of a recipe that comes with the library."""
    return Path(__file__).parent.parent / "recipes" / f"{name}.yaml"


def file(key: str, path: Path) -> str:
    return f"{key}={json.dumps(str(path))}"


def further(folder: str) -> list[str]:
    """Further keys of a run's recipe. A test makes the runs shorter here."""
    return []
