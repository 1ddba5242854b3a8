"""Rows of data sets, as tasks read them: from a file (JSON lines, a JSON list or object, parquet; .gz is allowed) or
from the hub. Every error names the file and the line."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from trailmark.errors import DataError, TaskError
from trailmark.fetching import may_fetch
from trailmark.formats.rows import Row
from trailmark.plain_files import read_unpacked

ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")


def file_text(path: Path) -> str:
    try:
        return read_unpacked(path).decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise DataError(f"is not UTF-8 text (byte {problem.start}).", path) from None
    except OSError as problem:
        raise DataError(f"cannot be read ({getattr(problem, 'strerror', None) or problem}).", path) from None


def words_of(path: Path) -> set[str]:
    return set(re.split(r"[-_.]", path.name.lower()))


def files_here(
    path: Path, dataset: str, split: str, wanted: Collection[str], known: Collection[str],
    endings: tuple[str, ...] = ENDINGS,
) -> list[Path] | None:  # fmt: skip
    """The data files in a folder; None if `path` is a file itself, which must not be called after another split.
    `wanted`: the words for the split in a name, `known`: those for any split."""
    if path.is_file():
        if words_of(path) & set(known) and not words_of(path) & set(wanted):
            raise TaskError(f"{path} is not split '{split}' by its name: give the folder, or the file of that split.")
        return None
    if not path.is_dir():
        raise TaskError(f"there is no file or folder {path} to read {dataset} from.")
    return sorted(p for p in path.iterdir() if p.is_file() and p.name.lower().endswith(endings))


def one_of(ways: Iterable[list[Path]], path: Path, dataset: str, split: str) -> list[Path]:
    """The first way to name files that finds any. Several must be parts of one table."""
    found = next(filter(None, ways), [])
    if len(found) > 1 and not all(p.suffix == ".parquet" for p in found):
        names = ", ".join(p.name for p in found)
        raise TaskError(f"{path} has several files for split '{split}' of {dataset}: name one ({names}).")
    return found


def file_rows(path: Path) -> Iterator[Row]:
    """The rows of one file. A file .json that is one object is one row."""
    if path.suffix == ".parquet":
        yield from _parquet(path)
        return
    text = file_text(path)
    whole = path.name.removesuffix(".gz").endswith(".json")
    if whole or text.lstrip()[:1] == "[":
        value = read_value(text, path, None)
        yield from (
            (Row(v, path, None, i) for i, v in enumerate(value)) if isinstance(value, list) else (Row(value, path),)
        )
        return
    for n, line in enumerate(text.split("\n"), 1):
        if line.strip(" \t\r"):
            yield Row(read_value(line, path, n), path, n)


def read_value(text: str, path: Path, line: int | None) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise DataError(f"is not JSON: {problem}.", path, line) from None


def _parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow.parquet as parquet  # type: ignore[import-not-found]
    except ImportError:
        raise DataError("reading parquet needs pyarrow: pip install pyarrow", path) from None
    try:
        found = parquet.read_table(path).to_pylist()
    except Exception as problem:
        raise DataError(f"is not parquet: {problem}.", path) from None
    yield from (Row(v, path, None, i) for i, v in enumerate(found))


def hub_rows(what: str, name: str, config: str | None, split: str, revision: str | None) -> Iterator[Row]:
    """The rows of a split from the hub or its cache, through the datasets library. `what` is for the error."""
    try:
        import datasets  # type: ignore[import-not-found]
    except ImportError:
        raise TaskError(
            f"reading {what} from the hub needs the datasets library: pip install datasets; "
            "or give path=, a file or folder."
        ) from None
    may_fetch(f"data set '{name}' of the hub")
    try:
        table = datasets.load_dataset(name, config, split=split, revision=revision)
    except Exception as problem:
        first = str(problem).strip().split("\n")[0][:200]
        raise TaskError(f"'{name}' split '{split}' cannot be loaded from the hub: {first}. Or give path=.") from problem
    yield from (Row(dict(v), Path(name), None, i) for i, v in enumerate(table))
