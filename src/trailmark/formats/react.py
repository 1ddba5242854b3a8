"""ReAct solutions, the data of LPR: a list (or lines) of

    {"text": prompt, "label": 2, "response": [str, ...] or str, "pred": ["C", ...] or str, "id": 17}

Every response is an episode of one turn whose reasoning steps are token spans. A step begins at a line `Thought 3:`,
`Action 3:` or `Observation 3:` and holds what follows, up to the next; the spans cover the turn. The first may be opened by
the prompt's last words. A step that says nothing (fewer than five characters behind its first word, but for `Thought 1:`)
belongs to the one before. `info["steps"]` says what each one is.

The reward is 1 where the prediction is the label (an index means a letter) and 0 where it is another or could not be read. An
empty response is a call that failed. Labels may be hidden (-1, null); then there is no reward.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trailmark.errors import DataError
from trailmark.formats.rows import Row, dump, each
from trailmark.formats.scored import only_turn
from trailmark.formats.turns import Imported, Starts, episode, plain, prompt_of, reward_of, row_of
from trailmark.types import Annotation, Episode, Failed, Scored

STEP = re.compile(r"^(Thought|Action|Observation) ?[0-9]*:", re.MULTILINE)
KNOWN = ("text", "label", "response", "pred", "id")


def split_steps(response: str, prompt: str = "") -> list[tuple[int, str]]:
    """Where each step of a response begins, and what it is: Thought, Action, Observation or Unknown."""
    found = list(STEP.finditer(response))
    opened = [m[1] for m in STEP.finditer(prompt) if not prompt[m.end() :].strip()]
    steps: list[tuple[int, str]] = []
    if not found or response[: found[0].start()].strip():
        steps.append((0, opened[0] if opened else "Unknown"))
    for m, after in zip(found, [*(n.start() for n in found[1:]), len(response)]):
        says = response[m.start() + len(m[1]) : after].strip()
        if len(says) >= 5 or m[0] == "Thought 1:" or not steps:
            steps.append((m.start() if steps else 0, m[1]))
    return steps


def is_right(label: Any, pred: str) -> bool | None:
    """Whether a prediction is the label; None where the label is hidden."""
    if label is None or label == -1:
        return None
    letter = re.fullmatch("[A-Z]", pred.strip())
    if letter and isinstance(label, int):
        return ord(letter[0]) - ord("A") == label
    return bool(pred.strip()) and pred.strip() == str(label).strip()


def read_react(
    path: str | Path, tokenizer: Any, *, seat: str = "policy", prefix: str = "", skip_bad: bool = False
) -> Imported:
    starts = Starts(prefix)

    def one(row: Row) -> list[Episode]:
        v = row.object(row.value, "", ["text", "response", "id"], KNOWN)
        if not isinstance(v["id"], int | str) or isinstance(v["id"], bool):
            raise row.bad(f"must be a whole number or a text, not {repr(v['id'])[:60]}.", "id")
        if (task := str(v["id"])) in starts.seen:
            raise row.bad(f"is {v['id']!r}, as in a row before.", "id")
        prompt, listed = row.text(v["text"], "text"), isinstance(v["response"], list)
        responses = row.list(v["response"], "response") if listed else [v["response"]]
        preds = v.get("pred") if listed else [v.get("pred")]
        preds = [None] * len(responses) if preds is None else row.list(preds, "pred")
        if len(preds) != len(responses):
            raise row.bad(f"has {len(preds)} entries for {len(responses)} responses.", "pred")
        info: dict[str, Any] = {"format": "react", "listed": listed}
        rest = {k: x for k, x in v.items() if k not in KNOWN}
        data, meta = {"prompt": prompt}, {k: v[k] for k in ("id", "label") if k in v}
        plays = []
        for k, (said, pred) in enumerate(zip(responses, preds)):
            place = f"[{k}]" if listed else ""
            said, right = row.text(said, f"response{place}"), None
            if "pred" in v:
                info["pred"] = pred
            if pred is not None:
                right = is_right(v.get("label"), row.text(pred, f"pred{place}"))
            steps = split_steps(said, prompt)
            turn = plain(tokenizer, prompt, said, seat, steps=[at for at, _ in steps])
            more = {**info, "steps": [kind for _, kind in steps]} | ({} if k else {"row": rest})
            plays.append((turn, None if right is None else float(right), more))
        made = [episode(starts.name(None, task), data, [t], r, more, meta) for t, r, more in plays]
        return [_judged(e) for e in made]

    made, skipped = each(path, one, skip_bad)
    return Imported([e for plays in made for e in plays], [], skipped)


def _judged(e: Episode) -> Episode:
    if not e.turns[0].text:
        return replace(e, outcomes={"self": Failed("the response is empty: the call that made it failed")})
    reward = reward_of(e)
    return e if reward is None else replace(e, outcomes={"self": Scored(reward, reward == 1.0)})


def write_react(
    path: str | Path,
    episodes: Iterable[Episode],
    tokenizer: Any,
    *,
    annotations: Sequence[Annotation] = (),
    seat: str | None = None,
) -> None:
    """One record per task; `response` is a list where there are several or there was one."""
    records: dict[str, list[Episode]] = {}
    for e in episodes:
        records.setdefault(e.task.id, []).append(e)
    dump(path, [_record(plays, tokenizer, seat) for plays in records.values()], "list")


def _record(plays: Sequence[Episode], tokenizer: Any, seat: str | None) -> dict[str, Any]:
    turns = [only_turn(e, seat, "react") for e in plays]
    prompts = {prompt_of(e, t, tokenizer) for e, t in zip(plays, turns)}
    if len(prompts) > 1:
        raise DataError(f"task '{plays[0].task.id}' was asked with {len(prompts)} different prompts.")
    meta = plays[0].task.meta
    for e in plays:
        if isinstance(e.outcome, Scored) and not ("label" in meta and "pred" in e.info):
            raise DataError(
                f"episode '{e.id}': a record says right or wrong by 'label' (in task.meta) and 'pred' (in info)."
            )
    listed = len(plays) > 1 or plays[0].info.get("listed", False)
    said = [e.turns[t].text for e, t in zip(plays, turns)]
    preds = [e.info.get("pred") for e in plays]
    out: dict[str, Any] = {"text": prompts.pop()} | ({"label": meta["label"]} if "label" in meta else {})
    out["response"] = said if listed else said[0]
    if any("pred" in e.info for e in plays):
        out["pred"] = preds if listed else preds[0]
    extras = [row_of(e, "react") for e in plays]
    return {**out, "id": meta.get("id", plays[0].task.id), **next(filter(None, extras), {})}
