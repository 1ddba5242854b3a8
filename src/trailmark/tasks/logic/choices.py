"""What `trailmark eval` does with questions with options alone: the same questions in several orders of their options
(`--vary order=…`), and the file of predictions that a leaderboard wants (`--leaderboard`)."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trailmark.answers import original_index, read_answer
from trailmark.episodes import counted, won
from trailmark.errors import DataError, RunError, TrailmarkError
from trailmark.runs.atomic_files import atomic_write
from trailmark.stats.intervals import mean_of, proportion
from trailmark.types import Episode, Failed, Scored


def chosen_option(e: Episode) -> int | None:
    """The option that an episode chose, by its place in the file; None for a blank."""
    options = e.task.data.get("options") or ()
    if len(options) < 2 or not e.turns:
        return None
    index = read_answer(e.turns[-1].text, len(options)).index
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
    row = {"name": name, **counted(every), "failed_as": "apart", "tasks": len(common), "metrics": metrics}
    left = len({e.task.id for e in every}) - len(common)
    return {**row, "warning": f"{left} questions were not scored in every order and take no part"} if left else row


# --- leaderboards -----------------------------------------------------------------------------------------------------


class Leaderboard:
    """The file of predictions. It needs an answer to every question of the files."""

    def __init__(self, source: Any, split: str):
        asked, self.size = len(source.questions(split)), source.size(split)
        if asked < self.size:
            raise TrailmarkError(
                f"eval: --leaderboard needs an answer to every question, and cut={source.cut} leaves {asked} of "
                f"{self.size} to '{split}': name a split of the files with --split, and leave out cut."
            )

    @staticmethod
    def options(options: Mapping[str, Any]) -> dict[str, Any]:
        """The options of the task with which it asks also those questions that it would leave out."""
        return {**options, **({"repeats": "keep"} if options.get("repeats", "leave") == "leave" else {})}

    def write(self, path: Path, name: str, episodes: Sequence[Episode]) -> str:
        """Write the file, and say what is in it."""
        blank = write_predictions(path, episodes, self.size)
        return f"{path}: {self.size} predictions of {name}, {blank} of answers that name no option (these say 0)."


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
