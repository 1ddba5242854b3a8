"""Solutions whose steps were judged, for reward models. Two layouts of lines:

    {"question": …, "steps": […], "labels": [1, 1, 0]}      a solution; 1: the step is right (or a class from 0 on)
    {"question": …, "original_process": […], "modified_process": […], "error_steps": [3]}     PRMBench

PRMBench changes a right solution: its row is two solutions, the original with right steps alone, and the changed one,
in which the steps of `error_steps` (counted from 1) are wrong. Steps stand on lines of their own behind the question.
Their labels are the annotation `label`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trailmark.errors import DataError
from trailmark.formats.rows import Row
from trailmark.formats.turns import Imported, Reader, Unsure, Writer, episode, plain
from trailmark.steps import without_end
from trailmark.types import Annotation, Episode

KNOWN = ("question", "steps", "labels", "original_process", "modified_process", "error_steps", "idx", "id")


def step_labels_from_row(r: Reader, row: Row) -> Imported:
    both = isinstance(row.value, dict) and "original_process" in row.value
    needed = ["question", *(("original_process", "modified_process", "error_steps") if both else ("steps", "labels"))]
    v = row.fields(row.value, "", needed, KNOWN)
    prompt = row.text(v["question"], "question").rstrip() + "\n"
    if both:
        wrong = _errors(row, v)
        plays = [(_steps(row, v, "original_process"), None), (_steps(row, v, "modified_process"), wrong)]
        told = [(s, [float(bad is None or n not in bad) for n in range(1, len(s) + 1)]) for s, bad in plays]
    else:
        steps = _steps(row, v, "steps")
        told = [(steps, _labels(row, v["labels"], len(steps)))]
    if r.bounds is not None:
        raise Unsure  # whether a token ends in each step
    name = v.get("idx", v.get("id"))
    task = None if name is None else str(name)  # rows of one id are solutions of one question
    episodes, notes = [], []
    for steps, labels in told:
        starts, at = [], 0
        for step in steps:
            starts.append(at)
            at += len(step) + 1
        turn = plain(r, prompt, "\n".join(steps), steps=starts)
        more = {k: x for k, x in v.items() if k not in KNOWN}
        e = episode(r.starts.name(prompt, task), {"prompt": prompt}, [turn], None, {"format": "step-labels"}, more)
        e = without_end(e, r.seat, r.tokenizer)
        if len(e.turns[0].steps) != len(steps):
            raise row.bad("has a step that no token ends in: it says nothing.")
        episodes.append(e)
        notes.append(Annotation(e.id, "label", "step", tuple(labels), 0, "file"))
    return Imported(episodes, notes)


def _steps(row: Row, v: dict[str, Any], key: str) -> list[str]:
    steps = [row.text(s, f"{key}[{i}]").strip() for i, s in enumerate(row.listed(v[key], key))]
    if "" in steps:
        raise row.bad("is an empty step.", f"{key}[{steps.index('')}]")
    return steps


def _errors(row: Row, v: dict[str, Any]) -> set[int]:
    found = v["error_steps"]
    size = len(v["modified_process"]) if isinstance(v["modified_process"], list) else 0
    good = isinstance(found, list) and all(isinstance(n, int) and not isinstance(n, bool) for n in found)
    if not good or not all(1 <= n <= size for n in found):
        raise row.bad(f"must be a list of numbers from 1 to {size}, not {repr(found)[:60]}.", "error_steps")
    return set(found)


def _labels(row: Row, given: Any, size: int) -> list[float]:
    listed = row.listed(given, "labels")
    if len(listed) != size:
        raise row.bad(f"has {len(listed)} entries for {size} steps.", "labels")
    if wrong := [x for x in listed if x is not None and (not isinstance(x, int) or x < -1)]:
        raise row.bad(f"must be whole numbers from 0 on (-1 or null: not judged), not {wrong[0]!r}.", "labels")
    return [-1.0 if x is None else float(x) for x in listed]


def step_labels_to_rows(w: Writer, episodes: Sequence[Episode]) -> list[dict[str, Any]]:
    """The first layout, a row for each solution."""
    known = {(a.episode, a.turn or 0): a.values for a in w.annotations if a.name == "label" and a.level == "step"}
    rows = []
    for e in episodes:
        at = len(e.turns) - 1
        turn, labels = e.turns[at], known.get((e.id, at))
        if labels is None or not turn.steps:
            raise DataError(f"episode '{e.id}' has no steps with an annotation 'label'.")
        steps = [w.tokenizer.decode(turn.tokens[a:b], skip_special_tokens=True).strip() for a, b in turn.steps]
        asked = e.task.data.get("prompt") or w.tokenizer.decode(e.context(at), skip_special_tokens=True)
        told = {"question": str(asked).rstrip(), "steps": steps, "labels": [int(x) for x in labels]}
        rows.append({**told, "id": e.task.id})
    return rows
