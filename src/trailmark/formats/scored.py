"""Files of scored text, the data of OREO.

trajectories   lines of {"prompt", "response", "reward"}; the prompt is the text that the model sees, template included.
               Without a reward the rows are for fine-tuning.
agent          a list of {"conversations": [{"role", "content"}, ...], "reward"}
pairs          lines of {"prompt", "chosen", "rejected"}
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from trailmark.errors import DataError
from trailmark.formats.conversations import checked_messages
from trailmark.formats.messages import plain_messages
from trailmark.formats.rows import Row, put_number
from trailmark.formats.turns import (
    Imported,
    Reader,
    Writer,
    conversation,
    episode,
    plain,
    prompt_of,
    reward_of,
    row_of,
    turn_of,
)  # fmt: skip
from trailmark.types import Annotation, Episode

SIDES = {"chosen": 1.0, "rejected": 0.0}


def _rest(value: dict[str, Any], *known: str) -> dict[str, Any]:
    return {k: v for k, v in value.items() if k not in known}


def trajectories_from_row(r: Reader, row: Row) -> Imported:
    """An episode of one turn; rows with equal prompts form a group."""
    v = row.fields(row.value, "", ["prompt", "response"], ["reward"])
    prompt, response = row.text(v["prompt"], "prompt"), row.text(v["response"], "response")
    reward, turn = row.number(v.get("reward"), "reward"), plain(r, prompt, response)
    info = {"format": "trajectories", "row": _rest(v, "prompt", "response")}
    return Imported([episode(r.starts.name(prompt), {"prompt": prompt}, [turn], reward, info)])


def trajectories_to_rows(w: Writer, episodes: Sequence[Episode]) -> list[dict[str, Any]]:
    rows = []
    for e in episodes:
        turn = turn_of(w, e)
        rows.append({"prompt": prompt_of(w, e, turn), "response": e.turns[turn].text, **row_of(e, "trajectories")})
        put_number(rows[-1], "reward", reward_of(e))
    return rows


def agent_from_row(r: Reader, row: Row) -> Imported:
    """If the second message is the assistant's "OK" to its instructions, it is canned: context, not a decision."""
    v = row.fields(row.value, "", ["conversations"], ["reward"])
    messages, reward = checked_messages(row, v, "conversations"), row.number(v.get("reward"), "reward")
    canned = [k for k, m in enumerate(messages[:2]) if k == 1 and m["role"] == "assistant" and m["content"] == "OK"]
    info = {"format": "agent", "row": _rest(v, "conversations")}
    return Imported([conversation(r, messages, reward, info, canned)])


def agent_to_rows(w: Writer, episodes: Sequence[Episode]) -> list[dict[str, Any]]:
    rows = [{"conversations": plain_messages(w, e, "agent"), **row_of(e, "agent")} for e in episodes]
    for row, e in zip(rows, episodes):
        put_number(row, "reward", reward_of(e))
    return rows


def pairs_from_row(r: Reader, row: Row) -> Imported:
    """Two episodes, the chosen one first, joined by `info["pair"]`. The annotation `preferred` is 1 or 0."""
    v = row.fields(row.value, "", ["prompt", *SIDES])
    prompt = row.text(v["prompt"], "prompt")
    turns = {side: plain(r, prompt, row.text(v[side], side)) for side in SIDES}
    names = {side: r.starts.name(prompt) for side in SIDES}
    info = {"format": "pairs", "row": _rest(v, "prompt", *SIDES), "pair": names["chosen"][1]}
    episodes = [episode(names[s], {"prompt": prompt}, [turns[s]], None, {**info, "side": s}) for s in SIDES]
    marks = [Annotation(e.id, "preferred", "episode", (m,), source="pairs") for e, m in zip(episodes, SIDES.values())]
    return Imported(episodes, marks)


def tie_pairs(episodes: Iterable[Episode]) -> list[tuple[Episode, Episode]]:
    """(chosen, rejected) of every pair, in the order in which pairs first appear."""
    pairs: dict[str, dict[str, Episode]] = {}
    for e in episodes:
        if e.info.get("side") not in SIDES or "pair" not in e.info:
            raise DataError(f"episode '{e.id}' is not a side of a pair: its info has no 'pair' and 'side'.")
        pairs.setdefault(e.info["pair"], {})[e.info["side"]] = e
    for name, sides in pairs.items():
        if missing := SIDES.keys() - sides:
            raise DataError(f"pair '{name}' lacks its {missing.pop()} episode.")
    return [(p["chosen"], p["rejected"]) for p in pairs.values()]


def pair_sides(pairs: Iterable[tuple[Episode, Episode]]) -> list[Episode]:
    """The two episodes of every pair as episodes of a file: the way back from `tie_pairs`. An episode may be in many
    pairs, so each side gets an id of its own."""
    out = []
    for n, both in enumerate(pairs):
        for side, e in zip(SIDES, both):
            info = {**e.info, "pair": f"pair {n}", "side": side}
            out.append(replace(e, id=f"{e.id} {side} {n}", info=info))
    return out


def pairs_to_rows(w: Writer, episodes: Sequence[Episode]) -> list[dict[str, Any]]:
    rows = []
    for chosen, rejected in tie_pairs(episodes):
        a, b = turn_of(w, chosen), turn_of(w, rejected)
        prompt, sides = prompt_of(w, chosen, a), {"chosen": chosen.turns[a].text, "rejected": rejected.turns[b].text}
        if prompt_of(w, rejected, b) != prompt:
            raise DataError(f"pair '{chosen.info['pair']}': the two sides answer different prompts.")
        rows.append({"prompt": prompt, **sides, **row_of(chosen, "pairs")})
    return rows
