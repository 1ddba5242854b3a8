"""Runs on disk: episodes, annotations, metrics, and the directory that holds them.

    RUN/recipe.yaml                    the resolved recipe; written last, so a directory without it is no run
    RUN/episodes/000012.jsonl          one step; one line is one episode
    RUN/annotations/NAME/000012.jsonl  the same for annotations
    RUN/metrics.jsonl                  one line per step; nothing in it depends on the clock
    RUN/timings.jsonl                  numbers that depend on the clock
    RUN/checkpoints/
    RUN/.lock                          locked while a process trains here
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trailmark.errors import DataError, RecipeError, RunError
from trailmark.marked_yaml import plain
from trailmark.plain_files import read_plain
from trailmark.runs.atomic_files import (
    LINK,
    append_text,
    atomic_write,
    being_written,
    cannot_write,
    hold,
    lines_of,
    remove_file,
    sync_folder,
    whole_lines,
)
from trailmark.runs.episode_json import Row, from_json, object_from_json, object_to_json, to_json
from trailmark.trust import named_by_run
from trailmark.types import Annotation, Episode

MOST_STEPS = 10**9  # of a run: a larger number in a file is an error
_SEGMENT = re.compile(r"\d+\.jsonl")


# --- segments ----------------------------------------------------------------------------------------------------


def segments(folder: str | Path) -> list[Path]:
    """The segment files of a folder, in order. Other files (temporary ones, notes) are left out."""
    try:
        found = [p for p in Path(folder).iterdir() if _SEGMENT.fullmatch(p.name)]
    except OSError as e:
        raise DataError(f"cannot be listed ({e.strerror}).", folder) from None
    return sorted(found, key=lambda p: (int(p.stem), p.name))


def write_rows(path: str | Path, rows: Iterable[Episode] | Iterable[Annotation], name: str = "file") -> None:
    """Write episodes or annotations as lines, all or none."""
    atomic_write(path, "".join(to_json(row) + "\n" for row in rows).encode(), name)


def write_segment(
    folder: str | Path, index: int, rows: Iterable[Episode] | Iterable[Annotation], name: str = "segment"
) -> Path:
    """Write step `index` of a folder of episodes or annotations. An existing file is replaced."""
    path = Path(folder) / f"{index:06d}.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise cannot_write(path, e) from e
    write_rows(path, rows, name)
    return path


def read_segment(path: str | Path, kind: type[Row] = Episode) -> list[Row]:
    """All rows of one segment. `kind` is Episode or Annotation."""
    *lines, tail = lines_of(path)
    if tail:
        raise DataError(f"line {len(lines) + 1} is cut off: it does not end with a newline.", path, len(lines) + 1)
    return [from_json(line, path, i, kind) for i, line in enumerate(lines, 1)]


def beside(path: str | Path) -> Path:
    """The annotation file next to a file of episodes, if RUN/annotations has none (see `runs/annotations.py`)."""
    return Path(path).with_suffix(".annotations.jsonl")


def write_beside(file: Path, notes: Iterable[Annotation]) -> None:
    """Write the notes on the episodes of a file next to it. Older notes are deleted: they are about other episodes."""
    if notes := list(notes):
        write_rows(beside(file), notes, "annotation")
    else:
        remove_file(beside(file))


def read_episodes(folder: str | Path) -> Iterator[Episode]:
    return _rows(folder, Episode)


def read_annotations(folder: str | Path) -> Iterator[Annotation]:
    return _rows(folder, Annotation)


def _rows(folder: str | Path, kind: type[Row]) -> Iterator[Row]:
    for path in segments(folder):
        try:
            rows = read_segment(path, kind)
        except DataError:
            if path.exists():
                raise
            return  # a run that is resumed takes back what is newer than its checkpoint, the last one first
        yield from rows


def truncate_segments(folder: str | Path, first: int) -> None:
    """Delete the segments from index `first` on, the last one first."""
    for path in reversed(segments(folder)):
        if int(path.stem) >= first:
            path.unlink()
            beside(path).unlink(missing_ok=True)
    sync_folder(Path(folder))


def truncate_run(run: Run, step: int) -> None:
    """Delete what a run wrote after step `step`: metrics, timings, episodes, annotations and evaluations during
    training."""
    truncate_metrics(run, step)
    notes = run.path / "annotations"
    named = sorted(p for p in notes.iterdir() if p.is_dir()) if notes.is_dir() else []
    for folder in (run.episodes_dir, *named, run.path / "evaluation"):
        if folder.is_dir():
            truncate_segments(folder, step + 1)


# --- metrics -----------------------------------------------------------------------------------------------------


def append_line(path: str | Path, row: Mapping[str, Any], name: str = "metrics") -> None:
    """Append one JSON line with one write. If the whole line cannot be written, the file is left as it was."""
    append_text(path, object_to_json(row, f"a line of {Path(path).name}") + "\n", name)


def whole_rows(path: Path, kind: type[Row]) -> list[Row]:
    """The rows of a file that only grows; it may not be there yet."""
    return [from_json(line, path, i, kind) for i, line in enumerate(whole_lines(path) if path.exists() else (), 1)]


def metric_row(line: bytes, path: Path, i: int) -> dict[str, Any]:
    """A line of `metrics.jsonl` or `timings.jsonl`."""
    row = object_from_json(line, path, i)
    if type(step := row.get("step")) is not int or not 0 <= step <= MOST_STEPS:
        found = repr(step)
        found = found if len(found) <= 40 else f"{found[:40]}…"
        raise DataError(f"must be a whole number from 0 to {MOST_STEPS}, not {found}.", path, i, "step")
    return row


def _metric_lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """The complete lines of a file and their values. A last line without newline is still being written."""
    return [(line, metric_row(line, path, i)) for i, line in enumerate(lines_of(path, True)[:-1], 1)]


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl` or `timings.jsonl`. If `path` is a run directory: of its `metrics.jsonl`."""
    path = Path(path)
    return [row for _, row in _metric_lines(path / "metrics.jsonl" if path.is_dir() else path)]


