"""Fingerprints of files, folders and runs, by their content. Paths are no part of them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from trailmark.marked_yaml import plain
from trailmark.plain_files import read_plain
from trailmark.runs.atomic_files import file_hash
from trailmark.runs.checkpoints import listed
from trailmark.runs.recipe_keys import compared

MADE = "recipe.made.yaml"  # the recipe of a training, where settings that do not change it were changed later


def fingerprint(path: Path, every: bool = False) -> dict[str, str]:
    """Hashes of a file ({"": hash}), a run or a folder. `every`: of every file, also of a run."""
    if not path.is_dir():
        return {"": file_hash(path)}
    if not every and (path / "recipe.yaml").is_file():
        return _run_files(path)
    files = [p for p in sorted(path.rglob("*")) if p.is_file() and not passing(p.relative_to(path))]
    return {p.relative_to(path).as_posix(): file_hash(p) for p in files}


def passing(path: Path) -> bool:
    """Whether a file is temporary: locks, temporary files and half-written checkpoints. All are hidden files."""
    return path.name == ".lock" or any(
        p.startswith(".") and p.endswith((".tmp", ".lock", ".partial")) for p in path.parts
    )


def _run_files(run: Path) -> dict[str, str]:
    """The files that identify a run: the recipe without names and paths, the metrics and the newest checkpoint."""
    file = next(p for name in (MADE, "recipe.yaml") if (p := run / name).is_file())
    recipe = plain(str(read_plain(file), "utf-8"), str(file))
    found = {"recipe.yaml": text_hash(json_text(json.loads(json.dumps(compared(recipe), default=str))))}
    if (run / "metrics.jsonl").is_file():
        found["metrics.jsonl"] = file_hash(run / "metrics.jsonl")
    for last in listed(run / "checkpoints")[-1:]:
        for path in sorted(p for p in last.rglob("*") if p.is_file()):
            found[path.relative_to(run).as_posix()] = file_hash(path)
    return found


def text_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def json_text(value: Any) -> str:
    """JSON that is equal for equal values, whatever the order of their keys."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


def as_json(value: Any) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode()
