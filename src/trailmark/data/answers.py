"""What a teacher has answered, one line each in a file that only grows.

A line is {"key", "text"}; the key is a hash of all that was asked. A process that dies in the middle of a line leaves one
without a newline behind: it is cut off when the file is opened again, and its question is the only one asked twice.
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
    """The same for the same request, whatever the order of its keys."""
    text = json.dumps(request, sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class Answers:
    """`path` None: nothing is kept beyond this process."""

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
            raise DataError("is no answer of a teacher: 'key' and 'text' must be text.", path, number)
        texts[row["key"]] = row["text"]
    return texts
