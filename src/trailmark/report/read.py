"""Read a run as far as it is complete on disk: also one that is still running, or that died while writing."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trailmark.episodes import evenly
from trailmark.errors import DataError, TrailmarkError
from trailmark.plain_files import read_json
from trailmark.runs.annotations import annotation_files, named_episodes
from trailmark.runs.atomic_files import lines_of
from trailmark.runs.checkpoints import numbered
from trailmark.runs.episode_json import Row, from_json
from trailmark.runs.store import Run, metric_row, read_recipe, segments
from trailmark.types import Annotation


@dataclass
class LineReader:
    """Counts the lines that were left out of each file, for the page."""

    broken: dict[str, int] = field(default_factory=dict)

    def metrics(self, path: Path) -> list[dict[str, Any]]:
        return self._rows(path, lambda line, i: metric_row(line, path, i))

    def rows(self, path: Path, kind: type[Row]) -> list[Row]:
        return self._rows(path, lambda line, i: from_json(line, path, i, kind))

    def _rows(self, path: Path, read: Any) -> list[Any]:
        *lines, tail = lines_of(path, True)
        out, bad = [], int(bool(tail))  # a last line without a newline is still being written
        for i, line in enumerate(lines, 1):
            try:
                out.append(read(line, i))
            except DataError:
                bad += 1
        if bad:
            self.broken[path.name] = self.broken.get(path.name, 0) + bad
        return out


def recipe_of(run: Run) -> dict[str, Any]:
    """The recipe as plain values; empty if it cannot be parsed (the page shows its text in any case)."""
    try:
        return read_recipe(run)
    except TrailmarkError:
        return {}


def checkpoints(run: Run) -> list[Path]:
    """The checkpoint folders, oldest first."""
    return numbered(run.checkpoints_dir)


def state(run: Run, last: int, steps: int | None) -> str:
    """finished, running, early (stopped because nothing improved) or stopped (no process works on it)."""
    if _held(run.path / ".lock"):
        return "running"
    if steps is not None and last >= steps:
        return "finished"
    for folder in checkpoints(run)[-1:]:
        try:
            if read_json(folder / "state.json").get("stopped"):
                return "early"
        except (OSError, ValueError, AttributeError):
            pass
    return "stopped"


def _held(path: Path) -> bool:
    """Whether a living process trains here. The process id is checked first, so a run that starts is not disturbed."""
    import fcntl

    if path.is_symlink() or not path.is_file():
        return False
    try:
        os.kill(int(path.read_text("ascii")), 0)
    except PermissionError:
        pass  # there is such a process, and another user started it
    except (OSError, ValueError, OverflowError):
        return False
    try:
        with path.open("rb") as f:
            fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def annotated(file: Path, lines: LineReader) -> dict[str, dict[str, list[Annotation]]]:
    """The annotations of a file of episodes: episode id -> name -> its annotations."""
    found: dict[str, dict[str, list[Annotation]]] = {}
    for path in annotation_files(file):
        for a in lines.rows(path, Annotation):
            found.setdefault(a.episode, {}).setdefault(a.name, []).append(a)
    return found


def evaluation_files(run: Run, most: int) -> dict[Path, str]:
    """The named evaluations and at most `most` of the numbered ones (during training, after that step), with names."""
    folder = run.path / "evaluation"
    if not folder.is_dir():
        return {}
    numbered = segments(folder)
    named = named_episodes(folder)
    return {p: f"after step {int(p.stem)}" for p in evenly(numbered, most)} | {p: p.stem for p in named}


def episode_files(run: Run) -> list[Path]:
    return segments(run.episodes_dir) if run.episodes_dir.is_dir() else []
