"""Compare two runs: recipes by key, metrics and episodes by line, checkpoints by tensor. All comparisons are exact."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from trailmark.errors import DataError
from trailmark.plain_files import open_plain, read_plain
from trailmark.runs.recipe_keys import changes, diff_recipes
from trailmark.runs.store import Run


@dataclass(frozen=True)
class Difference:
    """The first difference in one file of the two runs (in a recipe: every key that differs)."""

    file: str
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


def _only(second: bool) -> str:
    return f"only in the {'second' if second else 'first'} run"


def _lines(a: Path, b: Path) -> str:
    """The first difference of two JSON lines files: the line, its episode or step, and the key."""
    for i, (x, y) in enumerate(zip_longest(read_plain(a).split(b"\n"), read_plain(b).split(b"\n")), 1):
        if x != y:
            if not x or not y:
                return f"line {i}: {_only(not x)}"
            u, v = json.loads(x), json.loads(y)
            about = next((f" ({k} {u[k]})" for k in ("id", "episode", "step") if k in u), "")
            return f"line {i}{about}: {next(changes(u, v), 'equal values in other words')}"
    return "the bytes differ"


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The tensors of a safetensors file (8 bytes of length, then JSON, then data) and where the data starts."""
    with open_plain(path) as f:
        size = int.from_bytes(f.read(8), "little")
        if size > path.stat().st_size:
            raise ValueError("its header is cut off")
        header = json.loads(f.read(size))
    return {
        k: header[k] for k in sorted(header.keys() - {"__metadata__"}, key=lambda k: header[k]["data_offsets"])
    }, 8 + size


def _tensors(a: Path, b: Path) -> str:
    """The first tensor that differs, in the order of the first file. Bytes are compared, because numpy has no
    bfloat16."""
    (heads, start), (others, other_start) = _header(a), _header(b)
    with a.open("rb") as f, b.open("rb") as g:
        for name in dict.fromkeys([*heads, *others]):
            if name not in heads or name not in others:
                return f"tensor '{name}': {_only(name not in heads)}"
            x, y = heads[name], others[name]
            if (x["dtype"], x["shape"]) != (y["dtype"], y["shape"]):
                return f"tensor '{name}': {x['dtype']} {x['shape']} and {y['dtype']} {y['shape']}"
            f.seek(start + x["data_offsets"][0])
            g.seek(other_start + y["data_offsets"][0])
            size = x["data_offsets"][1] - x["data_offsets"][0]
            p, q = f.read(size), g.read(size)
            if p != q:
                byte = next((i for i, (c, d) in enumerate(zip(p, q)) if c != d), min(len(p), len(q)))
                return f"tensor '{name}': element {byte * math.prod(x['shape']) // size} of {x['shape']} differs"
    return "the tensors are equal, the header differs"


def _same(a: Path, b: Path) -> bool:
    if a.stat().st_size != b.stat().st_size:
        return False
    with open_plain(a) as f, open_plain(b) as g:
        while chunk := f.read(1 << 20):
            if chunk != g.read(1 << 20):
                return False
    return True


def _json(path: Path, root: Path) -> Any:
    """The values of a JSON file. The path of its own run is left out (an adapter stores where its base is)."""
    own = json.dumps(str(root.resolve()))[1:-1]
    return json.loads(str(read_plain(path), "utf-8").replace(own, "RUN"))


def _file(a: Path, b: Path, one: Path, two: Path) -> str | None:
    """The first difference of two files, described by the kind of file."""
    try:
        if _same(a, b):
            return None
        if a.suffix == ".jsonl":
            return _lines(a, b)
        if a.suffix == ".safetensors":
            return _tensors(a, b)
        if a.suffix == ".json":
            x, y = _json(a, one), _json(b, two)
            return None if x == y else next(changes(x, y), "equal values in other words")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise DataError(f"cannot be compared with {b}: one of them is damaged ({e}).", a) from None
    return f"the bytes differ ({a.stat().st_size} and {b.stat().st_size} of them)"


def few(found: Sequence[Difference], most: int = 3) -> list[str]:
    """The differences for people. If many files of a folder differ in the same way (a longer run has more of
    everything), only the first `most` are listed, with the number of the others."""
    kinds: dict[tuple[str, str], list[Difference]] = {}
    for d in found:
        top = d.file.split("/")[0]
        # Checkpoints differ in different tensors, so their sentences differ; they are one kind as well.
        kind = d.what if d.what.startswith("only in") else "key" if top == "recipe.yaml" else "content"
        kinds.setdefault((top, kind), []).append(d)
    lines, left = [], 0
    for (top, kind), these in kinds.items():
        listed = len(these) if top == "recipe.yaml" or len(these) <= most + 1 else most
        lines += map(str, these[:listed])
        if more := len(these) - listed:
            left += more
            how = "differ" if kind == "content" else f"are {kind}"
            lines.append(f"{top}: {more} more files {how} ({these[listed].file} to {these[-1].file})")
    if left:
        lines.append(f"{len(found)} differences in all; --all prints every one")
    return lines


def diff_runs(
    a: str | Path, b: str | Path, words: Callable[[Mapping[str, Any]], Any] = dict
) -> list[Difference]:
    """Compare two run directories. An empty list means that they are identical. Clock times are not compared. Recipes
    are compared as `words` completes them."""
    one, two = Run.open(a).path, Run.open(b).path
    recipes, files = (Run(one).recipe, Run(two).recipe), (str(Run(one).recipe_file), str(Run(two).recipe_file))
    found = [Difference("recipe.yaml", what) for what in diff_recipes(*recipes, words=words, files=files)]
    for top in ("metrics.jsonl", "episodes", "annotations", "checkpoints"):
        here, there = _files(one, top), _files(two, top)
        for name in sorted({*here, *there}):
            if name not in here or name not in there:
                found.append(Difference(name, _only(name not in here)))
            elif what := _file(here[name], there[name], one, two):
                found.append(Difference(name, what))
    return found


def _files(root: Path, top: str) -> dict[str, Path]:
    """The files of one kind in a run."""
    paths = (root / top).rglob("*") if (root / top).is_dir() else [root / top]
    found = [p for p in paths if p.is_file() and not p.name.endswith(".tmp")]
    return {p.relative_to(root).as_posix(): p for p in found}
