"""Play every walk again, decision by decision, to make the files for fine-tuning.

Only the last step of a negative walk is kept. A walk whose commands are no longer offered is left out and counted. If a
command is on another page of the list, the page turns before it are decisions too, with the same reflection.
"""

from __future__ import annotations

from collections.abc import Sequence

from trailmark.data.stages import Counts
from trailmark.errors import DataError
from trailmark.methods.reflect.decisions import Decision, fits
from trailmark.methods.reflect.explore.explorer import Explorer, Seeker
from trailmark.methods.reflect.explore.records import Record, Walk


def decisions_of(explorer: Explorer, record: Record, walk: Walk) -> list[Decision]:
    """The decisions of one walk that are learnt from. A DataError if it cannot be played."""
    seeker = explorer.start(record, name=walk.info)
    out: list[Decision] = []
    for at, (reflection, command) in enumerate(walk.steps):
        learnt = walk.positive or at == len(walk.steps) - 1
        if learnt and not fits(reflection):
            raise DataError(f"step {at} of {walk.info} of '{record.key}' has no reflection that can be written.")
        while True:
            label = seeker.label(command)
            if learnt:
                out.append(_decision(record, walk, len(out) + (0 if walk.positive else at), seeker, reflection, label))
            if seeker.do(label) == command:
                break
    return out


def _decision(record: Record, walk: Walk, step: int, seeker: Seeker, reflection: str, label: str) -> Decision:
    seen = seeker.seen
    return Decision(
        record.key, walk.info, step, seen.state, seen.menu, seen.labels, seen.actions, reflection, label,
        seeker.best_label,
        walk.model, walk.positive,
    )  # fmt: skip


def replay(explorer: Explorer, records: Sequence[Record]) -> tuple[list[Decision], Counts]:
    """All decisions of all walks."""
    counts, out = Counts(), []
    for record in records:
        for walk in record.walks:
            try:
                out += decisions_of(explorer, record, walk)
            except DataError:
                counts.left_out["walk that does not replay"] += 1
            else:
                counts.kept["walks"] += 1
    counts.kept["steps"] = len(out)
    counts.kept["positive"] = sum(d.positive for d in out)
    return out, counts
