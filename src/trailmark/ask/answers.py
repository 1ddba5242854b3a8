"""A teacher's answers, one line each in a file that only grows.

A line is {"key", "text"}; the key is a hash of the whole request. A process that dies in the middle of a line leaves a
line without a newline. It is cut off when the file is opened again, and only its question is asked twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trailmark.errors import DataError
from trailmark.runs.episode_json import object_from_json
from trailmark.runs.store import append_line, whole_lines


def request_key(request: Mapping[str, Any]) -> str:
    """The same key for the same request, whatever the order of its fields."""
    text = json.dumps(request, sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class Answers:
    """Stored answers. With `path` None they are kept only in this process."""

    def __init__(self, path: Path | None = None):
        self.path, self.texts = path, {}
        if path is not None and path.exists():
            self.texts = _read(path)

    def get(self, key: str) -> str | None:
        return self.texts.get(key)

    def put(self, key: str, text: str) -> None:
        if self.path is not None:
            append_line(self.path, {"key": key, "text": text}, "answers")
        self.texts[key] = text


def _read(path: Path) -> dict[str, str]:
    texts = {}
    for number, line in enumerate(whole_lines(path), 1):
        row = object_from_json(line, path, number)
        if not isinstance(row.get("key"), str) or not isinstance(row.get("text"), str):
            raise DataError("is not an answer of a teacher: 'key' and 'text' must be text.", path, number)
        texts[row["key"]] = row["text"]
    return texts
