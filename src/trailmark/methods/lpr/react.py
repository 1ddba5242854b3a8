"""ReAct solutions, the data of LPR: a list (or lines) of

    {"text": prompt, "label": 2, "response": [str, ...] or str, "pred": ["C", ...] or str, "id": 17}

Every response is an episode of one turn whose reasoning steps are token spans. A step begins at a line `Thought 3:`,
`Action 3:` or `Observation 3:` and goes up to the next such line; the spans cover the turn. The prompt's last words may
open the first step. A step with fewer than five characters after its first word belongs to the step before it, unless
it is `Thought 1:`. `info["steps"]` holds the kind of each step.

The reward is 1 if the prediction is the label (an index means a letter), and 0 if it is another or could not be read.
Where a response has a closed `Finish[…]`, it decides and not `pred`, and `info["text_says"]` holds its letter if the
two differ. An empty response is a failed call. Labels may be hidden (-1, null); then there is no reward.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trailmark.answers import FINISH, LETTERS, NEW_PROBLEM, read_answer
from trailmark.errors import DataError
from trailmark.formats.rows import Row
from trailmark.formats.turns import Imported, Reader, Writer, episode, plain, prompt_of, row_of, turn_of
from trailmark.types import Episode, Failed, Outcome, Scored

KNOWN = ("text", "label", "response", "pred", "id")
NAMED = re.compile(r"^(Thought|Action|Observation) ?[0-9]*:", re.MULTILINE)
OPTIONS = 5  # letters up to E name an option, whatever the label is


def named_steps(response: str, prompt: str = "") -> list[tuple[int, str]]:
    """Where each step of a ReAct response begins, and what it is: Thought, Action, Observation or Unknown."""
    found = list(NAMED.finditer(response))
    opened = [m[1] for m in NAMED.finditer(prompt) if not prompt[m.end() :].strip()]
    steps: list[tuple[int, str]] = []
    if not found or response[: found[0].start()].strip():
        steps.append((0, opened[0] if opened else "Unknown"))
    for m, after in zip(found, [*(n.start() for n in found[1:]), len(response)]):
        says = response[m.start() + len(m[1]) : after].strip()
        if len(says) >= 5 or m[0] == "Thought 1:" or not steps:
            steps.append((m.start() if steps else 0, m[1]))
    return steps


def is_right(label: Any, pred: str) -> bool | None:
    """Whether a prediction is the label; None if the label is hidden."""
    if label is None or label == -1:
        return None
    letter = re.fullmatch("[A-Z]", pred.strip())
    if letter and isinstance(label, int):
        return ord(letter[0]) - ord("A") == label
    return bool(pred.strip()) and pred.strip() == str(label).strip()


def read_label(row: Row, label: Any, preds: Sequence[Any]) -> Any:
    """A label that predictions can be compared with: an option's number, a text, or hidden."""
    whole = isinstance(label, int) and not isinstance(label, bool)
    if label is not None and not whole and not isinstance(label, str):
        raise row.bad(f"must be a whole number, a text or null, not {repr(label)[:60]}.", "label")
    letter = next((p for p in preds if isinstance(p, str) and re.fullmatch("[A-Z]", p.strip())), None)
    if whole and letter is not None and not -1 <= label < len(LETTERS):
        raise row.bad(f"is {label}, the number of no option, and a prediction is the letter {letter.strip()}.", "label")
    return label


def finished(text: str, label: Any, pred: str) -> str | None:
    """The letter in the closed `Finish[…]` of a text, empty if it names none or several. None if there is no such
    place, or if the answer is no letter."""
    if isinstance(label, str):
        label = LETTERS.find(label.strip()) if len(label.strip()) == 1 else -1
    if not isinstance(label, int) or not 0 <= label < len(LETTERS) or not re.fullmatch("[A-Z]?", pred.strip()):
        return None
    found = FINISH.search(text.split(NEW_PROBLEM)[0]) is not None
    return read_answer(text, max(OPTIONS, label + 1)).letter if found else None


