"""Files of scored text, the data of OREO.

trajectories   lines of {"prompt", "response", "reward"}; the prompt is text as the model is to see it, template and all.
               Without a reward the rows are for fine-tuning.
agent          a list of {"conversations": [{"role", "content"}, ...], "reward"}
pairs          lines of {"prompt", "chosen", "rejected"}
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trailmark.errors import DataError, nearest
from trailmark.formats.rows import Row, dump, each, put_number
from trailmark.formats.turns import (
    Imported, Starts, conversation, episode, messages_of, plain, prompt_of, reward_of, row_of, turns_of,
)  # fmt: skip
from trailmark.types import Annotation, Episode

SIDES = {"chosen": 1.0, "rejected": 0.0}
SPEAKERS = ("system", "user", "assistant", "tool")


def _rest(value: dict[str, Any], *known: str) -> dict[str, Any]:
    return {k: v for k, v in value.items() if k not in known}


# --- trajectories ------------------------------------------------------------------------------------------------


def read_trajectories(
    path: str | Path, tokenizer: Any, *, seat: str = "policy", prefix: str = "", skip_bad: bool = False
) -> Imported:
    """An episode of one turn per row; rows with equal prompts form a group."""
    starts = Starts(prefix)

    def one(row: Row) -> Episode:
        v = row.object(row.value, "", ["prompt", "response"], ["reward"])
        prompt, response = row.text(v["prompt"], "prompt"), row.text(v["response"], "response")
        turn, reward = plain(tokenizer, prompt, response, seat), row.number(v.get("reward"), "reward")
        info = {"format": "trajectories", "row": _rest(v, "prompt", "response")}
        return episode(starts.name(prompt), {"prompt": prompt}, [turn], reward, info)

    made, skipped = each(path, one, skip_bad)
    return Imported(made, [], skipped)


def write_trajectories(
    path: str | Path,
    episodes: Iterable[Episode],
    tokenizer: Any,
    *,
    annotations: Sequence[Annotation] = (),
    seat: str | None = None,
) -> None:
    def one(e: Episode) -> dict[str, Any]:
        turn = only_turn(e, seat, "trajectories")
        row = {"prompt": prompt_of(e, turn, tokenizer), "response": e.turns[turn].text, **row_of(e, "trajectories")}
        put_number(row, "reward", reward_of(e))
        return row

    dump(path, [one(e) for e in episodes], "lines")


def only_turn(e: Episode, seat: str | None, name: str) -> int:
    if len(mine := turns_of(e, seat)) > 1:
        raise DataError(
            f"episode '{e.id}' has {len(mine)} turns and a row of '{name}' holds one: write it as 'agent' or 'sharegpt'."
        )
    return mine[0]


# --- conversations of an agent -----------------------------------------------------------------------------------


def read_agent(
    path: str | Path, tokenizer: Any, *, seat: str = "policy", prefix: str = "", skip_bad: bool = False
) -> Imported:
    """An episode per item. Where the second message is the assistant's "OK" to the instructions, it is canned: context,
    not a decision."""
    starts = Starts(prefix)

    def one(row: Row) -> Episode:
        v = row.object(row.value, "", ["conversations"], ["reward"])
        messages = []
        for k, m in enumerate(row.list(v["conversations"], "conversations")):
            key = f"conversations[{k}]"
            messages.append(m := row.object(m, key, ["role", "content"]))
            if row.text(m["role"], f"{key}.role") not in SPEAKERS:
                raise row.bad(f"is '{m['role']}', which is nobody.{nearest(m['role'], SPEAKERS)}", f"{key}.role")
            row.text(m["content"], f"{key}.content")
        canned = (
            [1] if len(messages) > 1 and (messages[1]["role"], messages[1]["content"]) == ("assistant", "OK") else []
        )
        info, reward = {"format": "agent", "row": _rest(v, "conversations")}, row.number(v.get("reward"), "reward")
        return conversation(tokenizer, starts, messages, seat, reward, info, canned)

    made, skipped = each(path, one, skip_bad)
    return Imported(made, [], skipped)


def write_agent(
    path: str | Path,
    episodes: Iterable[Episode],
    tokenizer: Any,
    *,
    annotations: Sequence[Annotation] = (),
    seat: str | None = None,
) -> None:
    def one(e: Episode) -> dict[str, Any]:
        own, messages = e.info.get("format") == "agent", messages_of(e, tokenizer, seat)
        said = messages if own else [{k: m[k] for k in ("role", "content")} for m in messages]
        row = {"conversations": said, **row_of(e, "agent")}
        put_number(row, "reward", reward_of(e))
        return row

    dump(path, [one(e) for e in episodes], "list")


# --- preferences -------------------------------------------------------------------------------------------------


def read_pairs(
    path: str | Path, tokenizer: Any, *, seat: str = "policy", prefix: str = "", skip_bad: bool = False
) -> Imported:
    """Two episodes per row, the chosen one first, tied by `info["pair"]`; the annotation `preferred` is 1 or 0."""
    starts = Starts(prefix)

    def one(row: Row) -> list[Episode]:
        v = row.object(row.value, "", ["prompt", *SIDES])
        prompt = row.text(v["prompt"], "prompt")
        turns = {side: plain(tokenizer, prompt, row.text(v[side], side), seat) for side in SIDES}
        names = {side: starts.name(prompt) for side in SIDES}
        info: dict[str, Any] = {"format": "pairs", "pair": names["chosen"][1], "row": _rest(v, "prompt", *SIDES)}
        return [episode(names[s], {"prompt": prompt}, [turns[s]], None, {**info, "side": s}) for s in SIDES]

    made, skipped = each(path, one, skip_bad)
    episodes = [e for both in made for e in both]
    marks = [Annotation(e.id, "preferred", "episode", (SIDES[e.info["side"]],), source="pairs") for e in episodes]
    return Imported(episodes, marks, skipped)


def tie_pairs(episodes: Iterable[Episode]) -> list[tuple[Episode, Episode]]:
    """(chosen, rejected) of every pair, in the order of the first seen."""
    pairs: dict[str, dict[str, Episode]] = {}
    for e in episodes:
        if e.info.get("side") not in SIDES or "pair" not in e.info:
            raise DataError(f"episode '{e.id}' is no side of a pair: its info has no 'pair' and 'side'.")
        pairs.setdefault(e.info["pair"], {})[e.info["side"]] = e
    for name, sides in pairs.items():
        if missing := SIDES.keys() - sides:
            raise DataError(f"pair '{name}' lacks its {missing.pop()} episode.")
    return [(p["chosen"], p["rejected"]) for p in pairs.values()]


def write_pairs(
    path: str | Path,
    episodes: Iterable[Episode],
    tokenizer: Any,
    *,
    annotations: Sequence[Annotation] = (),
    seat: str | None = None,
) -> None:
    def one(chosen: Episode, rejected: Episode) -> dict[str, Any]:
        turns = {s: only_turn(e, seat, "pairs") for s, e in zip(SIDES, (chosen, rejected))}
        prompt = prompt_of(chosen, turns["chosen"], tokenizer)
        if prompt_of(rejected, turns["rejected"], tokenizer) != prompt:
            raise DataError(f"pair '{chosen.info['pair']}': the two sides answer different prompts.")
        said = {s: e.turns[turns[s]].text for s, e in zip(SIDES, (chosen, rejected))}
        return {"prompt": prompt, **said, **row_of(chosen, "pairs")}

    dump(path, [one(*both) for both in tie_pairs(episodes)], "lines")
