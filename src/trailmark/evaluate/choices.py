"""Questions with options, and samples to choose from: self-consistency, the best of n by step scores, the same
questions in several orders of their options, and the file of predictions that a leaderboard wants.

Self-consistency: the answer that most samples of a start give. Blanks do not vote; of equal answers the one that was
given first wins.

Best of n: every step of every sample has a score, a rule (product, min, geomean, mean, last, sum) makes one number of
them, and the sample with the highest number is chosen; of equal ones the first. A sample without a scored step takes no
part. A start of which no sample takes part has no choice and counts as wrong.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trailmark.answers import most_common, original_index
from trailmark.answers import read_answer as read_letter
from trailmark.episodes import by_group, won
from trailmark.errors import DataError, RunError
from trailmark.evaluate.run import read_answer
from trailmark.runs.store import atomic_write
from trailmark.score.classes import Over, over_steps
from trailmark.stats.intervals import mean_of, proportion
from trailmark.types import Annotation, Episode, Failed, Invalid, Scored


def by_start(episodes: Sequence[Episode]) -> dict[str, list[Episode]]:
    """The scored episodes of each start, in their order."""
    return by_group(e for e in episodes if isinstance(e.outcome, Scored) and e.outcome.success is not None)


def _counted(episodes: Sequence[Episode]) -> dict[str, int]:
    """How many episodes there are, and how many of them are scored, invalid and failed."""
    kinds = {"scored": Scored, "invalid": Invalid, "failed": Failed}
    counts = {name: sum(isinstance(e.outcome, kind) for e in episodes) for name, kind in kinds.items()}
    return {"episodes": len(episodes), **counts}


def vote(episodes: Sequence[Episode]) -> Episode | None:
    """A sample that gives the self-consistent answer of one start; None if all are blank."""
    said = [(read_answer(e) or "", e) for e in episodes]
    answer = most_common(a for a, _ in said)
    return next((e for a, e in said if answer and a == answer), None)


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
    said = f"{unscored} of {len(episodes)} samples have no scored step and take no part" if unscored else ""
    row = {"name": name, **_counted(episodes), "failed_as": "apart", "tasks": len(starts)}
    return {**row, "unscored": unscored, "metrics": metrics, **({"warning": said} if said else {})}


# --- orders of the options --------------------------------------------------------------------------------------------


def chosen_option(e: Episode) -> int | None:
    """The option that an episode chose, by its place in the file; None for a blank."""
    options = e.task.data.get("options") or ()
    if len(options) < 2 or not e.turns:
        return None
    index = read_letter(e.turns[-1].text, len(options)).index
    return None if index is None else original_index(e.task, index)


def order_row(sets: Mapping[str, Sequence[Episode]], name: str = "all orders") -> dict[str, Any]:
    """The same questions in several orders: how often the same option is chosen. `agreement` is the share of pairs of
    orders with equal choices (a blank equals nothing), `constant` the share of questions with one choice in all orders,
    `always right` and `ever right` those right in all orders or in one. The first sample of each question counts."""
    tables: list[dict[str, tuple[int | None, bool]]] = []
    for played in sets.values():
        table: dict[str, tuple[int | None, bool]] = {}
        for e in played:
            if isinstance(e.outcome, Scored):
                table.setdefault(e.task.id, (chosen_option(e), won(e)))
        tables.append(table)
    common = [t for t in tables[0] if all(t in other for other in tables)] if tables else []
    if len(tables) < 2 or not common:
        raise DataError("to compare orders, at least two must have played the same questions.")
    agree, constant, always, ever = [], [], [], []
    for t in common:
        picks = [table[t][0] for table in tables]
        pairs = [(a, b) for i, a in enumerate(picks) for b in picks[i + 1 :]]
        agree.append(sum(a is not None and a == b for a, b in pairs) / len(pairs))
        constant.append(float(None not in picks and len(set(picks)) == 1))
        always.append(float(all(table[t][1] for table in tables)))
        ever.append(float(any(table[t][1] for table in tables)))
    metrics = {
        "agreement": mean_of(agree).plain(),
        "constant": proportion(constant).plain(),
        "always right": proportion(always).plain(),
        "ever right": proportion(ever).plain(),
    }
    every = [e for played in sets.values() for e in played]
    row = {"name": name, **_counted(every), "failed_as": "apart", "tasks": len(common), "metrics": metrics}
    left = len({e.task.id for e in every}) - len(common)
    return {**row, "warning": f"{left} questions were not scored in every order and take no part"} if left else row


# --- leaderboards -----------------------------------------------------------------------------------------------------


def predictions(episodes: Sequence[Episode], rows: int) -> tuple[np.ndarray, int]:
    """The number of the chosen option for every row of the file, in its order, and how many answers name no option:
    these say 0. Of several samples of a question the first that did not fail counts. A row that was not asked, or whose
    plays all failed, has no answer: then there are no predictions."""
    out, seen = np.zeros(rows, np.int64), set[int]()
    answered = 0
    failed: dict[int, tuple[str, str]] = {}
    for e in episodes:
        row = e.task.data.get("row")
        if not isinstance(row, int) or not 0 <= row < rows:
            raise DataError(f"task '{e.task.id}' has no row among the {rows} of the file: a leaderboard is for logic.")
        if isinstance(e.outcome, Failed) or not e.turns:
            failed.setdefault(row, (e.task.id, getattr(e.outcome, "error", "nothing was written")))
            continue
        if row in seen:
            continue
        seen.add(row)
        if (choice := chosen_option(e)) is not None:
            out[row] = choice
            answered += 1
    if len(seen) < rows:
        lost = {row: why for row, why in failed.items() if row not in seen}
        name, why = next(iter(lost.values()), ("", ""))
        told = [f"{len(lost)} plays failed, the first of '{name}' ({why})"] if lost else []
        never = rows - len(seen) - len(lost)
        told += [f"{never} questions were not asked"] if never else []
        raise DataError(f"{rows - len(seen)} of {rows} questions have no answer: {' and '.join(told)}.")
    return out, rows - answered


def write_predictions(path: Path, episodes: Sequence[Episode], rows: int) -> int:
    """Write predictions as an .npy file, as ReClor's leaderboard takes it; returns how many answers name no option. A
    file has an answer for every row or is not written."""
    if path.exists():
        raise RunError(f"{path} exists: choose another file.")
    found, blank = predictions(episodes, rows)
    held = io.BytesIO()
    np.save(held, found)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, held.getvalue())
    return blank
