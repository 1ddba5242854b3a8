"""What there is by name: methods, worlds, formats, rewards, engines, commands, quickstarts.

A package of ours says what it brings in its file `provides.py`, as texts that are imported when they are needed:

    PROVIDES = {"methods": {"sft": "trailmark.methods.sft:SftMethod"}, "recipes": {"sft": "…configs:SftRecipe"}}

Packages of other people say it as entry points (`trailmark.methods`, `trailmark.tasks`, `trailmark.rewards`,
`trailmark.formats`, `trailmark.commands`). So nothing outside of a paper's folder knows the paper.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal

from trailmark.errors import RecipeError

Kind = Literal[
    "methods", "recipes", "tasks", "formats", "rewards", "players", "warnings", "end_warnings",
    "commands", "data", "quickstarts", "markers", "answers", "metrics", "study_data",
    "leaderboards", "varied", "advice", "engines",
]  # fmt: skip
ROOT = Path(__file__).parent


@functools.cache
def _declared() -> list[tuple[str, Mapping[str, Mapping[str, Any]]]]:
    """The declarations of our packages: those of a package before those of the packages in it. They are read without
    importing the packages."""
    found = []
    for file in sorted(ROOT.glob("**/provides.py"), key=lambda file: (len(file.parts), file)):
        spec = importlib.util.spec_from_file_location(f"_provides_{file.parent.name}", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found.append((".".join(("trailmark", *file.parent.relative_to(ROOT).parts)), module.PROVIDES))
    return found


@functools.cache
def ours(kind: Kind) -> Mapping[str, Any]:
    """What the library itself brings, by name: "module:attribute", and for formats their settings."""
    found: dict[str, Any] = {}
    for package, brings in _declared():
        if twice := found.keys() & brings.get(kind, {}).keys():
            raise RecipeError(f"{package} brings '{min(twice)}' ({kind}), which another package of ours brings too.")
        found |= brings.get(kind, {})
    return found


@functools.cache
def installed(kind: Kind) -> Mapping[str, EntryPoint]:
    """What packages of other people bring. Two that bring one name are refused, for one of them would be hidden."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=f"trailmark.{kind}"):
        other = "Trailmark itself" if point.name in ours(kind) else point.name in found and _package(found[point.name])
        if other:
            raise RecipeError(
                f"the package {_package(point)} brings '{point.name}' as one of trailmark.{kind}, and so does {other}: "
                "remove one of them, or rename it."
            )
        found[point.name] = point
    return found


def names(kind: Kind) -> list[str]:
    return [*ours(kind), *installed(kind)]


def place(kind: Kind, name: str) -> str | None:
    """Where `name` is: "module:attribute". None: nobody brings it."""
    return ours(kind).get(name) or (installed(kind)[name].value if name in installed(kind) else None)


def load(kind: Kind, name: str) -> Any:
    """What is behind a name that somebody brings. An error of somebody else's package names it."""
    if name in ours(kind):
        return resolve(ours(kind)[name])
    point = installed(kind)[name]
    try:
        return point.load()
    except Exception as problem:  # somebody else's package may raise anything while it is imported
        raise RecipeError(
            f"'{name}' of the package {_package(point)} cannot be imported from {point.value} "
            f"({type(problem).__name__}: {problem}): mend or remove that package."
        ) from problem


def resolve(where: str) -> Any:
    """The object at "module:attribute"."""
    module, _, attribute = where.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value
