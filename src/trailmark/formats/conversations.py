"""Rows of a file as conversations, read strictly: messages, ShareGPT (without its scores), prompt and response, or the
texts of Reflect-RL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trailmark.errors import DataError
from trailmark.formats.rows import Row, RowFile, each
from trailmark.formats.speakers import read_talk

# Fields of a message or a row that change the prompt, or what is trained, in other programs. We do not read them, so
# they are refused instead of silently dropped. (Empty fields, as some exports have them, are harmless.)
CALLS = ("tool_calls", "function_call", "tool_call_id")
SPEAKERS = (
    "name", "weight", "train", "trainable", "loss", "prefix", "reasoning_content", "thinking",
    "images", "audio", "videos",
)  # fmt: skip
OF_A_ROW = ("system", "tools", "functions", "images", "videos", "audios")


def unread(row: Row) -> DataError | None:
    """The first field of a row that would be lost, as an error; None if there is none."""
    if not isinstance(row.value, dict):
        return None
    for key in OF_A_ROW:
        if row.value.get(key):
            return row.bad("is not read here: write it as a message from 'system', or into the prompt.", key)
    for part in ("messages", "conversations"):
        listed = row.value.get(part)
        for k, m in enumerate(listed if isinstance(listed, list) else []):
            for key in (*CALLS, *SPEAKERS) if isinstance(m, dict) else ():
                trained = key in ("weight", "train", "trainable", "loss") and m.get(key) in (1, True)
                if m.get(key) is None or m[key] in ("", [], {}) or trained:
                    continue
                into = "write the call into the message's content"
                how = into if key in CALLS else "write it into the content, or remove it"
                return row.bad(f"is not read here and would be lost: {how}.", f"{part}[{k}].{key}")
    return None


def read_messages(path: str | Path) -> list[list[dict[str, Any]]]:
    """Every row as a conversation. A row is {"messages": [...]}, {"prompt": ..., "response": ...} or a Reflect-RL
    text."""
    from trailmark.formats.marked_text import read_texts

    if (texts := read_texts(path)) is not None:
        return [_asked(prompt, response) for _, prompt, response, _ in texts]
    return [messages for _, messages in read_rows(path)]


def read_rows(path: str | Path) -> list[tuple[int, list[dict[str, Any]]]]:
    """Every row of messages as a conversation, with its line number."""
    return each(path, lambda row: (row.line or 0, conversation_of(row)), refused=unread)[0]


def count_rows(path: str | Path) -> int:
    """How many rows a file has. All are checked, and none is kept."""
    from trailmark.formats.marked_text import holds_texts, text_of

    rows = RowFile(path)
    texts = len(rows) > 0 and holds_texts(rows[0])

    def look(_: int, row: Row) -> None:
        (text_of if texts else conversation_of)(row)

    rows.visit(look, refused=None if texts else unread)
    return len(rows)


def conversation_of(row: Row) -> list[dict[str, Any]]:
    if isinstance(row.value, dict) and "messages" in row.value:
        return checked_messages(row, row.value, "messages")
    if isinstance(row.value, dict) and "conversations" in row.value and not row.value.keys() & {"prompt", "response"}:
        talk = [{k: m[k] for k in ("role", "content")} for m in read_talk(row, scores=False)]
        return answered(row, talk, "conversations")
    if isinstance(row.value, dict) and "next_chapter" in row.value:
        raise row.bad("is a field of a story: `trailmark data stories` makes conversations of stories.", "next_chapter")
    both = ["prompt", "response"]
    v = row.fields(row.value, "", both if isinstance(row.value, dict) and row.value.keys() & both else ["messages"])
    texts = [row.text(v[key], key) for key in both]
    return _asked(*texts)


def _asked(prompt: str, response: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]


def checked_messages(row: Row, value: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """The messages under `key`. Each has texts as role and content, and at least one is the assistant's."""
    messages = row.listed(value[key], key)
    for k, m in enumerate(messages):
        m = row.fields(m, f"{key}[{k}]", ["role", "content"])
        for part in ("role", "content"):
            row.text(m[part], f"{key}[{k}].{part}")
    return answered(row, messages, key)


def answered(row: Row, messages: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """The messages, of which one must be the assistant's."""
    if not any(m["role"] == "assistant" for m in messages):
        raise row.bad("there is no message of the assistant: nothing would be trained.", key)
    return messages


def rows_here(path: str) -> str:
    """How many rows a file of conversations has, in words for `--dry-run`."""
    return f"{count_rows(path)} rows" if Path(path).exists() else "which is not here yet"
