"""The files of a repository that an explorer may see.

Left out are hidden and private names, names with a part such as LICENSE, tests or ci (a whole part: "decision.py" is
kept), names that are not ASCII, links, special files and files that are too long. Files with a dot in their name are
also left out if their suffix is unsupported, or if they are too short, not UTF-8 text, or less than 90 % ASCII. Empty
folders, and folders that are too deep for the world, are left out too.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from trailmark.data.stages import Counts
from trailmark.errors import DataError
from trailmark.plain_files import read_plain
from trailmark.runs.atomic_files import cannot_write, sync_folder
from trailmark.tasks.auto_explore.contents import NotText, decode, kind_of
from trailmark.tasks.auto_explore.repo import MOST_LEVELS

PARTS = {"LICENSE", "Makefile", "artwork", "requirements", "ci", "tests", "examples"}
NAMES = {"conf.py"}
FEWEST_CHARACTERS, MOST_BYTES, ASCII_SHARE = 10, 2_000_000, 0.9


def filter_repository(source: Path, target: Path, rules: bool = True) -> Counts:
    """Copy the kept files of `source` to `target`, all or nothing. If `target` exists, its files are only counted.
    Without `rules`, only hidden names, links and special files are left out."""
    if not source.is_dir():
        raise DataError("is no folder.", source)
    left_out: Counter[str] = Counter()
    files = list(_walk(source, "", rules, left_out))
    if not any(kind_of(Path(f).name) for f in files):
        raise DataError("holds no file that could be read: none has a known suffix and passes the filter.", source)
    if not target.exists():
        _copy(source, target, files)
    return Counts(Counter(files=len(files)), left_out)


def _copy(source: Path, target: Path, files: list[str]) -> None:
    temp = target.with_name(f".{target.name}.part")
    try:
        if temp.exists():
            shutil.rmtree(temp)
        for name in files:
            (temp / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, temp / name, follow_symlinks=False)
        os.replace(temp, target)
        sync_folder(target.parent)
    except OSError as problem:
        raise cannot_write(target, problem) from problem


def _walk(root: Path, folder: str, rules: bool, left_out: Counter[str]) -> Iterator[str]:
    """The kept paths, relative to `root` and sorted in each folder."""
    try:
        entries = sorted(os.scandir(root / folder), key=lambda e: e.name)
    except OSError as problem:
        raise DataError(f"cannot be listed ({problem.strerror}).", root / folder) from None
    for entry in entries:
        path = f"{folder}{entry.name}"
        about = entry.stat(follow_symlinks=False)
        kind = stat.S_IFMT(about.st_mode)
        if kind not in (stat.S_IFDIR, stat.S_IFREG) or (kind == stat.S_IFREG and about.st_nlink > 1):
            left_out["link or special file"] += 1  # the second name of a file may lie outside
        elif why := _bad_name(entry.name, rules):
            left_out[why] += 1
        elif kind == stat.S_IFDIR and path.count("/") + 1 >= MOST_LEVELS:
            left_out["folder too deep"] += 1
        elif kind == stat.S_IFDIR:
            yield from _walk(root, f"{path}/", rules, left_out)
        elif rules and (why := _bad_file(root / path)):
            left_out[why] += 1
        else:
            yield path


def _bad_name(name: str, rules: bool) -> str:
    if name.startswith("."):
        return "hidden name"
    if not name.isprintable() or not _encodes(name):
        return "name that is not text"
    if not rules:
        return ""
    if name.startswith("_"):
        return "private name"
    if not name.isascii():
        return "name that is not ASCII"
    return "name of a kind left out" if name in NAMES or PARTS & set(re.split(r"[^A-Za-z0-9]+", name)) else ""


def _encodes(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _bad_file(path: Path) -> str:
    if "." in path.name and not kind_of(path.name):
        return "unsupported suffix"
    try:
        if path.stat().st_size > MOST_BYTES:
            return "too long"
        if "." not in path.name:
            return ""
        text = decode(read_plain(path), more=False)
    except OSError:
        return "not readable"
    except NotText:
        return "not UTF-8 text"
    if len(text) < FEWEST_CHARACTERS:
        return "too short"
    return "" if sum(c < "\x80" for c in text) >= ASCII_SHARE * len(text) else "mostly not ASCII"
