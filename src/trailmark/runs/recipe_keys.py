"""Two recipes compared key by key, and which keys may differ between equal runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from trailmark.errors import shorten
from trailmark.marked_yaml import plain

_ABSENT = object()
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


def diff_recipes(
    a: str, b: str, ignored: Collection[str] = IGNORED, words: Callable[[Mapping[str, Any]], Any] = dict,
    files: tuple[str, str] = ("recipe.yaml", "recipe.yaml"),
) -> list[str]:  # fmt: skip
    """A sentence for each key that differs between two resolved recipes, after `words` filled in what they leave out.
    Errors name the recipes by `files`."""
    x, y = (plain(text, file) for text, file in zip((a, b), files))
    keep = lambda recipe: compared(words(recipe), ignored) if isinstance(recipe, dict) else recipe
    return list(changes(keep(x), keep(y)))


def _short(value: Any) -> str:
    return "nothing" if value is _ABSENT else shorten(json.dumps(value, ensure_ascii=False))


def changes(a: Any, b: Any, path: str = "") -> Iterator[str]:
    """`key 'x.y': 1 and 2` for every place where two JSON values differ, in order."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys([*a, *b]):
            yield from changes(a.get(key, _ABSENT), b.get(key, _ABSENT), f"{path}.{key}" if path else key)
    elif isinstance(a, list) and isinstance(b, list):
        for i, (x, y) in enumerate(zip(a, b, strict=False)):
            yield from changes(x, y, f"{path}.{i}")
        if len(a) != len(b):
            yield f"key '{path}': {len(a)} and {len(b)} entries"
    elif type(a) is not type(b) or repr(a) != repr(b):  # 1 is not 1.0, and 0.0 is not -0.0
        yield f"key '{path}': {_short(a)} and {_short(b)}"
