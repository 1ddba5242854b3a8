"""Unpack source archives (tar or zip) as plain files: nothing outside the folder, no links, no devices, no executables.

An archive with an absolute name or a `..` in it is refused as a whole. Links and devices inside are left out. Names,
sizes and their number are checked before anything is written, and sizes again while writing, because headers can lie.
An archive that is too large is refused by its headers, without reading on.
"""

from __future__ import annotations

import os
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from lzma import LZMAError
from pathlib import Path
from tempfile import mkdtemp
from typing import IO, Any

from trailmark.errors import DataError
from trailmark.tasks.auto_explore.repo import MOST_LEVELS

MOST_FILES, MOST_BYTES = 50_000, 512 << 20
Member = tuple[  # name, whether a folder, size, None for a link
    str, bool, int, "tarfile.TarInfo | zipfile.ZipInfo | None"
]
_BROKEN = (tarfile.TarError, zipfile.BadZipFile, zlib.error, LZMAError, EOFError, OSError, RuntimeError,
           NotImplementedError, ValueError)  # fmt: skip


def unpack(archive: str | Path, target: str | Path, most_files: int = MOST_FILES, most_bytes: int = MOST_BYTES) -> Path:
    """Unpack into the new folder `target`, without the single top folder of source archives. All of it or nothing."""
    archive, target = Path(archive), Path(target)
    if target.exists():
        raise DataError("exists already; nothing was unpacked over it.", target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as e:
        raise DataError(f"cannot be written ({(e.strerror or str(e)).lower()}).", target) from None
    try:
        _unpack(archive, work, most_files, most_bytes)
        inside = list(work.iterdir())
        root = inside[0] if len(inside) == 1 and inside[0].is_dir() else work
        os.chmod(root, 0o755)
        _settle(root, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _settle(made: Path, target: Path) -> None:
    try:
        os.rename(made, target)
    except OSError as e:
        if not target.is_dir():  # otherwise another process was faster, with the same files
            raise DataError(f"cannot be written ({(e.strerror or str(e)).lower()}).", target) from None


def _unpack(archive: Path, into: Path, most_files: int, most_bytes: int) -> None:
    try:
        with _members(archive) as (listed, read):
            members, total = [], 0
            for count, (name, folder, size, member) in enumerate(listed, 1):
                total += 0 if folder else max(0, size)
                if count > most_files or total > most_bytes:
                    raise DataError(
                        f"holds more than {most_files} entries or {most_bytes >> 20} MiB; it is not unpacked.", archive
                    )
                if member is not None:
                    _check_name(archive, name)
                    members.append((name, folder, member))
            left = most_bytes
            for name, folder, member in members:
                place = into.joinpath(*(p for p in name.split("/") if p not in ("", ".")))
                (place if folder else place.parent).mkdir(parents=True, exist_ok=True)
                if not folder:
                    left -= _copy(archive, read(member), place, left)
    except DataError:
        raise
    except _BROKEN as e:
        why = (str(e).splitlines() or [type(e).__name__])[0].rstrip(":")
        raise DataError(f"cannot be unpacked: {why}.", archive) from None


def _copy(archive: Path, stream: IO[bytes], place: Path, most: int) -> int:
    done = 0
    with stream, place.open("xb") as out:
        while part := stream.read(1 << 20):
            done += len(part)
            if done > most:
                raise DataError("holds more than its headers say; it is not unpacked.", archive)
            out.write(part)
    return done


def _check_name(archive: Path, name: str) -> None:
    bad = name.startswith("/") or ".." in name.split("/") or "\\" in name or "\0" in name or name[1:2] == ":"
    if bad:
        raise DataError(f"holds the name {name[:80]!r}, which leads out of its folder; it is not unpacked.", archive)
    if name.count("/") > MOST_LEVELS:
        raise DataError(f"holds folders more than {MOST_LEVELS} deep; it is not unpacked.", archive)


@contextmanager
def _members(archive: Path) -> Iterator[tuple[Iterable[Member], Callable[[Any], Any]]]:
    """The members of an archive, one by one, and how to read one of them."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as z:
            kinds = [(i, i.external_attr >> 28) for i in z.infolist()]  # 0: unknown, 4: folder, 8: file, 10: link
            yield [(i.filename, i.is_dir(), i.file_size, i if kind in (0, 4, 8) else None) for i, kind in kinds], z.open
        return
    with tarfile.open(archive, "r:*") as t:
        yield ((m.name, m.isdir(), m.size, m if m.isfile() or m.isdir() else None) for m in t), t.extractfile
