"""Play many starts into one file and write each episode as it finishes (`runs/collect.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from trailmark.failures import PATIENCE, gone, must_be_few, too_many
from trailmark.rollout.play import Protocol, Seat, Start, must_show, play_starts
from trailmark.runs.collect import Collection, Keep
from trailmark.score.base import Judge
from trailmark.tasks.base import TaskSource
from trailmark.types import Annotation, Episode, Failed


def collect_starts(
    path: Path, source: TaskSource, starts: Sequence[Start], seats: Sequence[Seat],
    protocol: Protocol | None = None, judge: Judge | None = None, failures: float = 0.0,
) -> list[Episode]:  # fmt: skip
    """Play all starts into `path` and write each episode as it finishes. Starts come from `rollout.play.start_all` (new
    plays) or `rollout.branch.branch_starts` (continuations of stored ones). A judge's annotations are written next to
    the file, and `formats.read("episodes", path)` reads both. If more than a share `failures` of them fail, `path` is
    not written: the next call plays the failed ones again."""
    kept = Collection(path)
    episodes = play_left(kept, source, starts, seats, protocol, judge, failures)
    kept.finish(episodes)
    return episodes


def play_left(
    kept: Collection, source: TaskSource, starts: Sequence[Start], seats: Sequence[Seat],
    protocol: Protocol | None = None, judge: Judge | None = None, failures: float = 0.0, key: str = "failures",
    stored: Callable[[Episode], Episode] = lambda e: e, what: str = "",
) -> list[Episode]:  # fmt: skip
    """Play the starts that a collection does not hold yet. Returns the episodes of all starts, of which at most a share
    `failures` may have failed (`key`: how the user states it). Episodes are stored as `noted` gives them back."""
    notes: list[Annotation] = []
    what = what or f"episodes of {kept.path}"
    server_errors = ("engine: ", "judge ") if any(s.kind == "remote" for s in seats) else ("judge ",)

    must_show(source, list({s.task.id: s.task for s in starts}.values()), seats)

    def play(left: list[Start], each: Keep) -> None:
        lost, in_a_row = 0, list[str]()

        def over(e: Episode) -> None:
            nonlocal lost
            kept.note([a for a in notes if a.episode == e.id])
            notes[:] = [a for a in notes if a.episode != e.id]
            each(stored(e))
            if not isinstance(e.outcome, Failed):
                in_a_row.clear()
                return
            lost += 1
            if e.outcome.error.startswith(server_errors):
                in_a_row.append(e.outcome.error)
            if len(in_a_row) >= PATIENCE and too_many(lost, len(starts), failures) and lost < len(left):
                raise gone(what, in_a_row, key)

        play_starts(source, left, seats, protocol, judge=judge, notes=notes, each=over)

    made = kept.play(starts, play)
    bad = [(e.id, e.outcome.error) for e in made if isinstance(e.outcome, Failed)]
    must_be_few(what, [why for _, why in bad], len(starts), failures, key, bad[0][0] if bad else "")
    return made