def truncate_metrics(run: Run, step: int) -> None:
    """Delete the metrics and timings of all steps after `step`, and an unfinished last line."""
    files = {path: _metric_lines(path) for path in (run.metrics_file, run.timings_file)}
    for path, lines in files.items():
        kept = b"".join(line + b"\n" for line, row in lines if row["step"] <= step)
        if path.exists() and path.stat().st_size != len(kept):
            atomic_write(path, kept, "truncate")


# --- the run -----------------------------------------------------------------------------------------------------


def refuse_links(folder: Path) -> None:
    """Raise an error if a folder or file that is written into in a run is a link: it could lead anywhere."""
    for place in (folder, folder / "annotations", folder / "stages"):
        for path in sorted(place.iterdir()) if place.is_dir() else ():
            if path.is_symlink():
                raise RunError(f"{path} {LINK}.")


class Run:
    """A run directory. `create` and `open(lock=True)` hold its lock until `close`, the end of `with`, or the end of the
    process."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.recipe_file, self.metrics_file = self.path / "recipe.yaml", self.path / "metrics.jsonl"
        self.timings_file, self.episodes_dir = self.path / "timings.jsonl", self.path / "episodes"
        self.checkpoints_dir = self.path / "checkpoints"
        self._lock: int | None = None
        self._before: set[str] = set()  # the files of the folder when it was locked
        self._new_folder = False

    @classmethod
    def create(cls, path: str | Path, recipe_text: str) -> Run:
        """Create a new run and lock it. Existing files are never touched."""
        run = cls(path)
        try:
            run._new_folder = not run.path.exists()
            run.path.mkdir(parents=True, exist_ok=True)
            # before the lock, because locking deletes temporary files: the folder may belong to something else
            run._must_be_new()
            run.lock()
            run._must_be_new()
            run.episodes_dir.mkdir(exist_ok=True)
            run.checkpoints_dir.mkdir(exist_ok=True)
            atomic_write(run.recipe_file, recipe_text.encode(), "recipe")
        except BaseException as e:
            with contextlib.suppress(OSError):
                run.discard_if_empty()
                if run._new_folder:
                    run.path.rmdir()  # if it is empty
            run.close()
            if isinstance(e, OSError):
                raise cannot_write(run.path, e) from e
            raise
        return run

    def _must_be_new(self) -> None:
        """Raise an error if there is a run. (What a killed creation left behind is no run yet, and may be used.)"""
        started = {".lock", "episodes", "checkpoints"}
        half = f".{self.recipe_file.name}."
        found = [p for p in self.path.iterdir() if not (p.name.startswith(half) and p.name.endswith(".tmp"))]
        if any(p.name not in started or (p.is_dir() and any(p.iterdir())) for p in found):
            other = "choose another directory with out=DIR."
            if self.recipe_file.exists():
                raise RunError(f"{self.path} holds a run: go on with --resume, or {other}")
            why = f"there is no {self.recipe_file.name}"
            raise RunError(f"{self.path} is not empty and holds no run to go on with ({why}): {other}")

    @classmethod
    def open(cls, path: str | Path, lock: bool = False) -> Run:
        """Open an existing run, to read it (no lock) or to resume it (`lock=True`)."""
        run = cls(path)
        if not run.recipe_file.is_file():
            why = "it holds no recipe.yaml" if run.path.is_dir() else "there is no such directory"
            raise RunError(f"{path} is not a run: {why}.")
        if lock:
            run.lock()
        return run

    def annotations_dir(self, name: str) -> Path:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
            raise DataError(f"annotation name {name!r} must be letters, digits, '_', '-' or '.'.")
        return self.path / "annotations" / name

    def annotate(self, step: int, annotations: Iterable[Annotation]) -> None:
        """Store annotations of a step's episodes (credit, values): RUN/annotations/NAME/000012.jsonl for each name."""
        by_name: dict[str, list[Annotation]] = {}
        for a in annotations:
            by_name.setdefault(a.name, []).append(a)
        for name, rows in by_name.items():
            write_segment(self.annotations_dir(name), step, rows, "annotation")

    def keep_evaluation(self, name: str, episodes: Iterable[Episode], notes: Sequence[Annotation] = ()) -> Path:
        """Store the episodes of a named evaluation in RUN/evaluation/NAME.jsonl, and the judge's notes on them in
        RUN/evaluation/NAME.annotations.jsonl."""
        refuse_links(self.path)
        path = self.path / "evaluation" / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        write_beside(path, notes)
        write_rows(path, episodes, "evaluation")
        return path

    @property
    def recipe(self) -> str:
        try:
            return read_plain(self.recipe_file).decode("utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise RunError(f"{self.recipe_file} cannot be read ({e}).") from None

    def log(self, step: int, metrics: Mapping[str, Any], timings: Mapping[str, Any] | None = None) -> None:
        """Append the metrics of a step. Numbers that depend on the clock go to a file of their own, so that the metrics
        of equal runs have equal bytes."""
        if timings:
            append_line(self.timings_file, {"step": step, **timings}, "timings")
        append_line(self.metrics_file, {"step": step, **metrics})

    def sync(self) -> None:
        """Write the metrics to disk. Call this before a checkpoint of these steps is renamed."""
        for path in (self.metrics_file, self.timings_file):
            if path.exists():
                sync_folder(path)
        sync_folder(self.path)

    def lock(self) -> None:
        """Raise an error if another process trains here, and delete temporary files of a process that died."""
        refuse_links(self.path)
        self._lock = hold(self.path / ".lock", str(self.path))
        for temp in self.path.rglob(".*.tmp"):
            if not being_written(temp):
                temp.unlink(missing_ok=True)
        self._before = {p.name for p in self.path.iterdir()}

    def discard_if_empty(self, answered: bool = False) -> None:
        """Undo a run in which nothing has happened yet: delete the files that were added since it was locked. Older
        files stay, so a run can still be resumed, and finished stages stay. If there are stages, only the judge's
        fingerprint is deleted: no rewards of this judge were stored, so the run may continue with a corrected
        function. `answered`: what a judge behind a server has answered is kept, too."""
        steps = [*self.episodes_dir.glob("*"), *self.checkpoints_dir.glob("*"), self.metrics_file]
        steps += (self.path / "judge").glob("*.jsonl") if answered else ()
        if self._lock is None or any(p.exists() for p in steps):
            return
        if any(p.is_file() and not p.name.endswith(".lock") for p in (self.path / "stages").rglob("*")):
            if "judge" not in self._before:
                (self.path / "judge" / "judge.json").unlink(missing_ok=True)
            return
        made = [p for p in self.path.iterdir() if p.name not in self._before]
        folders = (self.episodes_dir, self.checkpoints_dir)
        # In this order, so that if the process dies here, the rest can be resumed or created again.
        for path in sorted(made, key=lambda p: (p in folders, p == self.recipe_file)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)  # the error that led here must be reported, not this one
            else:
                path.unlink(missing_ok=True)
        self._leave_no_lock()

    def _leave_no_lock(self) -> None:
        """Delete the lock of a folder that was made for a run that could not begin, and the folder."""
        if self._new_folder and [p.name for p in self.path.iterdir()] == [".lock"]:
            with contextlib.suppress(OSError):  # `hold` finds out that a lock was deleted while it waited
                (self.path / ".lock").unlink()
                self.path.rmdir()

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_recipe(run: Run | str | Path) -> dict[str, Any]:
    """The recipe of a run as plain values."""
    run = run if isinstance(run, Run) else Run(run)
    found = plain(run.recipe, str(run.recipe_file))
    if not isinstance(found, dict):
        raise RecipeError(f"{run.recipe_file}: a recipe is a mapping of keys to values.")
    named_by_run(found)
    return found
