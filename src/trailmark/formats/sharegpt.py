"""ShareGPT with scores, the data of EPO: a list of

    {"conversations": [{"from": "human", "value": …}, {"from": "gpt", "value": …, "score": "0.99"}, …], "score": 7}

The item's `score` comes from the world and becomes the outcome. The score of a message was given later (a shaped
return, a judge's mark) and becomes the annotation `score` of its turn. A turn without a score has no annotation, not
zero. Both may be numbers or texts. Other keys (`index` of a message, `location` of an item) are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trailmark.errors import nearest
from trailmark.formats.rows import Row, put_number
from trailmark.formats.turns import Imported, Reader, Writer, conversation, messages_of, reward_of, row_of, turns_of
from trailmark.types import Annotation, Episode

ROLES = {"human": "user", "gpt": "assistant", "system": "system", "observation": "tool", "function_call": "assistant"}
TAGS = {"user": "human", "assistant": "gpt", "system": "system", "tool": "observation"}


def sharegpt_from_row(r: Reader, row: Row) -> Imported:
    item = row.fields(row.value, "", ["conversations"], ["score", "location"])
    listed = row.listed(item["conversations"], "conversations")
    messages = [_message(row, m, f"conversations[{k}]") for k, m in enumerate(listed)]
    rest = {k: v for k, v in item.items() if k != "conversations"}
    reward = row.number(rest.get("score"), "score")
    e = conversation(r, messages, reward, {"format": "sharegpt", "row": rest})
    answers = [m for m in messages if m["role"] == "assistant"]
    scores = [(i, row.number(m.get("score"), "score")) for i, m in enumerate(answers)]
    return Imported([e], [Annotation(e.id, "score", "turn", (s,), i, "sharegpt") for i, s in scores if s is not None])


def _message(row: Row, value: Any, key: str) -> dict[str, Any]:
    m = row.fields(value, key, ["from", "value"], ["score", "index"])
    tag, rest = row.text(m["from"], f"{key}.from"), {k: v for k, v in m.items() if k not in ("from", "value")}
    if tag not in ROLES:
        raise row.bad(f"is '{tag}', which is not a known speaker.{nearest(tag, ROLES)}", f"{key}.from")
    for own in {"role", "content", "tag"} & rest.keys():
        raise row.bad("does not belong into a message with 'from' and 'value'.", f"{key}.{own}")
    if row.number(m.get("score"), f"{key}.score") is not None and ROLES[tag] != "assistant":
        raise row.bad(f"is on a message from '{tag}'; only the model's messages have a score.", f"{key}.score")
    aside = {} if TAGS[ROLES[tag]] == tag else {"tag": tag}
    return {"role": ROLES[tag], "content": row.text(m["value"], f"{key}.value"), **aside, **rest}


def sharegpt_to_rows(w: Writer, episodes: Sequence[Episode]) -> list[dict[str, Any]]:
    """One item per episode, with the turn annotations named `score` as texts, as in EPO's own files."""
    scores = {(a.episode, a.turn): a.values[0] for a in w.annotations if a.name == "score" and a.level == "turn"}

    def item(e: Episode) -> dict[str, Any]:
        messages, out = messages_of(w, e), []
        answers = [k for k, m in enumerate(messages) if m["role"] == "assistant"]
        turn = dict(zip(reversed(answers), reversed(turns_of(w, e))))  # a canned first answer is not a turn
        for k, m in enumerate(messages):
            rest = {key: v for key, v in m.items() if key not in ("role", "content", "tag")}
            if k in turn and (score := scores.get((e.id, turn[k]))) is not None:
                put_number(rest, "score", score, text=True)
            out.append({"from": m.get("tag") or TAGS.get(m["role"], m["role"]), "value": m["content"], **rest})
        row = {"conversations": out, **row_of(e, "sharegpt")}
        put_number(row, "score", reward_of(e))
        return row

    return [item(e) for e in episodes]
