"""The files that a run reads besides its models: data rows, game folders, Python functions. RUN/data.json says what
they were when the run began:

    {"data": {"path": "rows.jsonl", "size": 1834, "sha256": "9f86…"}}

A resumed run must read the same files; otherwise its two parts would learn from different data. Files are compared by
their content, not by their path. So are folders of at most `WHOLE` bytes. Larger folders are compared by the names and
sizes of their files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from trailmark.config import Config, NamesFile, RunConfig
from trailmark.errors import DataError, RunError
from trailmark.functions import function_file
from trailmark.plain_files import read_json
from trailmark.runs.atomic_files import atomic_write, file_hash
from trailmark.runs.checkpoints import is_run, listed
from trailmark.runs.store import Run

NOTE = "data.json"
WHOLE = 64 << 20
Known = dict[str, dict[str, Any]]


def named_files(config: RunConfig, without: Collection[str] = ()) -> dict[str, Path]:
    """The files and folders that a recipe names, by key. They may not exist. Keys below those in `without` are left
    out: a stage reads and checks these files itself."""
    found = dict(_named(config, ""))
    if "data" not in found and (own := getattr(config, "data", None)):  # a user's own method may not mark the key
        found |= dict(_texts(own, "data", NamesFile()))
    return {_spoken(key, config): path for key, path in found.items() if key.split(".")[0] not in without}


def note_files(run: Run, config: RunConfig, without: Collection[str] = ()) -> None:
    """Write data.json. If the run already has checkpoints or evaluations, check first that the files are the same."""
    note, now = run.path / NOTE, known_files(named_files(config, without))
    old = read_note(run.path)
    if old and (listed(run.checkpoints_dir) or any((run.path / "evaluation").glob("*"))):
        if changed := _changed(old, now):
            raise RunError(
                f"{changed[0]} since this run began: it would learn from other data than before. Put it back as it "
                f"was, begin another run with out=DIR, or remove {note} to go on with it as it is now."
            )
        now = old | now
    if now != old:
        atomic_write(note, (json.dumps(now, indent=1, ensure_ascii=False) + "\n").encode(), "data")


def changed_files(run: Path, config: RunConfig) -> list[str]:
    """One sentence for each file that has changed since the run read it."""
    old = read_note(run)
    return _changed(old, known_files({k: p for k, p in named_files(config).items() if k in old}))


def no_pipes(config: RunConfig) -> None:
    """Raise an error if a recipe names a pipe. A run opens its files several times: a second look at a pipe finds
    nothing, or waits for ever."""
    for key, path in named_files(config).items():
        if _is_pipe(path):
            kind = "pipe" if path.is_fifo() else "device"
            raise DataError(
                f"is a {kind}, which can be read only once, and a run reads its files again: write the rows to a file "
                "first.",
                path,
                key=key,
            )


def _is_pipe(path: Path) -> bool:
    try:
        return path.exists() and not path.is_file() and not path.is_dir()
    except OSError:  # too long for a file name: an option of a task may be any text
        return False


def must_be_file(path: Path, key: str | None = None) -> None:
    """Raise an error if `path` is a folder: rows are read from a file. The error suggests a file in the folder. `key`
    is the recipe key."""
    if not path.is_dir():
        return
    run = is_run(path)
    where = path / "episodes" if run else path
    files = sorted(p for p in where.glob("*.json*") if p.is_file() and not p.name.endswith(".annotations.jsonl"))
    hint = f"name one of its files, such as {files[0]}" if files else "name a file of JSON lines"
    if run and files:
        hint += " (format: episodes, where there is such a key; trailmark convert makes other files of it)"
    what = "the folder of a run" if run else "a folder"
    raise DataError(f"is {what}, and rows are read from a file: {hint}.", path, key=key)


def read_note(run: Path) -> Known:
    """The content of data.json, if there is one."""
    file = run / NOTE
    if not file.exists():
        return {}
    try:
        found = read_json(file)
        if all(isinstance(v["sha256"], str) for v in found.values()):
            return found
        why = "it is no list of files"
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as problem:
        why = str(problem) if isinstance(problem, OSError | ValueError) else "it is no list of files"
    raise RunError(f"{file} cannot be used ({why}): remove it and go on.")


def known_files(named: Mapping[str, Path]) -> Known:
    """Path, size and hash of each file that exists. Pipes are left out: they can be read only once."""
    return {key: _known(path) for key, path in named.items() if _is_here(path)}


def _is_here(path: Path) -> bool:
    try:
        return path.is_file() or path.is_dir()
    except OSError:  # too long for a file name: an option of a task may be any text
        return False


def _known(path: Path) -> dict[str, Any]:
    if path.is_file():
        return {"path": str(path), "size": path.stat().st_size, "sha256": file_hash(path)}
    files = {p.relative_to(path).as_posix(): p for p in sorted(path.rglob("*")) if p.is_file()}
    sizes = {name: p.stat().st_size for name, p in files.items()}
    whole = sum(sizes.values())
    parts = {name: file_hash(p) for name, p in files.items()} if whole <= WHOLE else sizes
    text = json.dumps(parts, sort_keys=True)
    return {"path": str(path), "files": len(files), "size": whole, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def _changed(old: Known, now: Known) -> list[str]:
    return [
        f"{key}: {now[key]['path']} has changed ({then['size']} bytes, now {now[key]['size']})"
        for key, then in old.items()
        if key in now and now[key]["sha256"] != then["sha256"]
    ]


def _spoken(key: str, config: RunConfig) -> str:
    """The key as a user writes it: in a recipe of prompts, `data` is short for `task.options.path`."""
    task = getattr(config, "task", None)
    short = key == "task.options.path" and "data" in config.short and getattr(task, "name", "") == "prompts"
    return "data" if short else key


def _named(value: Any, key: str) -> Iterator[tuple[str, Path]]:
    """All files that a section names, with their keys."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _named(inner, f"{key}.{name}")
    elif isinstance(value, Config):
        for name, field in type(value).model_fields.items():
            inner, here = getattr(value, name), f"{key}.{name}" if key else name
            mark = next((m for m in field.metadata if isinstance(m, NamesFile)), None)
            yield from _texts(inner, here, mark) if mark else _named(inner, here)


def _texts(value: Any, key: str, mark: NamesFile) -> Iterator[tuple[str, Path]]:
    """A text names a file. In a list or a mapping (such as the options of a task), each text may name one."""
    if isinstance(value, str) and value:
        if (path := function_file(value) if mark.function else Path(value)) is not None:
            yield key, path
    elif isinstance(value, list | Mapping):
        for name, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            if isinstance(inner, str):
                yield from _texts(inner, f"{key}.{name}", mark)
