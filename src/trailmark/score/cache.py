"""A cache of answers: a file of JSON lines that only grows.

One line is one answer. It is written with one write as soon as the answer arrives. A killed process loses at most the
line that it was writing: an unfinished last line is ignored when the file is opened, and cut off before the next line
is written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trailmark.errors import DataError, RunError
from trailmark.plain_files import read_plain


class Cache:
    """With `path=None`, answers are kept in memory only. `field` is the name of the key in a line."""

    def __init__(self, path: str | Path | None = None, field: str = "key"):
        self.path, self.field = None if path is None else Path(path), field
        self._known: dict[str | None, dict[str, Any]] = {}
        self.lines: dict[str | None, int] = {}  # the line of each key that the file had
        self.twice: list[tuple[str | None, int]] = []  # keys with two different answers, and the line of the later one
        if self.path is not None and self.path.exists():
            try:
                lines = read_plain(self.path).split(b"\n")
            except OSError as e:
                raise DataError(f"cannot be read ({e.strerror}).", self.path) from None
            torn = lines.pop()
            for i, line in enumerate(lines, 1):
                try:
                    row = json.loads(line)
                    found = {k: v for k, v in row.items() if k != field}
                    if self._known.get(row[field], found) != found:
                        self.twice.append((row[field], i))
                    self._known[row[field]], self.lines[row[field]] = found, i
                except (ValueError, TypeError, KeyError):
                    raise DataError(
                        "is no line of this file of answers; move it away to ask again.", self.path, i
                    ) from None
            if torn:
                os.truncate(self.path, self.path.stat().st_size - len(torn))

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
            data = (json.dumps({self.field: key, **row}, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
                try:
                    size = os.fstat(fd).st_size
                    if os.write(fd, data) != len(data):
                        os.ftruncate(fd, size)
                        raise OSError("the disk is full")
                finally:
                    os.close(fd)
            except OSError as e:
                raise RunError(f"cannot write {self.path}: {e.strerror or e}.") from e
        self._known[key] = dict(row)
