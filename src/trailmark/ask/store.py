"""A store of answers and numbers: a file of JSON lines that only grows, each with its key.

A line is written with one write as soon as its content is known. A killed process loses at most the line that it was
writing: an unfinished last line is cut off when the file is opened.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trailmark.errors import DataError
from trailmark.runs.atomic_files import append_text, cannot_write, whole_lines


def content_key(content: Any) -> str:
    """A key for content that JSON can hold: equal content, equal key."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


class Store:
    """With `path=None`, rows are kept in memory only. `field` is the name of the key in a line. Each line must have a
    text `text`, if it is given."""

    def __init__(self, path: str | Path | None = None, field: str = "key", text: str = ""):
        self.path, self.field = None if path is None else Path(path), field
        self._known: dict[str | None, dict[str, Any]] = {}
        self.lines: dict[str | None, int] = {}  # the line of each key that the file had
        self.twice: list[tuple[str | None, int]] = []  # keys with two different rows, and the line of the later one
        for i, line in enumerate(whole_lines(self.path) if self.path and self.path.exists() else (), 1):
            try:
                row = json.loads(line)
                key, found = row[field], {k: v for k, v in row.items() if k != field}
                if text and not isinstance(found[text], str):
                    raise ValueError
            except (ValueError, TypeError, KeyError, AttributeError):
                why = "is no line of this file of answers; move it away to ask again."
                raise DataError(why, self.path, i) from None
            if self._known.get(key, found) != found:
                self.twice.append((key, i))
            self._known[key], self.lines[key] = found, i

    def __contains__(self, key: str | None) -> bool:
        return key in self._known

    def __getitem__(self, key: str | None) -> dict[str, Any]:
        return self._known[key]

    def __iter__(self) -> Iterator[str | None]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def add(self, key: str | None, row: Mapping[str, Any]) -> None:
        if self.path is not None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as e:
                raise cannot_write(self.path, e) from e
            append_text(self.path, json.dumps({self.field: key, **row}, ensure_ascii=False) + "\n", "answers")
        self._known[key] = dict(row)
