"""`messages` JSONL: rows with a list of role/content, read strictly. The plainest way to write a conversation down."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trailmark.formats.rows import Row, each
from trailmark.formats.turns import Imported, Reader, Writer, conversation, messages_of, row_of
from trailmark.types import Episode


def read_messages(path: str | Path) -> list[list[dict[str, Any]]]:
    """Every row as a conversation. A row is {"messages": [...]} or {"prompt": ..., "response": ...}."""
    return [messages for _, messages in read_rows(path)]


def read_rows(path: str | Path) -> list[tuple[int, list[dict[str, Any]]]]:
    """The same, each with the line it stands on."""
    return each(path, lambda row: (row.line or 0, _conversation(row)))[0]


def count_rows(path: str | Path) -> int:
    return len(read_messages(path))


def _conversation(row: Row) -> list[dict[str, Any]]:
    if isinstance(row.value, dict) and "messages" in row.value:
        return checked_messages(row, row.value, "messages")
    both = ["prompt", "response"]
    v = row.fields(row.value, "", both if isinstance(row.value, dict) and row.value.keys() & both else ["messages"])
    texts = [row.text(v[key], key) for key in both]
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts)]


def checked_messages(row: Row, value: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """The messages under `key`, each with a text as role and as content, and at least one of the assistant."""
    messages = row.listed(value[key], key)
    for k, m in enumerate(messages):
        m = row.fields(m, f"{key}[{k}]", ["role", "content"])
        for part in ("role", "content"):
            row.text(m[part], f"{key}[{k}].{part}")
    if not any(m["role"] == "assistant" for m in messages):
        raise row.bad("no message of the assistant: nothing would be trained.", key)
    return messages


def plain_messages(w: Writer, e: Episode, name: str) -> list[dict[str, Any]]:
    """The conversation of an episode; whatever else its messages say stays only where they came from."""
    messages = messages_of(w, e)
    return messages if e.info.get("format") == name else [{k: m[k] for k in ("role", "content")} for m in messages]


def messages_from_row(r: Reader, row: Row) -> Imported:
    v = row.fields(row.value, "", ["messages"])
    rest = {k: x for k, x in v.items() if k != "messages"}
    messages = checked_messages(row, v, "messages")
    return Imported([conversation(r, messages, None, {"format": "messages", "row": rest})])


def messages_to_rows(w: Writer, episodes: Sequence[Episode]) -> list[dict[str, Any]]:
    return [{"messages": plain_messages(w, e, "messages"), **row_of(e, "messages")} for e in episodes]
