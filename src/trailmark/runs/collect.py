"""A long collection, written as it finishes: a kill loses at most the episodes that were being played.

    FOLDER/000003.partial.jsonl    finished episodes, in the order in which they came
    FOLDER/000003.jsonl            all of them, in the order of their starts; then the partial file goes

An episode's draws depend on its seed and its id alone, so the file that a resumed collection writes is the one of a
collection that was never stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from trailmark.runs.episode_json import from_json, to_json
from trailmark.runs.store import append_text, atomic_write, whole_lines
from trailmark.types import Episode


class HasId(Protocol):
    @property
    def id(self) -> str: ...


Start = TypeVar("Start", bound=HasId)
Keep = Callable[[Episode], None]


class Collection:
    """Episodes on their way to `path`. What an earlier process had finished is not played again."""

    def __init__(self, path: Path):
        self.path, self.partial = path, path.with_name(f"{path.stem}.partial.jsonl")
        self.found: dict[str, Episode] = {}
        if self.partial.exists():
            self.found = {
                e.id: e
                for i, line in enumerate(whole_lines(self.partial), 1)
                for e in [from_json(line, self.partial, i)]
            }

    def play(self, starts: Sequence[Start], play: Callable[[list[Start], Keep], Any]) -> list[Episode]:
        """The episodes of all starts, in their order. `play(left, each)` plays those that are left and gives each
        episode to `each` when it is over, as `rollout.play.play_all` does."""
        if left := [s for s in starts if s.id not in self.found]:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            play(left, self._keep)
        return [self.found[s.id] for s in starts]

    def _keep(self, episode: Episode) -> None:
        append_text(self.partial, to_json(episode) + "\n", "collected")
        self.found[episode.id] = episode

    def finish(self, episodes: Iterable[Episode]) -> Path:
        """Write the whole file. From then on there is nothing to go on with."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(self.path, "".join(to_json(e) + "\n" for e in episodes).encode(), "segment")
        self.partial.unlink(missing_ok=True)
        return self.path
