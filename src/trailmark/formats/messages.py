"""`messages` JSONL (rows with a list of role/content) and prompt/response JSONL, read strictly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trailmark.errors import DataError, nearest


def read_messages(path: str | Path) -> list[list[dict[str, str]]]:
    """Every row as a conversation. A row is {"messages": [...]} or {"prompt": ..., "response": ...}."""
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except OSError as problem:
        raise DataError(f"cannot be read ({problem.strerror})", path) from None
    except UnicodeDecodeError:
        raise DataError("is not UTF-8 text", path) from None
    rows = [_row(line, path, n) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not rows:
        raise DataError("holds no rows", path)
    return rows


def count_rows(path: str | Path) -> int:
    return len(read_messages(path))


def _row(line: str, path: str | Path, number: int) -> list[dict[str, str]]:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as problem:
        raise DataError(f"is not JSON (column {problem.colno}: {problem.msg})", path, number) from None
    if not isinstance(row, dict):
        raise DataError("a row must be an object", path, number)
    if "messages" in row:
        messages = row["messages"]
        if not isinstance(messages, list) or not messages:
            raise DataError("must be a list of messages that is not empty", path, number, "messages")
        for k, m in enumerate(messages):
            if not isinstance(m, dict) or not isinstance(m.get("role"), str) or not isinstance(m.get("content"), str):
                raise DataError("a message needs a text 'role' and a text 'content'", path, number, f"messages[{k}]")
        if not any(m["role"] == "assistant" for m in messages):
            raise DataError("no message of the assistant: nothing would be trained", path, number, "messages")
        return messages
    for key in ("prompt", "response"):
        if not isinstance(row.get(key), str):
            missing = nearest(key, row) if row else ""
            raise DataError(
                f"is missing (a row is {{'messages': [...]}} or {{'prompt': …, 'response': …}}).{missing}",
                path,
                number,
                key,
            )
    return [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["response"]}]
