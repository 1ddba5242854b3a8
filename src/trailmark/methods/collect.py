"""Play many starts into one file and write each episode as it finishes (`runs/collect.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trailmark.rollout.play import Protocol, Seat, Start, play_all
from trailmark.run_async import wait
from trailmark.runs.collect import Collection, Keep
from trailmark.score.base import Judge
from trailmark.tasks.base import TaskSource
from trailmark.types import Annotation, Episode


def collect_starts(
    path: Path, source: TaskSource, starts: Sequence[Start], seats: Sequence[Seat],
    protocol: Protocol | None = None, judge: Judge | None = None,
) -> list[Episode]:  # fmt: skip
    """Play all starts into `path` and write each episode as it finishes. Starts come from `rollout.play.start_all` (new
    plays) or `rollout.branch.branch_starts` (continuations of stored ones). A judge's annotations are written next to
    the file, and `formats.read("episodes", path)` reads both."""
    kept = Collection(path)
    episodes = play_left(kept, source, starts, seats, protocol, judge)
    kept.finish(episodes)
    return episodes


def play_left(
    kept: Collection, source: TaskSource, starts: Sequence[Start], seats: Sequence[Seat],
    protocol: Protocol | None = None, judge: Judge | None = None,
) -> list[Episode]:  # fmt: skip
    """Play the starts that a collection does not hold yet. Returns the episodes of all starts."""
    notes: list[Annotation] = []

    def play(left: list[Start], each: Keep) -> None:
        def over(e: Episode) -> None:
            kept.note([a for a in notes if a.episode == e.id])
            notes[:] = [a for a in notes if a.episode != e.id]
            each(e)

        wait(play_all(source, left, seats, protocol, judge=judge, notes=notes, each=over))

    return kept.play(starts, play)
