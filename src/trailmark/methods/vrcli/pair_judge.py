"""A language model as judge of written texts, two at a time and in both orders. It writes the file that people's
judgements have, so `trailmark votes` reads it (`pairwise.py`).

A dimension goes to a text if the judge names it in both orders. If the order decides, or one answer is a tie, it is
`same`; how often that happened is counted apart (`swayed`). Texts are cleaned before they are shown (`chapters.py`).
Answers are stored by question, so nothing is asked twice.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from trailmark.ask.client import ask_each
from trailmark.errors import DataError, TrailmarkError
from trailmark.failures import Tries
from trailmark.methods.vrcli.pairs import Compared, compare_pair
from trailmark.methods.vrcli.pairwise import KEYS, SAME
from trailmark.plain_files import read_json
from trailmark.score.judge import ModelJudge
from trailmark.tasks.stories.prompts import CONTEXT

DIMENSIONS = {
    "plot": "whose events fit what came before, follow from each other and interest the reader",
    "character": "whose characters act and speak as what is known of them says",
    "creativity": "who has the fresher ideas and avoids what everyone would write",
    "development": "who shows people, places and conflicts in more depth",
    "language": "whose sentences are clearer, more varied and better to read",
    "overall_quality": "which text is the better one, all in all",
}
Flags = Callable[[str], dict[str, bool]]  # which genres a row has


@dataclass(frozen=True)
class Pair:
    """Two texts for one row."""

    row: str
    sample: int
    names: tuple[str, str]
    texts: tuple[str, str]


@dataclass
class Judged:
    """The rows of a file of judgements, and what they count to: wins of the first, of the second, agreed ties, and
    pairs that the order decided, by the two names and the dimension."""

    rows: list[dict[str, str]] = field(default_factory=list)
    counts: dict[tuple[str, str], dict[str, dict[str, int]]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)  # why pairs have no verdict


def pairs_of(texts: Mapping[str, Sequence[tuple[str, str]]]) -> list[Pair]:
    """All pairs of systems over the rows that both have; the k-th text of a row meets the k-th. `texts` are (row, text)
    by system."""
    held: dict[str, dict[str, list[str]]] = {}
    for name, each in texts.items():
        for row, text in each:
            held.setdefault(name, {}).setdefault(row, []).append(text)
    found = []
    for a, b in combinations(sorted(texts), 2):
        shared = [row for row in held.get(a, {}) if row in held.get(b, {})]
        if not shared:
            raise TrailmarkError(f"judge: {a} and {b} have no row in common, so there is nothing to compare.")
        for row in shared:
            both = zip(held[a][row], held[b][row])
            found += [Pair(row, k, (a, b), (x, y)) for k, (x, y) in enumerate(both)]
    return found


def ask_all(
    judge: ModelJudge, pairs: Sequence[Pair], rows: Mapping[str, Mapping[str, Any]], criteria: Mapping[str, str],
    failures: float = 0.0,
) -> list[Compared]:  # fmt: skip
    """The verdict on every pair, in order, of which a share `failures` may have none. A judge that is gone ends the
    work; what it has said is stored."""
    tries = Tries("pairs", failures, len(pairs))

    async def one(pair: Pair) -> Compared:
        verdict = await compare_pair(judge, CONTEXT.format(**rows[pair.row]).strip(), *pair.texts, dict(criteria))
        if verdict.failed:
            tries.failed(verdict.failed)
        else:
            tries.passed()
        return verdict

    made = ask_each("pairs", pairs, one, judge.config.at_once)
    failed = (p for p, verdict in zip(pairs, made) if verdict.failed)
    tries.settle(next((f"row '{p.row}', {' and '.join(p.names)}" for p in failed), ""))
    return made


def judged(pairs: Sequence[Pair], verdicts: Sequence[Compared], criteria: Mapping[str, str], flags: Flags) -> Judged:
    """The rows and counts of the verdicts. `flags` gives the genres of a row."""
    out = Judged()
    for pair, verdict in zip(pairs, verdicts):
        if verdict.failed:
            out.failed.append(f"row '{pair.row}', {pair.names[0]} and {pair.names[1]}: {verdict.failed}")
            continue
        none = {c: dict.fromkeys(("wins", "losses", "ties", "swayed"), 0) for c in criteria}
        counts, row = out.counts.setdefault(pair.names, none), {}
        for c in criteria:
            better = 0.5 if verdict.swayed[c] else verdict.better[c]
            row[c] = SAME if better == 0.5 else pair.names[0 if better > 0.5 else 1]
            counts[c]["swayed" if verdict.swayed[c] else {1.0: "wins", 0.5: "ties", 0.0: "losses"}[better]] += 1
        place = pair.row + (f" {pair.sample}" if pair.sample else "")
        row |= {"options": ",".join(pair.names), "texts": f"({place}, {place})"}
        out.rows.append({**row, **{g: str(is_one) for g, is_one in flags(pair.row).items()}})
    return out


def as_csv(rows: Sequence[Mapping[str, str]]) -> bytes:
    text = io.StringIO()
    table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue().encode()


def read_genres(path: Path | None, rows: Mapping[str, Mapping[str, Any]], criteria: Mapping[str, str]) -> Flags:
    """The genres of each row, from a JSON file of lists by book. A book may have several."""
    if path is None:
        return lambda row: {}
    held = _object(path)
    if not all(isinstance(v, list) and all(isinstance(g, str) and g for g in v) for v in held.values()):
        raise DataError('must hold a list of genres for each book, such as {"Emma": ["romance"]}.', path)
    for row, value in rows.items():
        if value.get("story_id") not in held:
            raise DataError(f"has no book '{value.get('story_id', '')}', to which row '{row}' belongs.", path)
    genres = list(dict.fromkeys(g for v in held.values() for g in v))
    if taken := next((g for g in genres if g in criteria or g in KEYS), None):
        raise DataError(f"'{taken}' cannot be a genre: it is a column of its own.", path)
    return lambda row: {g: g in held[rows[row]["story_id"]] for g in genres}


def read_criteria(path: Path | None) -> dict[str, str]:
    """The dimensions and what they ask, from a JSON file; None: those of VR-CLI."""
    if path is None:
        return dict(DIMENSIONS)
    held = _object(path)
    if not held or not all(isinstance(v, str) and v for v in held.values()) or any(k in (*KEYS, "id") for k in held):
        raise DataError('must hold a question for each dimension, such as {"plot": "whose events …"}.', path)
    return held


def _object(path: Path) -> dict[str, Any]:
    try:
        held = read_json(path)
    except OSError as problem:
        raise DataError(f"cannot be read ({problem.strerror}).", path) from None
    except ValueError as problem:
        raise DataError(f"is not JSON: {problem}.", path) from None
    if not isinstance(held, dict):
        raise DataError("must hold one JSON object.", path)
    return held
