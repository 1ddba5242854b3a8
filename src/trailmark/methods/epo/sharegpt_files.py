"""The two steps of the original on its files: a list of {"conversations": […], "score": outcome} with marks (`index`,
`location`) after the judge, and with a score on each answer after shaping."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trailmark.formats.conversations import unread
from trailmark.formats.rows import Row, each
from trailmark.formats.speakers import TAGS, Tags, read_talk
from trailmark.methods.epo.config import ShapeConfig
from trailmark.methods.epo.data import out_of_turn
from trailmark.methods.epo.judge import CriticalTurns, Told, told
from trailmark.methods.epo.shape import Marked, Shaped, shaped
from trailmark.runs.store import atomic_write


def read_items(path: Path, tags: Tags = TAGS) -> tuple[list[Row], list[str]]:
    """The rows whose speakers take turns, and what is wrong with the others."""
    kept, wrong = list[Row](), list[str]()

    def look(row: Row) -> None:
        if why := out_of_turn(row, tags):
            wrong.append(str(row.bad(why)))
        else:
            kept.append(row)

    each(path, look, refused=unread)
    return kept, wrong


def place_of(row: Row) -> str:
    return f"item {row.item}" if row.item is not None else f"line {row.line}"


def as_told(row: Row, most: float) -> Told:
    outcome = row.number(row.value.get("score"), "score")
    if outcome is None:
        raise row.bad("is missing: the judge is told the outcome.", "score")
    return told(f"{row.file}, {place_of(row)}", read_talk(row, scores=False), outcome, most)


def select(path: Path, out: Path, judge: CriticalTurns, most: float, failures: float) -> dict[str, int]:
    """Write the file with `index` on every message and `location` on every item that was judged. No text changes."""
    rows, wrong = read_items(path)
    shown = [as_told(row, most) for row in rows]
    found = judge.ask_all(shown, failures, "--failures")
    items = []
    for row, places in zip(rows, found, strict=True):
        messages = row.value["conversations"]
        first = int(messages[0].get("from") == "system")
        numbered = [{**m, "index": k - first} if k >= first else m for k, m in enumerate(messages)]
        item = {**row.value, "conversations": numbered}
        items.append(item if places is None else {**item, "location": places})
    _write(out, items)
    unjudged = sum(p is None for p in found)
    return {
        "items": len(items),
        "unjudged": unjudged,
        "left_out": len(wrong),
        "critical": sum(len(p or ()) for p in found),
    }


def shape(path: Path, out: Path, c: ShapeConfig, marks: bool = True) -> tuple[dict[str, int], Shaped]:
    """Write the file with a score on every answer, and without outcome and marks."""
    rows, wrong = read_items(path)
    made = shaped([_marked(row, marks) for row in rows], c)
    items = []
    for row, weights in zip(rows, made.weights, strict=True):
        left = iter(weights)
        talk = [_scored(m, left) for m in row.value["conversations"]]
        rest = {k: v for k, v in row.value.items() if k not in ("conversations", "score", "location")}
        items.append({"conversations": talk, **rest})
    _write(out, items)
    return {"items": len(items), "left_out": len(wrong)}, made


def _scored(m: dict[str, Any], weights: Any) -> dict[str, Any]:
    kept = {k: v for k, v in m.items() if k not in ("index", "score")}
    return {**kept, "score": str(float(next(weights)))} if TAGS.roles[m["from"]] == "assistant" else kept


def _marked(row: Row, marks: bool) -> Marked:
    """A row as a trajectory. Without `location` nobody judged it, which is not the same as nothing critical."""
    talk = read_talk(row, scores=False)
    first = int(talk[0]["role"] == "system")
    places = [k - first for k, m in enumerate(talk) if m["role"] == "assistant"]
    location: Sequence[Any] = []
    if marks:
        if "location" not in row.value:
            raise row.bad("is missing: this item was not judged. Judge it (`trailmark data select`), leave it out, or "
                          "shape by the outcome alone (--outcome-only).", "location")  # fmt: skip
        location = row.value["location"]
        if not isinstance(location, list):
            raise row.bad(f"must be a list of numbers, not {repr(location)[:60]}.", "location")
    for n, place in enumerate(location):
        if isinstance(place, bool) or place not in places:
            raise row.bad(f"is {place!r}, and the model's messages have the numbers {places}.", f"location[{n}]")
    outcome = row.number(row.value.get("score"), "score")
    if outcome is None:
        raise row.bad("is missing: the outcome of the play, from which its last turn is paid.", "score")
    group = json.dumps([m["content"] for m in talk[: first + 1]])
    return Marked(f"{row.file}, {place_of(row)}", group, len(places), {places.index(p) for p in location}, outcome)


def _write(out: Path, items: Sequence[Any]) -> None:
    atomic_write(out, (json.dumps(items, ensure_ascii=False, indent=4) + "\n").encode(), "data")
