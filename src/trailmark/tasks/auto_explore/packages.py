"""Repositories from source distributions: by name, version and sha256, kept in a cache.

    CACHE/sdists/NAME-VERSION.tar.gz      as it was published
    CACHE/repos/NAME-VERSION-CHECKSUM/    unpacked, without its top folder

CACHE is `$TRAILMARK_CACHE` or the user's cache folder. Files in the cache are used without a network, so a filled cache
works offline; an archive may also be put there by hand. Every archive must have the checksum that was asked for. No
code of a package is ever run (see pip_index.py and unpack.py).
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkstemp
from typing import Any

from trailmark.errors import DataError, TaskError, nearest
from trailmark.fetching import may_fetch
from trailmark.models.smollm import cache_dir
from trailmark.plain_files import read_json
from trailmark.tasks.auto_explore.pip_index import Pip, Place, find, local_path, pip_says
from trailmark.tasks.auto_explore.unpack import unpack

MOST_BYTES = 256 << 20  # largest size of one archive
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]*")


@dataclass(frozen=True)
class Sdist:
    """A source distribution. `file` and `sha256` may be empty: then any file of this name and version fits, with the
    checksum that its index gives."""

    name: str
    version: str
    sha256: str = ""
    file: str = ""

    def __post_init__(self) -> None:
        for what, value in (("name", self.name), ("version", self.version), ("file", self.file or "x")):
            if not _SAFE.fullmatch(value):
                raise DataError(f"{value!r} cannot be the {what} of a package.")
        if self.sha256 and not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise DataError(f"{self.sha256!r} is not a sha256: 64 of the digits 0-9 and a-f.")


def read_trees(path: str | Path) -> dict[str, Sdist]:
    """The packages of a `file_trees.json`: name -> version, sdist file name and sha256."""
    try:
        found = read_json(Path(path))
    except (OSError, ValueError) as e:
        raise DataError(f"cannot be read as JSON ({e}).", path) from None
    if not isinstance(found, dict):
        raise DataError("must be an object with a package's name as each key.", path)
    made = {}
    for name, row in found.items():
        for key in ("version", "sdist", "sha256"):
            if not isinstance(row, dict) or not isinstance(row.get(key), str):
                raise DataError(f"package '{name}' needs it as a text.", path, key=key)
        made[name] = Sdist(name, row["version"], row["sha256"], row["sdist"])
    return made


def parse_package(words: str) -> Sdist:
    """`click==8.1.7` as a package; `#sha256=…` may follow."""
    what, _, checksum = words.partition("#sha256=")
    name, equals, version = what.partition("==")
    if not equals or not name or not version:
        raise DataError(f"'{words}' is not a package: write NAME==VERSION, such as click==8.1.7.")
    return Sdist(name.strip(), version.strip(), checksum.strip())


def repository(package: Sdist, cache: str | Path | None = None, pip: Pip | None = None) -> Path:
    """The folder of a package's unpacked source distribution, fetched if it is not in the cache."""
    home = Path(cache) if cache else cache_dir()
    stem = f"{package.name}-{package.version}"
    if package.sha256 and (made := home / "repos" / f"{stem}-{package.sha256[:16]}").is_dir():
        return made
    archive = fetch_sdist(package, home, pip)
    made = home / "repos" / f"{stem}-{_digest(archive)[:16]}"
    return made if made.is_dir() else unpack(archive, made)


def fetch_sdist(package: Sdist, cache: str | Path | None = None, pip: Pip | None = None) -> Path:
    """The archive in the cache. If it is missing, it is downloaded from where pip would take it. A wrong checksum is a
    DataError, and nothing is kept."""
    folder = (Path(cache) if cache else cache_dir()) / "sdists"
    if held := _held(folder, package):
        return held
    may_fetch(f"package {package.name} {package.version}")
    pip = pip or pip_says()
    with pip.client() as client:
        places, problems = find(pip, client, package.name, package.version, package.file)
        wrong = ""
        for place in places:
            if package.sha256 and place.sha256 not in ("", package.sha256):
                wrong = wrong or f"{place.file} has sha256 {place.sha256} there, not {package.sha256}"
                continue
            try:
                return _download(client, place, package.sha256 or place.sha256, folder)
            except _Different as e:
                wrong = str(e)
            except ValueError as e:
                problems.append(str(e))
    what = f"the source distribution of {package.name} {package.version}"
    if wrong:
        raise DataError(f"{what} does not have the right checksum: {wrong}. Nothing was kept.")
    asked = "; ".join(problems) if problems else "no index of pip's configuration has it"
    raise DataError(f"{what} is not available ({asked}). An archive put into {folder} is used without an index.")


def _held(folder: Path, package: Sdist) -> Path | None:
    names = [package.file] if package.file else [f"{package.name}-{package.version}{s}" for s in (".tar.gz", ".zip")]
    for name in names:
        place = folder / name
        if place.is_file() and (not package.sha256 or _digest(place) == package.sha256):
            return place
    return None


def _digest(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


class _Different(ValueError):
    """The file has another checksum."""


def _download(client: Any, place: Place, sha256: str, folder: Path) -> Path:
    """Download into a temporary file, check it, then rename it."""
    import httpx

    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd, name = mkstemp(prefix=".", suffix=".tmp", dir=folder)
    except OSError as e:
        raise DataError(f"cannot be written ({(e.strerror or str(e)).lower()}).", folder) from None
    temp, digest, size = Path(name), hashlib.sha256(), 0
    try:
        with os.fdopen(fd, "wb") as out:
            for part in _parts(client, place.url):
                digest.update(part)
                size += len(part)
                if size > MOST_BYTES:
                    raise ValueError(f"{place.file} is larger than {MOST_BYTES >> 20} MiB")
                out.write(part)
        if sha256 and digest.hexdigest() != sha256:
            raise _Different(f"{place.file} has sha256 {digest.hexdigest()}, not {sha256}")
        temp.chmod(0o644)
        os.replace(temp, folder / place.file)
    except (httpx.HTTPError, OSError) as e:
        raise ValueError(f"{place.file}: {e}") from None
    finally:
        temp.unlink(missing_ok=True)
    return folder / place.file


def _parts(client: Any, url: str) -> Any:
    here = local_path(url)
    if here is not None:
        with here.open("rb") as f:
            while part := f.read(1 << 20):
                yield part
        return
    with client.stream("GET", url) as answer:
        answer.raise_for_status()
        yield from answer.iter_bytes()


def find_repository(
    name: str, version: str, repos: str | Path | None, trees: dict[str, Sdist], cache: str | Path | None = None
) -> Path:
    """A task's repository: a folder NAME-VERSION or NAME in `repos`, else a package that `trees` names."""
    if repos is not None:
        tail = name.rstrip("/").rpartition("/")[2]
        for folder in ([f"{tail}-{version}"] if version else []) + [tail]:
            if folder not in ("", ".", "..") and "/" not in folder and (Path(repos) / folder).is_dir():
                return Path(repos) / folder
    if name in trees:
        package = trees[name]
        if version and version != package.version:
            raise TaskError(f"a task needs {name} {version}, but file_trees.json has {package.version}.")
        return repository(package, cache)
    if repos is not None:
        raise TaskError(f"there is no repository '{name}' in {repos}, and no file_trees.json names it.")
    hint = nearest(name, trees) if trees else " Set the option repos to the folder that holds the repositories."
    raise TaskError(f"where is the repository '{name}'?{hint}")
