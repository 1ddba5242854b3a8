"""Rows of JSON: a list in one file, or one object per line. The file's first character says which.

Reading is strict (UTF-8, no key twice, no NaN, no half characters). Every error names the file, the line or the item of
the list (from 0), and the key. An unknown key is kept with its row, unless it looks like a known key that is missing: a
misspelt `reward` must not become a row without a reward.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from trailmark.errors import DataError
from trailmark.formats.line_file import Lines
from trailmark.progress import counted
from trailmark.runs.atomic_files import atomic_write

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row:
    """One row and its place: `line` from 1, or `item` of a list from 0."""

    value: Any
    file: Path
    line: int | None = None
    item: int | None = None

    def bad(self, why: str, key: str = "") -> DataError:
        places = [] if self.item is None else [f"[{self.item}]"]
        return DataError(why, self.file, self.line, ".".join(places + ([key] if key else [])) or None)

    def fields(self, value: Any, key: str, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Any]:
        """`value` as an object with these keys. `key` is the path to it, empty for the row itself."""
        if not isinstance(value, dict):
            raise self.bad(f"must be an object, not {repr(value)[:60]}.", key)
        way = f"{key}." if key else ""
        missing = [k for k in (*required, *optional) if k not in value]
        for k in value.keys() - {*required, *optional}:
            if close := difflib.get_close_matches(k, missing, 1, 0.75):
                raise self.bad(f"is not known. Did you mean '{close[0]}'?", way + k)
        for k in required:
            if k in missing:
                raise self.bad(f"is missing. Found: {', '.join(value) or 'nothing'}.", way + k)
        return value

    def text(self, value: Any, key: str) -> str:
        if not isinstance(value, str):
            raise self.bad(f"must be text, not {repr(value)[:60]}.", key)
        return value

    def listed(self, value: Any, key: str) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise self.bad(f"must be a list that is not empty, not {repr(value)[:60]}.", key)
        return value

    def number(self, value: Any, key: str) -> float | None:
        """A number, or a text that is a number; None for null."""
        found = None if value is None else as_number(value)
        if value is not None and found is None:
            raise self.bad(f"must be a finite number, not {repr(value)[:60]}.", key)
        return found


def as_number(value: Any) -> float | None:
    if not isinstance(value, int | float | str) or (isinstance(value, str) and "_" in value):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


class RowFile:
    """The rows of a file, parsed when they are asked for. A list is one JSON value, so it is parsed whole and kept;
    of lines only the places are kept."""

    def __init__(self, path: str | Path):
        self.path, self._lines = Path(path), Lines(path)
        self._items: list[Any] | None = None
        if self._lines.opens == "[":
            self._items = _parse(self._lines.whole(), self.path, None)

    def __len__(self) -> int:
        return len(self._lines if self._items is None else self._items)

    def __getitem__(self, i: int) -> Row:
        return self._row(i, self._lines[i] if self._items is None else b"")

    def _row(self, i: int, line: bytes) -> Row:
        if self._items is not None:
            return Row(self._items[i], self.path, None, i)
        number = self._lines.numbers[i]
        return Row(_parse(line.decode(), self.path, number), self.path, number)

    def visit(
        self,
        use: Callable[[int, Row], None],
        skip_bad: bool = False,
        refused: Callable[[Row], DataError | None] | None = None,
    ) -> tuple[str, ...]:
        """Call `use` with the number of each row, from 0, and the row. The errors of the rows that `skip_bad` left
        out are returned. `refused` returns an error if a row holds something that would be lost. Then the error names
        the first such row and counts the others."""
        used = 0
        wrong: list[str] = []
        lost: list[DataError] = []
        lines = self._lines if self._items is None else [b""] * len(self)
        for i, line in enumerate(counted(lines, f"checking {self.path.name}", "rows", len(self))):
            try:
                row = self._row(i, line)
                if refused is not None and (why := refused(row)) is not None:
                    if skip_bad:
                        raise why
                    lost.append(why)
                elif not lost:
                    _placed(use, i, row)
                    used += 1
            except DataError as problem:
                if not skip_bad:
                    raise
                wrong.append(str(problem))
        if lost:
            share = f"{len(lost)} of {len(self)} rows have this"
            raise _told(lost[0], f"{lost[0].text} {share} (`trailmark convert --skip-bad` leaves them out).")
        if not used:
            raise DataError(f"no row can be used; the first: {wrong[0]}" if wrong else "holds no rows.", self.path)
        return tuple(wrong)


def each(
    path: str | Path,
    make: Callable[[Row], T],
    skip_bad: bool = False,
    refused: Callable[[Row], DataError | None] | None = None,
) -> tuple[list[T], tuple[str, ...]]:
    """The results of `make` for every row, and the errors of the rows that were left out (`RowFile.visit`)."""
    made: list[T] = []
    wrong = RowFile(path).visit(lambda _, row: made.append(make(row)), skip_bad, refused)
    return made, wrong


def _told(problem: DataError, text: str) -> DataError:
    return DataError(text, problem.file, problem.line, problem.key)


def _placed(use: Callable[[int, Row], None], i: int, row: Row) -> None:
    try:
        use(i, row)
    except DataError as problem:  # from the chat template, which knows no files
        raise problem if problem.file else row.bad(str(problem)) from problem


def _parse(text: str, path: Path, line: int | None, decoder: json.JSONDecoder | None = None) -> Any:
    try:
        if text.startswith("\ufeff"):
            raise ValueError("a BOM may only stand at the start of a file")
        value = (decoder or _decoder).decode(text)
        if "\\u" in text:  # only an escape can write half a surrogate pair, which is not text
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as problem:
        raise DataError(f"is not JSON: {problem}.", path, line) from None
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [k for k, _ in pairs]
    if twice := next((k for k in keys if keys.count(k) > 1), None) if len(set(keys)) < len(keys) else None:
        raise ValueError(f"key '{twice}' appears twice")
    return dict(pairs)


def parse_line(text: str, path: Path, line: int) -> Any:
    """The value of a line of a file, parsed as strictly as a row. Numbers must be finite, whatever their key."""
    return _parse(text, path, line, _finite_decoder)


def _finite(text: str) -> float:
    """Parse a number. One like 1e999 is refused: it has no finite value."""
    return value if math.isfinite(value := float(text)) else _no_number(text)


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


_decoder = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_number)
_finite_decoder = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_number, parse_float=_finite)


def dump(path: str | Path, rows: Iterable[Mapping[str, Any]], layout: Literal["list", "lines"]) -> None:
    """Write rows, all or none. A name that ends in .json or .jsonl decides the layout; otherwise the format does."""
    path, rows = Path(path), list(rows)
    if not rows:
        raise DataError("there are no episodes to write.", path)
    listed = {".json": True, ".jsonl": False}.get(path.suffix, layout == "list")
    try:
        if listed:
            data = json.dumps(rows, ensure_ascii=False, allow_nan=False, indent=4) + "\n"
        else:
            data = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
        raw = data.encode()
    except (TypeError, ValueError) as problem:
        raise DataError(f"cannot be written: {problem}.", path) from None
    atomic_write(path, raw, "convert")


def write_lines(path: Path, values: Iterable[Any]) -> None:
    """Write values as lines, all or none. There may be no value at all."""
    atomic_write(path, "".join(json.dumps(v, ensure_ascii=False) + "\n" for v in values).encode(), "lines")


def read_lines(path: Path) -> list[Any]:
    """The values that `write_lines` wrote."""
    return each(path, lambda row: row.value)[0] if path.stat().st_size else []


def put_number(row: dict[str, Any], key: str, value: float | None, text: bool = False) -> None:
    """Set a number. If the row already has the same number in another spelling ("0.50", true, 1), that stays."""
    if value is None:
        if row.get(key) is not None:
            del row[key]
    elif as_number(row.get(key)) != value:
        row[key] = str(value) if text else int(value) if value.is_integer() else value


def json_lines(rows: Iterable[Any]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows).encode()
