"""Our own episodes as one file NAME.jsonl. Annotations, if any, are in NAME.annotations.jsonl beside it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from trailmark.errors import DataError
from trailmark.formats.turns import Imported
from trailmark.runs.atomic_files import atomic_write
from trailmark.runs.episode_json import to_json
from trailmark.runs.store import beside, read_segment
from trailmark.types import Annotation, Episode


def read(path: str | Path) -> Imported:
    episodes = read_segment(path)
    notes = read_segment(beside(path), Annotation) if beside(path).exists() else []
    check_notes(path, notes, {e.id for e in episodes})
    return Imported(episodes, notes)


def check_notes(path: str | Path, notes: Sequence[Annotation], known: Collection[str]) -> None:
    """Annotations must be of episodes whose ids are `known`."""
    for n, note in enumerate(notes, 1):
        if note.episode not in known:
            raise stranger(path, note.episode, n)


def stranger(path: str | Path, episode: str, line: int) -> DataError:
    """The error of an annotation that is of no episode of the file."""
    return DataError(f"is '{episode}', which {Path(path).name} does not hold.", beside(path), line, "episode")


def write(path: str | Path, episodes: Iterable[Episode], annotations: Sequence[Annotation] = ()) -> None:
    data, notes = ("".join(to_json(row) + "\n" for row in rows).encode() for rows in (episodes, annotations))
    atomic_write(path, data, "convert")
    beside(path).unlink(missing_ok=True)  # old annotations would be about other episodes
    if notes:
        atomic_write(beside(path), notes, "convert")
