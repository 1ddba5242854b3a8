"""A file of lines that is read one line at a time. Only the places of its lines are held in memory.

The file stays open. If another file takes its place under its name, the lines are still those of the first. If its
bytes are changed where it lies, the next read says so, because the places would no longer be right.
"""

from __future__ import annotations

import errno
import os
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from trailmark.errors import DataError
from trailmark.plain_files import open_plain
from trailmark.progress import counted
from trailmark.runs.data_files import must_be_file

BOM = b"\xef\xbb\xbf"
BLANK = b" \t\r\n"
BLOCK = 1 << 20
MOST_PIPED = 4 << 30
LONGEST = 256 << 20  # bytes of a line


class Lines:
    """`numbers[i]` is the line number, from 1, of line `i`. Blank lines are left out, unless `blank` is true."""

    def __init__(self, path: str | Path, blank: bool = False):
        self.path = Path(path)
        must_be_file(self.path)
        self._starts, self._sizes, self.numbers = array("q"), array("q"), array("q")
        self.opens = ""  # the first character of the file that is no white space
        self.ended = True  # the last line ends with a newline
        try:
            self._file = _seekable(self.path)
            self._stamp = self._look()
            self._index(blank)
        except OSError as problem:
            raise DataError(f"cannot be read ({problem.strerror}).", self.path) from None
        except UnicodeDecodeError:
            raise DataError("is not UTF-8 text.", self.path) from None

    def _index(self, blank: bool) -> None:
        at = 0
        lines = iter(lambda: self._file.readline(LONGEST + 1), b"")
        for number, line in enumerate(counted(lines, f"reading {self.path.name}", "lines"), 1):
            if len(line) > LONGEST:
                raise DataError(f"a line has more than {LONGEST >> 20} MB.", self.path, number)
            size, skip = len(line), len(BOM) if number == 1 and line.startswith(BOM) and not blank else 0
            text = line[skip:].decode()  # a newline is never part of another character, so each line must be UTF-8
            self.opens = self.opens or text.lstrip()[:1]
            self.ended = line.endswith(b"\n")
            if blank or line[skip:].strip(BLANK):
                self._starts.append(at + skip)
                self._sizes.append(size - skip - self.ended)
                self.numbers.append(number)
            at += size

    def _look(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, i: int) -> bytes:
        """Line `i` without its newline."""
        raw = os.pread(self._file.fileno(), self._sizes[i], self._starts[i])
        self._check()
        return raw

    def __iter__(self) -> Iterator[bytes]:
        """All lines. Many are read at once, which is faster than one after the other."""
        end = len(self)
        at = 0
        while at < end:
            first, last = self._starts[at], at
            while last + 1 < end and self._starts[last + 1] - first < BLOCK:
                last += 1
            raw = os.pread(self._file.fileno(), self._starts[last] + self._sizes[last] - first, first)
            self._check()
            for i in range(at, last + 1):
                start = self._starts[i] - first
                yield raw[start : start + self._sizes[i]]
            at = last + 1

    def _check(self) -> None:
        if self._look() != self._stamp:
            raise DataError(
                "was changed while it was being read: put it back as it was and go on with --resume, or begin another "
                "run with out=DIR.",
                self.path,
            )

    def whole(self) -> str:
        """The text of the whole file."""
        self._file.seek(0)
        return self._file.read().decode("utf-8-sig")


def _seekable(path: Path) -> BinaryIO:
    """The open file. A pipe can be read only once, so its bytes are copied to a temporary file."""
    file = open_plain(path, pipes=True)  # held open as long as its lines are read
    if file.seekable():
        return file
    with file:
        copy = tempfile.TemporaryFile()  # noqa: SIM115
        while block := file.read(BLOCK):
            copy.write(block)
            if copy.tell() > MOST_PIPED:
                raise OSError(errno.EFBIG, f"more than {MOST_PIPED >> 30} GB come out of this pipe: write a file")
    copy.seek(0)
    return copy
