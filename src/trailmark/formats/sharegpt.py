"""ShareGPT with scores, the data of EPO: a list of

    {"conversations": [{"from": "human", "value": …}, {"from": "gpt", "value": …, "score": "0.99"}, …], "score": 7}

The item's `score` comes from the world and becomes the outcome. The score of a message was given later (a shaped
return, a judge's mark) and becomes the annotation `score` of its turn. A turn without a score has no annotation, not
zero. Both may be numbers or texts. Other keys (`index` of a message, `location` of an item) are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trailmark.formats.rows import Row, put_number
from trailmark.formats.speakers import TAGS, Tags, read_talk
from trailmark.formats.turns import Imported, Reader, Writer, conversation, messages_of, reward_of, row_of, turns_of
from trailmark.types import Annotation, Episode


def sharegpt_from_row(r: Reader, row: Row, tags: Tags = TAGS) -> Imported:
    messages = read_talk(row, tags)
    rest = {k: v for k, v in row.value.items() if k != tags.messages}
    reward = row.number(rest.get("score"), "score")
    e = conversation(r, messages, reward, {"format": "sharegpt", "row": rest})
    answers = [m for m in messages if m["role"] == "assistant"]
    scores = [(i, row.number(m.get("score"), "score")) for i, m in enumerate(answers)]
    return Imported([e], [Annotation(e.id, "score", "turn", (s,), i, "sharegpt") for i, s in scores if s is not None])


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
            out.append({"from": m.get("tag") or TAGS.speakers.get(m["role"], m["role"]), "value": m["content"], **rest})
        row = {"conversations": out, **row_of(e, "sharegpt")}
        put_number(row, "score", reward_of(e))
        return row

    return [item(e) for e in episodes]
