"""Files that are read as a whole: only files of their own, and never more than fits into memory.

A pipe or a device may never end, and a small compressed file may hold many gigabytes. Each raises an OSError with a
sentence, which the readers already turn into an error with the file's name.
"""

from __future__ import annotations

import errno
import gzip
import json
import lzma
import os
import select
import stat
import zlib
from pathlib import Path
from typing import Any, BinaryIO

from trailmark.memory import need

MOST_UNPACKED = 512 << 20
SMALL = 1 << 20  # bytes that any machine has
PATIENCE = 10  # seconds until something must come out of a pipe
DEVICE = "it is a pipe or a device, not a file of its own"


def open_plain(path: str | Path, pipes: bool = False) -> BinaryIO:
    """An open file. With `pipes`, also a pipe, if something comes out of it soon."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # else opening a pipe waits for its writer
    kind = os.fstat(fd).st_mode
    if not stat.S_ISREG(kind) and not (pipes and stat.S_ISFIFO(kind)):
        os.close(fd)
        code = errno.EISDIR if stat.S_ISDIR(kind) else errno.EINVAL
        raise OSError(code, os.strerror(code) if stat.S_ISDIR(kind) else DEVICE, str(path))
    if stat.S_ISFIFO(kind) and not select.select([fd], [], [], PATIENCE)[0]:
        os.close(fd)
        raise OSError(errno.ETIMEDOUT, f"nothing came out of this pipe for {PATIENCE} seconds", str(path))
    os.set_blocking(fd, True)
    return os.fdopen(fd, "rb")


def read_plain(path: str | Path) -> bytes:
    """The content of a file."""
    with open_plain(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > SMALL:
            need(size, f"{path}: the whole file", "split it")
        return file.read()


def read_json(path: str | Path) -> Any:
    """The value in a JSON file. A ValueError says why there is none."""
    try:
        return json.loads(str(read_plain(path), "utf-8-sig"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_unpacked(path: Path) -> bytes:
    """The content of a file that may be compressed (.gz, .xz)."""
    opener: Any = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix)
    if opener is None:
        return read_plain(path)
    with open_plain(path) as file, opener(file) as unpacked:
        try:
            data = unpacked.read(MOST_UNPACKED + 1)
        except (zlib.error, lzma.LZMAError, EOFError) as problem:
            raise OSError(errno.EINVAL, f"its compression is damaged: {problem}") from None
    if len(data) > MOST_UNPACKED:
        raise OSError(errno.EFBIG, f"it unpacks to more than {MOST_UNPACKED >> 20} MB: unpack it first")
    return data
