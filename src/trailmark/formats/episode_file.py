"""The episodes of a file, read one at a time.

`survey` goes over the whole file once. It refuses what cannot be read, with file and line, and keeps for each episode
where it stands and how it is named. It does not encode a text that surely fits (`token_bounds.py`). `read` makes the
episodes of a row when they are needed: the same episodes, with the same ids, that `formats.read` gives.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trailmark import formats
from trailmark.errors import DataError
from trailmark.formats import own_episodes, turns
from trailmark.formats.line_file import Lines
from trailmark.formats.messages import unread
from trailmark.formats.rows import Row, RowFile
from trailmark.progress import counted
from trailmark.runs.store import from_json, read_segment
from trailmark.types import Annotation, Episode


class StoredFile:
    """One file of episodes. Names are known after the survey."""

    def __init__(self, format: str, path: str | Path, tokenizer: Any, seat: str, prefix: str = ""):
        self.format, self.path = format, Path(path)
        self.tokenizer, self.seat, self.prefix = tokenizer, seat, prefix
        self._names = array("q")  # start and count of each name that a row asked for, one after the other
        self._first = array("q")  # where those of a row begin
        self._rows: RowFile | None = None
        self._lines: Lines | None = None

    def survey(self, fits: Callable[[Episode], bool], use: Callable[[int, list[Episode]], None]) -> tuple[str, ...]:
        """Call `use` with the number of each row and its episodes. Their turns may only be measured, if `fits` is
        true of them: then they have as many tokens as they can have at most. What is wrong with rows that cannot be
        read is returned; if none can, that is an error."""
        if self.format == "episodes":
            self._survey_own(use)
            return ()
        self._rows = RowFile(self.path)
        self._first.extend([-1] * len(self._rows))
        exact = turns.Reader(self.tokenizer, self.seat, _Recorded(self.prefix, self._names))
        measuring = turns.measuring(exact)
        from_row = formats.row_reader(self.format)

        def look(i: int, row: Row) -> None:
            self._first[i] = len(self._names)
            try:
                made = from_row(measuring, row).episodes
            except turns.Unsure:
                made = from_row(exact, row).episodes
            else:
                made = made if all(fits(e) for e in made) else self.read(i)
            use(i, made)

        return self._rows.visit(look, True, unread)

    def _survey_own(self, use: Callable[[int, list[Episode]], None]) -> None:
        self._lines = Lines(self.path, blank=True)
        if not self._lines.ended:
            last = len(self._lines)
            raise DataError(f"line {last} is cut off: it does not end with a newline.", self.path, last)
        notes = own_episodes.beside(self.path)
        known: set[str] | None = set() if notes.exists() else None
        for i in counted(range(len(self._lines)), f"checking {self.path.name}", "episodes", len(self._lines)):
            made = self.read(i)
            if known is not None:
                known.add(made[0].id)
            use(i, made)
        if known is not None:
            own_episodes.check_notes(self.path, read_segment(notes, Annotation), known)

    def read(self, i: int) -> list[Episode]:
        """The episodes of row `i`."""
        if self._lines is not None:
            return [from_json(self._lines[i], self.path, self._lines.numbers[i])]
        assert self._rows is not None
        starts = _Given(self.prefix, self._names, self._first[i])
        reader = turns.Reader(self.tokenizer, self.seat, starts)
        return formats.row_reader(self.format)(reader, self._rows[i]).episodes


class _Recorded(turns.Starts):
    """Names, and a record of those that were given."""

    def __init__(self, prefix: str, record: array[int]):
        super().__init__(prefix)
        self.record = record

    def number(self, start: Any, task: str | None) -> tuple[int, int]:
        found = super().number(start, task)
        self.record.extend(found)
        return found


class _Given(turns.Starts):
    """The names that a row was given before."""

    def __init__(self, prefix: str, record: Sequence[int], at: int):
        super().__init__(prefix)
        self.record, self.at = record, at

    def number(self, start: Any, task: str | None) -> tuple[int, int]:
        self.at += 2
        return self.record[self.at - 2], self.record[self.at - 1]
