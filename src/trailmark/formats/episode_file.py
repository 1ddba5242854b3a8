"""The episodes of a file, read one at a time.

`survey` goes over the whole file once. It refuses what cannot be read, with file and line, and keeps for each episode
where it stands and how it is named. It does not encode a text that surely fits (`token_bounds.py`). `load` makes the
episodes of a row and their annotations when they are needed: the same ones, with the same ids, that `formats.read`
gives.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from trailmark import formats
from trailmark.errors import DataError
from trailmark.formats import own_episodes, turns
from trailmark.formats.conversations import unread
from trailmark.formats.line_file import Lines
from trailmark.formats.rows import Row, RowFile
from trailmark.progress import counted
from trailmark.runs.episode_json import from_json
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
        self._notes: _Notes | None = None

    def survey(
        self,
        fits: Callable[[Episode], bool] | None,
        use: Callable[[int, turns.Imported], None],
        skip_bad: bool = True,
    ) -> tuple[str, ...]:
        """Call `use` with the number of each row and what it holds. Turns may only be measured, if `fits` is true of
        their episodes: then they have as many tokens as they can have at most. Without `fits` every row is encoded.
        What is wrong with rows that cannot be read is returned (without `skip_bad`: an error); if none can, that is an
        error."""
        if self.format == "episodes":
            self._survey_own(use)
            return ()
        self._rows = RowFile(self.path)
        self._first.extend([-1] * len(self._rows))
        exact = turns.Reader(self.tokenizer, self.seat, _Recorded(self.prefix, self._names))
        measuring = turns.measuring(exact)
        from_row = formats.row_reader(self.format)
        differ = 0

        def look(i: int, row: Row) -> None:
            nonlocal differ
            self._first[i] = len(self._names)
            try:
                found = from_row(exact if fits is None else measuring, row)
            except turns.Unsure:
                found = from_row(exact, row)
            else:
                found = found if fits is None or all(fits(e) for e in found.episodes) else self.load(i)
            differ += sum("text_says" in e.info for e in found.episodes)
            use(i, found)

        skipped = self._rows.visit(look, skip_bad, unread)
        if differ:
            print(f"note: {self.path}: {turns.differ(differ)}", file=sys.stderr)
        return skipped

    def _survey_own(self, use: Callable[[int, turns.Imported], None]) -> None:
        self._lines = _whole_lines(self.path)
        beside = own_episodes.beside(self.path)
        self._notes = _Notes(beside) if beside.exists() else None
        known: set[str] = set()
        for i in counted(range(len(self._lines)), f"checking {self.path.name}", "episodes", len(self._lines)):
            found = self.load(i)
            if self._notes is not None:
                known.add(found.episodes[0].id)
            use(i, found)
        if self._notes is not None:
            self._notes.check(self.path, known)

    def load(self, i: int) -> turns.Imported:
        """The episodes of row `i`, and their annotations."""
        if self._lines is not None:
            e = from_json(self._lines[i], self.path, self._lines.numbers[i])
            return turns.Imported([e], [] if self._notes is None else self._notes.of(e.id))
        assert self._rows is not None
        starts = _Given(self.prefix, self._names, self._first[i])
        reader = turns.Reader(self.tokenizer, self.seat, starts)
        return formats.row_reader(self.format)(reader, self._rows[i])

    def read(self, i: int) -> list[Episode]:
        """The episodes of row `i`."""
        return self.load(i).episodes


class _Notes:
    """The annotations beside a file of our own episodes. Only their places are held in memory."""

    def __init__(self, path: Path):
        self._lines = _whole_lines(path)
        self._places: dict[str, list[int]] = {}  # of the annotations of each episode
        for i in range(len(self._lines)):
            self._places.setdefault(self._read(i).episode, []).append(i)

    def _read(self, i: int) -> Annotation:
        return from_json(self._lines[i], self._lines.path, self._lines.numbers[i], Annotation)

    def of(self, episode: str) -> list[Annotation]:
        return [self._read(i) for i in self._places.get(episode, ())]

    def check(self, path: Path, known: Collection[str]) -> None:
        """Annotations must be of episodes whose ids are `known`."""
        for episode, places in self._places.items():
            if episode not in known:
                raise own_episodes.stranger(path, episode, self._lines.numbers[places[0]])


def _whole_lines(path: Path) -> Lines:
    """The lines of a file of ours, each of which ends with a newline."""
    lines = Lines(path, blank=True)
    if not lines.ended:
        last = len(lines)
        raise DataError(f"line {last} is cut off: it does not end with a newline.", path, last)
    return lines


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
