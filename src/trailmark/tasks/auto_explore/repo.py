"""A repository as a snapshot: names, sizes and identities are read once, contents when they are needed.

An episode only moves in the tree of names. The tree holds only plain folders and plain files. Hidden entries, links,
devices and names that cannot be shown on one line are left out and counted. So no command can name anything else, and a
path is never passed to the operating system as the actor wrote it. A file with a second name (a hard link) is left out
too, because its other name may lie outside the repository.

A file is opened folder by folder from the root, never through a link, and without blocking (a plain open of a FIFO
would wait for ever). Before and after reading it must still be the listed file, with the same size and time. A file
that was swapped for a link, or grows while it is read, is refused.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from trailmark.errors import TaskError
from trailmark.tasks.auto_explore.contents import kind_of

MOST_ENTRIES, MOST_LEVELS = 200_000, 64
HARD_LINKS = "hard links"
_FOLDER = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW
_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


class Refused(Exception):
    """A file is not read; the text says why."""


class Entry(NamedTuple):
    """One name in a folder. `kind` is None for a folder and "" for a file with an unknown suffix."""

    name: str
    path: str  # from the root, with "/"
    kind: str | None


class Stamp(NamedTuple):
    """The identity of a listed file."""

    device: int
    inode: int
    size: int
    time: int

    @classmethod
    def of(cls, s: os.stat_result) -> Stamp:
        return cls(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns)


@dataclass(eq=False)
class Snapshot:
    """`folders[path]` are the entries of a folder, sorted by name; the root is "". `skipped` counts what was left
    out."""

    root: Path
    folders: dict[str, tuple[Entry, ...]] = field(default_factory=dict)
    stamps: dict[str, Stamp] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    _root: tuple[int, int] = (0, 0)

    @property
    def files(self) -> list[str]:
        """The paths of all readable files, sorted."""
        return sorted(self.stamps)

    def read(self, path: str, most: int) -> tuple[bytes, bool]:
        """The first `most` bytes of a listed file, and whether there are more. `Refused` if it cannot be read
        safely."""
        listed = self.stamps.get(path)
        if listed is None:
            raise Refused("is not a file of this repository")
        *above, name = path.split("/")
        try:
            with _chain(self.root, above, self._root) as folder:
                fd = os.open(name, _FILE, dir_fd=folder)
        except OSError:
            raise Refused("cannot be opened any more as the file it was") from None
        try:
            _check(fd, listed)
            data = _read(fd, min(most, listed.size) + 1)
            _check(fd, listed)
        except OSError as e:
            raise Refused(f"cannot be read ({(e.strerror or 'unknown reason').lower()})") from None
        finally:
            os.close(fd)
        return data[:most], len(data) > most


def _check(fd: int, listed: Stamp) -> None:
    now = os.fstat(fd)
    if not stat.S_ISREG(now.st_mode) or Stamp.of(now) != listed:
        raise Refused("has changed since the repository was listed")
    if now.st_nlink > 1:
        raise Refused("has a second name (a hard link), which may lie outside the repository")


def _read(fd: int, most: int) -> bytes:
    parts, left = [], most
    while left > 0 and (part := os.read(fd, min(left, 1 << 20))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


@contextmanager
def _chain(root: Path, parts: list[str], identity: tuple[int, int] | None = None) -> Iterator[int]:
    """A descriptor of root/parts, opened folder by folder without following a link."""
    fd = os.open(root, _FOLDER)
    try:
        if identity is not None and _identity(fd) != identity:
            raise Refused("lies in a repository that was moved away")
        for part in parts:
            deeper = os.open(part, _FOLDER, dir_fd=fd)
            os.close(fd)
            fd = deeper
        yield fd
    finally:
        os.close(fd)


def _identity(fd: int) -> tuple[int, int]:
    now = os.fstat(fd)
    return now.st_dev, now.st_ino


def snapshot(root: str | Path, most_entries: int = MOST_ENTRIES) -> Snapshot:
    """List a repository. A folder that cannot be listed, is too large, or holds nothing readable is a TaskError."""
    try:
        place = Path(root).expanduser().resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as e:
        raise TaskError(f"repository '{root}' cannot be opened ({getattr(e, 'strerror', None) or e}).") from None
    if not place.is_dir():
        raise TaskError(f"repository '{root}' is not a folder.")
    made = Snapshot(place)
    try:
        with _chain(place, []) as fd:
            made._root = _identity(fd)
        todo, seen = [""], 0
        while todo:
            path = todo.pop()
            entries, folders = _list(made, path)
            made.folders[path] = entries
            todo += folders
            seen += len(entries)
            if seen > most_entries:
                raise TaskError(f"repository '{root}' has more than {most_entries} entries: name a folder inside it.")
    except (OSError, Refused) as e:
        why = getattr(e, "strerror", None) or str(e)
        raise TaskError(f"repository '{root}' cannot be listed ({why.lower()}).") from None
    if not made.stamps:
        left = ", ".join(f"{n} {what}" for what, n in sorted(made.skipped.items())) or "nothing"
        hint = " A file with a second name is not read: a copy of the folder (cp -r) has none."
        copy = hint * bool(made.skipped[HARD_LINKS])
        raise TaskError(
            f"repository '{root}' has no file that can be read (found: {left}); code, text and data files are.{copy}"
        )
    return made


def _list(made: Snapshot, path: str) -> tuple[tuple[Entry, ...], list[str]]:
    entries, folders = [], []
    parts = path.split("/") if path else []
    try:
        with _chain(made.root, parts, made._root) as fd, os.scandir(fd) as found:
            # Not e.stat(): on Windows the status of a listing lacks the number of names.
            names = [(e.name, os.stat(e.name, dir_fd=fd, follow_symlinks=False)) for e in found]
    except PermissionError:
        if not path:
            raise
        made.skipped["closed folders"] += 1
        return (), []
    for name, about in sorted(names, key=lambda x: x[0]):
        where = f"{path}/{name}" if path else name
        if why := _skip(name, about, len(parts)):
            made.skipped[why] += 1
        elif stat.S_ISDIR(about.st_mode):
            entries.append(Entry(name, where, None))
            folders.append(where)
        else:
            kind = kind_of(name)
            entries.append(Entry(name, where, kind))
            if kind:
                made.stamps[where] = Stamp.of(about)
            else:
                made.skipped["files of other kinds"] += 1
    return tuple(entries), folders


def _skip(name: str, about: os.stat_result, level: int) -> str:
    if name.startswith("."):
        return "hidden entries"
    if not name.isprintable():
        return "names that cannot be shown"
    if stat.S_ISLNK(about.st_mode):
        return "links"
    if not (stat.S_ISREG(about.st_mode) or stat.S_ISDIR(about.st_mode)):
        return "devices, pipes and sockets"
    if stat.S_ISREG(about.st_mode) and about.st_nlink > 1:
        return HARD_LINKS
    return "folders too deep" if level >= MOST_LEVELS else ""
