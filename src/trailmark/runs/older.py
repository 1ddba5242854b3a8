"""Recipes of older runs, translated to today's names.

Names and keys of recipes change. `train` refuses old ones and says the new ones. Commands that open an existing run
(`report`, `inspect`, `eval`, `serve`, `verify`, `diff`, `--resume`) read its recipe through `translate`. One entry of
`CHANGES` does both. `moved` does the same for files of a run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trailmark.errors import RecipeError
from trailmark.marked_yaml import Mark, parse
from trailmark.recipe import Loaded
from trailmark.runs.store import Run
from trailmark.trust import named_by_run

Recipe = dict[str, Any]
PREFERENCES = ("rejection", "dpo", "ipo", "kto")


@dataclass(frozen=True)
class Change:
    """`was` recognises an old recipe, `becomes` translates it, and `say` is the error for a person who wrote the old
    `key`."""

    key: str
    was: Callable[[Recipe], bool]
    becomes: Callable[[Recipe], Recipe]
    say: Callable[[Recipe], str]


def without(recipe: Recipe, *keys: str) -> Recipe:
    """A copy without some keys. "a.b" is key b of section a."""
    out = dict(recipe)
    for key in keys:
        first, _, rest = key.partition(".")
        if rest and isinstance(out.get(first), dict):
            out[first] = without(out[first], rest)
        elif not rest:
            out.pop(first, None)
    return out


OF_OREO = ("level", "states", "split", "kl", "reward", "importance", "clip_log", "hinge", "target", "freeze",
           "critic_only", "critic", "final.search", "final.temperature")  # fmt: skip
OF_PREFERENCE = ("objective", "pairs", "desirable", "undesirable")


def _objective(r: Recipe) -> Any:
    """The objective of a recipe: a word, or (as in policy_gradient) the kind of a section."""
    said = r.get("objective")
    return said.get("kind") if isinstance(said, dict) else said


def _rate(section: str, to: str, name: str) -> Change:
    """A learning rate of Reflect-RL: it was a key of its section and is now a key of an optimiser. The optimiser's
    other keys were those of learner.optim."""
    *way, last = section.split(".")

    def found(r: Recipe) -> Any:
        part: Any = r if r.get("method") == "reflect" else None
        for key in (*way, last):
            part = part.get(key) if isinstance(part, dict) else None
        return part

    def becomes(r: Recipe) -> Recipe:
        optim = {**((r.get("learner") or {}).get("optim") or {}), "lr": found(r)}
        return _with(without(r, section), to.split("."), optim)

    return Change(
        section, lambda r: found(r) is not None, becomes,
        lambda r: f"{name} has an optimiser of its own: write {to}.lr={found(r)}. (steps counts play alone now: "
        f"imitation has stages of its own.)",
    )  # fmt: skip


def _with(value: Recipe, way: Sequence[str], what: Any) -> Recipe:
    rest = what if len(way) == 1 else _with(value.get(way[0]) or {}, way[1:], what)
    return {**value, way[0]: rest}


def _head(r: Recipe) -> str:
    return "listed" if r["restrict"] else "vocabulary"


CHANGES: list[Change] = [
    _rate("sft.lr", "sft.optim", "imitation"),
    _rate("rl.critic.lr", "rl.critic.optim", "the critic"),
    _rate("rl.lr", "learner.optim", "play"),
    Change(
        "restrict",
        lambda r: r.get("method") == "reflect" and "restrict" in r,
        lambda r: {**without(r, "restrict"), "head": _head(r)},
        lambda r: f"restrict is now called head: write 'head: {_head(r)}'.",
    ),
    Change(
        "method",
        lambda r: r.get("method") == "online",
        lambda r: {**r, "method": "policy_gradient"},
        lambda r: "method online is now called policy_gradient: write 'method: policy_gradient'.",
    ),
    Change(
        "objective",
        lambda r: r.get("method") == "oreo" and _objective(r) in PREFERENCES,
        lambda r: {**without(r, *OF_OREO), "method": "preference", "objective": _objective(r)},
        lambda r: (
            f"{_objective(r)} is now an objective of method preference: write 'method: preference' and "
            f"'objective: {_objective(r)}', "
            "and leave out what is OREO's own (level, kl, critic and the like)."
        ),
    ),
    Change(
        "objective",
        lambda r: r.get("method") == "oreo" and _objective(r) == "oreo",
        lambda r: without(r, *OF_PREFERENCE),
        lambda r: "method oreo has one objective, so leave this key out.",
    ),
]
NOT_WRITTEN = (
    "advantage",
    "value",
)  # annotations that older runs did not write; `diff` ignores them if one run has none
MOVED: list[tuple[str, str]] = []  # (pattern, new name) of files that are in another place today


def translate(recipe: Mapping[str, Any]) -> Recipe:
    """The recipe of a run in today's names. A new recipe stays as it is."""
    out = dict(recipe)
    for change in CHANGES:
        if change.was(out):
            out = change.becomes(out)
    return out


def refuse(loaded: Loaded) -> None:
    """Raise an error that names the old key, its line, and the new key."""
    for change in CHANGES:
        if change.was(loaded.raw):
            where = loaded.marks.get(tuple(change.key.split(".")), Mark(loaded.file)).where
            raise RecipeError(f"{where}: key '{change.key}': {change.say(loaded.raw)}")


def moved(name: str) -> str:
    """The path of an older run's file in a run of today. Both paths are relative to the run."""
    for pattern, new in MOVED:
        name = re.sub(pattern, new, name)
    return name


def read_recipe(run: Run | str | Path) -> Recipe:
    """The recipe of a run as plain values, in today's names."""
    run = run if isinstance(run, Run) else Run(run)
    found = parse(run.recipe, str(run.recipe_file))[0]
    if not isinstance(found, dict):
        raise RecipeError(f"{run.recipe_file}: a recipe is a mapping of keys to values.")
    named_by_run(found)
    return translate(found)
