"""Files that are written whole or not at all, read line by line, and locked.

A file is written under a temporary name, synced and renamed. So a reader sees the complete file or none.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import threading
from pathlib import Path

from trailmark.errors import DataError, DiskFull, RunBusy, RunError
from trailmark.fault_points import point
from trailmark.plain_files import open_plain, read_plain

_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up", errno.EFBIG: "a limit on the "
         "size of files is reached"}  # fmt: skip
LINK = "is a link: nothing in a run's folder is written through links. Put the file or folder itself in its place"


def cannot_write(path: Path, e: OSError) -> RunError:
    if e.errno == errno.ELOOP:
        return RunError(f"{path} {LINK}.")
    if why := _FULL.get(e.errno or 0):
        again = "make room and give the command again; a run that has begun goes on with --resume"
        return DiskFull(f"cannot write {path}: {why}; {again}.")
    return RunError(f"cannot write {path}: {(e.strerror or str(e)).lower()}.")


def sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def file_hash(path: Path) -> str:
    try:
        with open_plain(path) as f:
            return hashlib.file_digest(f, "sha256").hexdigest()  # pyrefly: ignore[bad-argument-type]
    except OSError as e:
        raise DataError(f"cannot be read ({e.strerror}).", path) from None


def atomic_write(path: str | Path, data: bytes, name: str = "file") -> None:
    """Replace the content of `path` by `data`, or leave the file as it was. `name` is the prefix of its fault
    points."""
    path, view = Path(path), memoryview(data)
    temp = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    point(f"{name}.before")
    try:
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
        try:
            _write_all(fd, view[: len(view) // 2])
            point(f"{name}.half")
            _write_all(fd, view[len(view) // 2 :])
            os.fsync(fd)
        finally:
            os.close(fd)
        point(f"{name}.synced")
        os.replace(temp, path)
        point(f"{name}.renamed")
        sync_folder(path.parent)
    except BaseException as e:
        with contextlib.suppress(OSError):
            temp.unlink(missing_ok=True)
        if isinstance(e, OSError):
            raise cannot_write(path, e) from e
        raise


def remove_file(path: Path) -> None:
    """Delete a file, if it is there."""
    try:
        if path.exists() or path.is_symlink():
            path.unlink(missing_ok=True)
    except OSError as e:
        raise cannot_write(path, e) from e


def being_written(temp: Path) -> bool:
    """Whether the process in the name of a temporary file is alive. (Another process of a study may be writing next to
    the run.)"""
    pid = temp.name.split(".")[-2].partition("-")[0]
    if not pid.isdigit() or int(pid) == os.getpid():
        return False
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def lines_of(path: str | Path, missing: bool = False) -> list[bytes]:
    """What lies between the newlines of a file: the last is not empty if that line is still being written, or is cut
    off. With `missing`, a file that is not there has no lines."""
    try:
        return read_plain(path).split(b"\n")
    except OSError as e:
        if missing and isinstance(e, FileNotFoundError):
            return [b""]
        raise DataError(f"cannot be read ({e.strerror}).", path) from None


def append_text(path: str | Path, text: str, name: str) -> None:
    path, data = Path(path), text.encode("utf-8", "surrogatepass")
    point(f"{name}.before")
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        try:
            size = os.fstat(fd).st_size
            if os.write(fd, data) != len(data):
                os.ftruncate(fd, size)
                raise OSError(errno.ENOSPC, "short write")
        finally:
            os.close(fd)
    except OSError as e:
        raise cannot_write(path, e) from e
    point(f"{name}.after")


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a file that only grows. An unfinished last line is cut off, in the file too."""
    try:
        raw = read_plain(path)
        end = raw.rfind(b"\n") + 1
        if end < len(raw):
            os.truncate(path, end)
    except OSError as e:
        raise DataError(f"cannot be read ({e.strerror}).", path) from None
    return raw[:end].split(b"\n")[:-1]


def hold(path: Path, what: str) -> int:
    """Lock a file until its descriptor is closed or the process dies. RunBusy if another process holds the lock."""
    import fcntl

    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as e:
        problem = cannot_write(path, e)
        if e.errno in (errno.EROFS, errno.EACCES):
            raise RunError(f"{problem} Copy {path.parent} to where you may write, and go on there.") from None
        raise problem from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        pid = os.read(fd, 32).decode("ascii", "replace").strip()
        os.close(fd)
        if e.errno not in (errno.EAGAIN, errno.EACCES):
            raise RunError(f"{what} cannot be locked ({e.strerror}); choose another disk with out=DIR.") from e
        raise RunBusy(f"{what} is in use by process {pid or '?'}: wait for it or stop it first.") from None
    if not os.path.exists(path) or os.fstat(fd).st_ino != os.stat(path).st_ino:
        os.close(fd)  # its holder has just deleted it
        return hold(path, what)
    try:
        os.ftruncate(fd, 0)
        os.write(fd, f"{os.getpid()}\n".encode())
    except OSError as e:
        path.unlink(missing_ok=True)
        os.close(fd)
        raise cannot_write(path, e) from e
    return fd
