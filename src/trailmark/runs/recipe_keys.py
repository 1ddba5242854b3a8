"""Which keys of a recipe may differ between equal runs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

IGNORED = ("out", "name", "trackers", "failures")  # keys of a recipe that may differ between equal runs


def compared(recipe: Any, ignored: Collection[str] = IGNORED) -> Any:
    """A recipe without the keys that may differ between equal runs. How often the clock makes a checkpoint is one of
    them, in every section `checkpoint`."""

    def timeless(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if isinstance(c := value.get("checkpoint"), dict):
            value = {**value, "checkpoint": {k: v for k, v in c.items() if k != "minutes"}}
        return {k: timeless(v) for k, v in value.items() if not (k == "checkpoint" and v == {})}

    return timeless({k: v for k, v in recipe.items() if k not in ignored}) if isinstance(recipe, dict) else recipe
