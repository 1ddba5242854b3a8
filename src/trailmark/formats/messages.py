"""`messages` JSONL: rows with a list of role/content, read strictly. The plainest format of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trailmark.formats.conversations import checked_messages
from trailmark.formats.rows import Row
from trailmark.formats.turns import Imported, Reader, Writer, conversation, messages_of, row_of
from trailmark.types import Episode


def plain_messages(w: Writer, e: Episode, name: str) -> list[dict[str, Any]]:
    """The conversation of an episode. Other fields of its messages are kept only in the format they came from."""
    messages = messages_of(w, e)
    return messages if e.info.get("format") == name else [{k: m[k] for k in ("role", "content")} for m in messages]


def messages_from_row(r: Reader, row: Row) -> Imported:
    v = row.fields(row.value, "", ["messages"])
    rest = {k: x for k, x in v.items() if k != "messages"}
    messages = checked_messages(row, v, "messages")
    return Imported([conversation(r, messages, None, {"format": "messages", "row": rest})])


def messages_to_rows(w: Writer, episodes: Sequence[Episode]) -> list[dict[str, Any]]:
    return [{"messages": plain_messages(w, e, "messages"), **row_of(e, "messages")} for e in episodes]
