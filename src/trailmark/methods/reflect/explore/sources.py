"""Where repositories come from: a folder, a package's source distribution, or the packages that a task file names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from trailmark.errors import DataError, TrailmarkError
from trailmark.methods.reflect.explore.records import read_records
from trailmark.tasks.auto_explore.packages import Sdist, parse_package, read_trees, repository


@dataclass(frozen=True, slots=True)
class Source:
    """A repository to begin with. `folder` returns its path, and downloads it if necessary."""

    name: str
    version: str
    text: str
    folder: Callable[[], Path]


def sources_of(words: Sequence[str], tasks: Path | None = None) -> list[Source]:
    """The repositories that the words name. Without words: those of `tasks`, by the file_trees.json beside it."""
    if words:
        return [_source(word) for word in words]
    if tasks is None:
        raise TrailmarkError("which repositories? Name folders, or packages such as click==8.1.7.")
    trees = read_trees(beside) if (beside := tasks.parent / "file_trees.json").is_file() else {}
    found: dict[str, str] = {}
    for record in read_records(tasks):
        if found.setdefault(record.repo, record.version) != record.version:
            raise DataError(f"has tasks about two versions of '{record.repo}': name the one to use.", tasks)
    for name, version in found.items():
        if name in trees and version not in ("", trees[name].version):
            raise DataError(f"has tasks about {name} {version}, but version {trees[name].version} is listed.", beside)
        if name not in trees and not version:
            raise DataError(f"does not say which version of '{name}' it is about: name its folder.", tasks)
    return [_package(trees.get(name) or Sdist(name, version)) for name, version in found.items()]


def _source(word: str) -> Source:
    folder = Path(word).expanduser()
    if folder.is_dir():
        name = folder.resolve().name or "root"
        return Source(name, "", word, lambda: folder)
    if "==" not in word:
        raise TrailmarkError(f"'{word}' is neither a folder nor a package such as click==8.1.7.")
    return _package(parse_package(word))


def _package(package: Sdist) -> Source:
    text = f"{package.name}=={package.version}" + (f"#sha256={package.sha256}" if package.sha256 else "")
    return Source(package.name, package.version, text, partial(repository, package))
