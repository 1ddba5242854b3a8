"""Samples to choose from: self-consistency, and the best of n by step scores.

Self-consistency: the answer that most samples of a start give. Blanks do not vote; of equal answers the one that was
given first wins.

Best of n: every step of every sample has a score, a rule (product, min, geomean, mean, last, sum) makes one number of
them, and the sample with the highest number is chosen; of equal ones the first. A sample without a scored step takes no
part. A start of which no sample takes part has no choice and counts as wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trailmark.answers import most_common
from trailmark.episodes import by_group, counted, won
from trailmark.errors import DataError
from trailmark.evaluate.run import read_answer
from trailmark.score.classes import Over, over_steps
from trailmark.stats.intervals import proportion
from trailmark.types import Annotation, Episode, Scored


def by_start(episodes: Sequence[Episode]) -> dict[str, list[Episode]]:
    """The scored episodes of each start, in their order."""
    return by_group(e for e in episodes if isinstance(e.outcome, Scored) and e.outcome.success is not None)


def vote(episodes: Sequence[Episode]) -> Episode | None:
    """A sample that gives the self-consistent answer of one start; None if all are blank."""
    answers = [(read_answer(e) or "", e) for e in episodes]
    answer = most_common(a for a, _ in answers)
    return next((e for a, e in answers if answer and a == answer), None)


def best_of(
    episodes: Sequence[Episode], steps: Sequence[Sequence[float]], over: Over = "product"
) -> tuple[dict[str, Episode | None], int]:
    """The chosen sample of each start, and how many samples have no scored step."""
    if len(steps) != len(episodes):
        raise DataError(f"{len(steps)} lists of step scores for {len(episodes)} samples.")
    scores = {e.id: list(s) for e, s in zip(episodes, steps)}
    chosen: dict[str, Episode | None] = {}
    for start, samples in by_start(episodes).items():
        rated = [(over_steps(scores[e.id], over), e) for e in samples if scores[e.id]]
        chosen[start] = max(rated, key=lambda pair: pair[0])[1] if rated else None
    return chosen, sum(not s for s in scores.values())


def steps_of(episodes: Sequence[Episode], notes: Sequence[Annotation], name: str) -> list[list[float]]:
    """The scores of an annotation of steps, for each episode; none if it has none."""
    found: dict[str, list[float]] = {}
    for a in sorted((a for a in notes if a.name == name and a.level == "step"), key=lambda a: a.turn or 0):
        found.setdefault(a.episode, []).extend(a.values)
    if not found:
        known = sorted({a.name for a in notes if a.level == "step"})
        raise DataError(f"there is no annotation of steps '{name}' (found: {', '.join(known) or 'none'}).")
    return [found.get(e.id, []) for e in episodes]


def choose_row(
    episodes: Sequence[Episode], steps: Sequence[Sequence[float]], over: Over = "product", name: str = ""
) -> dict[str, Any]:
    """One row: a single sample, self-consistency, the best of n by step scores, and one of n, on the same samples."""
    starts = by_start(episodes)
    if not starts:
        raise DataError("no sample has a score: there is nothing to choose from.")
    chosen, unscored = best_of(episodes, steps, over)
    voted = {start: vote(samples) for start, samples in starts.items()}
    every = [e for samples in starts.values() for e in samples]
    sizes = sorted({len(s) for s in starts.values()})
    k = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]}-{sizes[-1]}"
    share = lambda picked: proportion([float(e is not None and won(e)) for e in picked]).plain()
    metrics = {
        "single": proportion([float(won(e)) for e in every], [e.group for e in every]).plain(),
        f"sc@{k}": share(voted.values()),
        f"best@{k} ({over})": share(chosen.values()),
        f"pass@{k}": proportion([float(any(map(won, s))) for s in starts.values()]).plain(),
    }
    warning = f"{unscored} of {len(episodes)} samples have no scored step and take no part" if unscored else ""
    row = {"name": name, **counted(episodes), "failed_as": "apart", "tasks": len(starts)}
    return {**row, "unscored": unscored, "metrics": metrics, **({"warning": warning} if warning else {})}
