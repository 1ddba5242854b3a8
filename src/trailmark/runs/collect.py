"""A long collection of episodes. Each is written as it finishes, so a kill loses only the episodes in progress.

    FOLDER/000003.partial.jsonl    finished episodes, in the order in which they finished
    FOLDER/000003.jsonl            all episodes, in the order of their starts; then the partial file is deleted
    FOLDER/000003.annotations.jsonl (and 000003.partial.annotations.jsonl)    a judge's annotations, if there are any

The random draws of an episode depend only on its seed and its id. So a resumed collection writes the same file as one
that was never stopped. Failed episodes are not stored until the end: a resumed collection plays them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from trailmark.runs.atomic_files import append_text
from trailmark.runs.episode_json import to_json
from trailmark.runs.store import whole_rows, write_beside, write_rows
from trailmark.types import Annotation, Episode, Failed


class HasId(Protocol):
    @property
    def id(self) -> str: ...


Start = TypeVar("Start", bound=HasId)
Keep = Callable[[Episode], None]


class Collection:
    """Collects episodes into `path`. Episodes that an earlier process finished are not played again."""

    def __init__(self, path: Path):
        self.path, self.partial = path, path.with_name(f"{path.stem}.partial.jsonl")
        self.partial_notes = path.with_name(f"{path.stem}.partial.annotations.jsonl")
        self.notes: dict[tuple[str, str, int | None], Annotation] = {}
        for note in whole_rows(self.partial_notes, Annotation):
            self._note(note)
        self.found = {e.id: e for e in whole_rows(self.partial, Episode)}

    def play(self, starts: Sequence[Start], play: Callable[[list[Start], Keep], Any]) -> list[Episode]:
        """The episodes of all starts, in order. `play(left, each)` plays the starts that are left and calls `each` with
        every finished episode, as `rollout.play.play_starts` does."""
        if left := [s for s in starts if s.id not in self.found]:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            play(left, self._keep)
        return [self.found[s.id] for s in starts]

    def _keep(self, episode: Episode) -> None:
        if not isinstance(episode.outcome, Failed):
            append_text(self.partial, to_json(episode) + "\n", "collected")
        self.found[episode.id] = episode

    def note(self, annotations: Sequence[Annotation]) -> None:
        """Store annotations of an episode. Call this before the episode is stored, so that no episode lacks its
        annotations."""
        if annotations:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append_text(self.partial_notes, "".join(to_json(a) + "\n" for a in annotations), "noted")
        for a in annotations:
            self._note(a)

    def _note(self, a: Annotation) -> None:
        # after a kill an annotation may be written twice: the last one counts
        self.notes[a.episode, a.name, a.turn] = a

    def notes_of(self, episodes: Sequence[Episode]) -> list[Annotation]:
        by: dict[str, list[Annotation]] = {}
        for a in self.notes.values():
            by.setdefault(a.episode, []).append(a)
        return [a for e in episodes for a in by.get(e.id, ())]

    def finish(self, episodes: Iterable[Episode]) -> Path:
        """Write the complete file. The collection is then finished and cannot be resumed."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        episodes = list(episodes)
        write_beside(self.path, self.notes_of(episodes))
        write_rows(self.path, episodes, "segment")
        self.forget()
        return self.path

    def forget(self) -> None:
        """Delete what was kept on the way."""
        self.partial.unlink(missing_ok=True)
        self.partial_notes.unlink(missing_ok=True)