def predicted(text: str, label: Any, pred: str) -> tuple[str, dict[str, str]]:
    """What a response predicts, and what `info` says of a `pred` that is something else."""
    answer = finished(text, label, pred)
    return (pred, {}) if answer is None or answer == pred.strip() else (answer, {"text_says": answer})


def react_from_row(r: Reader, row: Row) -> Imported:
    v = row.fields(row.value, "", ["text", "response", "id"], KNOWN)
    if not isinstance(v["id"], int | str) or isinstance(v["id"], bool):
        raise row.bad(f"must be a whole number or a text, not {repr(v['id'])[:60]}.", "id")
    task, prompt = str(v["id"]), row.text(v["text"], "text")
    if r.starts.holds(task):
        raise row.bad(f"is {v['id']!r}, as in an earlier row.", "id")
    listed = isinstance(v["response"], list)
    responses = row.listed(v["response"], "response") if listed else [v["response"]]
    preds = (row.listed(v["pred"], "pred") if listed else [v["pred"]]) if "pred" in v else [None] * len(responses)
    if len(preds) != len(responses):
        raise row.bad(f"has {len(preds)} entries for {len(responses)} responses.", "pred")
    label, plays = read_label(row, v.get("label"), preds), []
    for k, (response, pred) in enumerate(zip(responses, preds)):
        at = f"[{k}]" if listed else ""
        steps = named_steps(row.text(response, f"response{at}"), prompt)
        info: dict[str, Any] = {"format": "react", "listed": listed, "steps": [kind for _, kind in steps]}
        info |= {"pred": pred} if "pred" in v else {}
        right = None
        if pred is not None:
            answer, differs = predicted(response, label, row.text(pred, f"pred{at}"))
            right, info = is_right(label, answer), info | differs
        plays.append((plain(r, prompt, response, steps=[start for start, _ in steps]), right, info))
    plays[0][2]["row"] = {k: x for k, x in v.items() if k not in KNOWN}
    meta = {k: v[k] for k in ("id", "label") if k in v}
    return Imported([_play(r.starts.name(None, task), prompt, meta, *play) for play in plays])


def _play(name: tuple[str, str], prompt: str, meta: Any, turn: Any, right: bool | None, info: Any) -> Episode:
    e = episode(name, {"prompt": prompt}, [turn], None if right is None else float(right), info, meta)
    outcome: Outcome = e.outcome
    if not turn.text:
        outcome = Failed("the response is empty: the call that made it failed")
    elif right is not None:
        outcome = Scored(float(right), right)
    return replace(e, outcomes={"self": outcome})


def react_to_rows(w: Writer, episodes: Sequence[Episode]) -> list[dict[str, Any]]:
    """One record per task. `response` is a list if there are several, or if the file had a list."""
    records: dict[str, list[Episode]] = {}
    for e in episodes:
        records.setdefault(e.task.id, []).append(e)
    return [_record(w, plays) for plays in records.values()]


def _record(w: Writer, plays: Sequence[Episode]) -> dict[str, Any]:
    task, turns = plays[0].task, [turn_of(w, e) for e in plays]
    prompts = {prompt_of(w, e, t) for e, t in zip(plays, turns)}
    if len(prompts) > 1:
        raise DataError(f"task '{task.id}' was asked with {len(prompts)} different prompts.")
    for e in plays:
        if isinstance(e.outcome, Scored) and not ("label" in task.meta and "pred" in e.info):
            raise DataError(
                f"episode '{e.id}': a record needs a 'label' (in task.meta) and a 'pred' (in info) to be judged."
            )
    listed = len(plays) > 1 or plays[0].info.get("listed", False)
    responses, preds = [e.turns[t].text for e, t in zip(plays, turns)], [e.info.get("pred") for e in plays]
    out: dict[str, Any] = {"text": prompts.pop()} | ({"label": task.meta["label"]} if "label" in task.meta else {})
    out["response"] = responses if listed else responses[0]
    if any("pred" in e.info for e in plays):
        out["pred"] = preds if listed else preds[0]
    rest = next(filter(None, (row_of(e, "react") for e in plays)), {})
    return {**out, "id": task.meta.get("id", task.id), **rest}
