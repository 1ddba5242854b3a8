"""Task files of AutoExplore.

    tasks_*.jsonl   one task a line: repo, query, target (a path or several); id, version, kind, split, … are optional
    *.json          the reference's: a list of records with question, filename, root, trajectories, …

In a folder, the files of the splits are read (train.jsonl, validate.jsonl and test.jsonl, as `trailmark data` writes
them), else tasks*.jsonl, else the reference's train.json, validate.json and test.json.

In the reference's format a task's targets are the annotated file and every file that a teacher's trajectory identified.
A record in which no teacher identified a file is dropped. Targets that the world never offers are dropped too: hidden
files, and files that are not code, text, data or shell. Dropped records and targets are counted.

A record here holds what a world needs. The makers of data sets read the same files more strictly, with the teachers'
walks, and write them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trailmark.errors import DataError
from trailmark.plain_files import read_plain
from trailmark.runs.episode_json import object_from_json
from trailmark.tasks.auto_explore.contents import kind_of

REFERENCE_SPLITS = ("train", "validate", "test")


@dataclass(frozen=True)
class Question:
    """One question to play, and the files that answer it."""

    key: str
    repo: str
    query: str
    targets: tuple[str, ...]
    version: str = ""
    split: str = "train"
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def depths(self) -> set[int]:
        return {t.count("/") for t in self.targets}


def load_records(paths: str | Path | Sequence[str | Path]) -> tuple[list[Question], Counter[str]]:
    """The records of files or folders, and how many were dropped for each reason."""
    records: dict[str, Question] = {}
    dropped: Counter[str] = Counter()
    for path in [paths] if isinstance(paths, str | Path) else paths:
        for file in _files(Path(path).expanduser()):
            for r in _jsonl(file, dropped) if file.suffix == ".jsonl" else _reference(file, dropped):
                if records.setdefault(r.key, r) is not r:
                    raise DataError(f"a second task has the id '{r.key}' (repository and id together).", file)
    if not records:
        why = ", ".join(f"{n} {what}" for what, n in sorted(dropped.items())) or "the file is empty"
        raise DataError(f"there is no task in {paths} ({why}).")
    return list(records.values()), dropped


def task_folder(paths: str | Path | Sequence[str | Path]) -> Path:
    """The folder of the (first) task file. `file_trees.json` is searched there."""
    first = Path(paths if isinstance(paths, str | Path) else paths[0]).expanduser()
    return first if first.is_dir() else first.parent


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        split = lambda suffix: [p for s in REFERENCE_SPLITS if (p := path / f"{s}.{suffix}").is_file()]
        found = split("jsonl") or sorted(path.glob("tasks*.jsonl")) or split("json")
        if not found:
            raise DataError("holds no task files: train.jsonl …, tasks*.jsonl, or the reference's train.json ….", path)
        return found
    if not path.exists():
        made = "`trailmark data auto-explore … --out FOLDER` makes one"
        raise DataError(f"cannot be read: there is no such file or folder; {made}.", path)
    if path.suffix not in (".jsonl", ".json"):
        raise DataError("a task file ends in .jsonl or .json.", path)
    return [path]


def _bytes(path: Path) -> bytes:
    try:
        return read_plain(path)
    except OSError as e:
        raise DataError(f"cannot be read ({e.strerror}).", path) from None


def _text(row: Mapping[str, Any], key: str, path: Path, line: int, default: str | None = None) -> str:
    value = row.get(key, default)
    if not isinstance(value, str) or (default is None and not value.strip()):
        raise DataError(f"must be a text, not {value!r:.60}.", path, line, key)
    if value.encode("utf-8", "ignore").decode() != value:
        raise DataError("holds half a surrogate pair, which is not text.", path, line, key)
    return value


def _jsonl(path: Path, dropped: Counter[str]) -> list[Question]:
    made = []
    for n, line in enumerate(_bytes(path).split(b"\n"), 1):
        if not line.strip():
            continue
        row = object_from_json(line, path, n)
        repo, target = _text(row, "repo", path, n), row.get("target")
        targets = [target] if isinstance(target, str) else target
        if not isinstance(targets, list) or not targets or not all(isinstance(t, str) for t in targets):
            raise DataError(f"must be a path or a list of paths, not {target!r:.60}.", path, n, "target")
        known = ("repo", "version", "query", "target", "id", "split", "trajectories")
        record = Question(
            f"{repo}-{row.get('id', n - 1)}", repo, _text(row, "query", path, n), tuple(targets),
            _text(row, "version", path, n, ""), _text(row, "split", path, n, "train"),
            {k: v for k, v in row.items() if k not in known},
        )  # fmt: skip
        made += _usable(record, dropped)
    return made


def _reference(path: Path, dropped: Counter[str]) -> list[Question]:
    try:
        rows = json.loads(_bytes(path))
    except (ValueError, RecursionError) as e:
        raise DataError(f"cannot be read as JSON ({e}).", path) from None
    if not isinstance(rows, list):
        raise DataError("must be a list of task records.", path)
    made = []
    for n, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise DataError(f"record {n} must be an object, not {row!r:.40}.", path)
        root, question = _text(row, "root", path, n), _text(row, "question", path, n, "")
        walks = row.get("trajectories") or []
        if not isinstance(walks, list):
            raise DataError(f"must be a list, not {walks!r:.60}.", path, n, "trajectories")
        said = [t.get("filename") for t in walks if isinstance(t, dict)]
        named = [plain_path(f, root) for f in said if isinstance(f, str) and f]
        if not question.strip() or not named:
            dropped["records without a question" if named else "records no teacher identified a file for"] += 1
            continue
        targets = tuple(dict.fromkeys([plain_path(_text(row, "filename", path, n), root), *named]))
        repo = repo_name(root)
        split = path.stem if path.stem in REFERENCE_SPLITS else "train"
        kept = ("answer", "optimal_path", "n_level", "model")
        meta = {k: row[k] for k in kept if k in row}
        made += _usable(Question(f"{repo}-{path.stem}-{n - 1}", repo, question, targets, "", split, meta), dropped)
    return made


def plain_path(path: str, root: str = "") -> str:
    """A path inside its repository, without the quotes that some files put around names with spaces."""
    return path.replace('"', "").removeprefix("./").removeprefix(f"{root.rstrip('/')}/" if root else "")


def repo_name(root: str) -> str:
    """The name of a repository whose `root` is a path."""
    return root.rstrip("/").rpartition("/")[2]


def _usable(record: Question, dropped: Counter[str]) -> list[Question]:
    """The record with the targets that the world offers; an empty list if none is left."""
    targets = tuple(
        t for t in record.targets if kind_of(t) and not any(p.startswith(".") or not p for p in t.split("/"))
    )
    if not targets:
        dropped["targets that are hidden or of another kind"] += 1
        return []
    return [replace(record, targets=targets)]
