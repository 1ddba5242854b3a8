"""Train, validate, test: 7 to 2 to 1.

hash    each record by a hash of the seed and its id, so that new records never move old ones
exact   the same order, cut where the shares are exact to a record; new records may move an old one
given   as the records say (train, validate or valid, test or any name that contains it)
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

from trailmark.errors import DataError, nearest
from trailmark.methods.reflect.explore.records import Record, read_records

SHARES = {"train": 0.7, "validate": 0.2, "test": 0.1}
By = Literal["hash", "exact", "given"]


def check_by(word: str) -> By:
    if word not in get_args(By):
        raise DataError(f"there is no split method '{word}'.{nearest(word, get_args(By))}")
    return word  # type: ignore[return-value]


def check_given(tasks: Path | None) -> None:
    """Refuse `--split given` before any work if the tasks do not name their splits."""
    if tasks is None:
        raise DataError("--split given needs --tasks: the questions that a teacher makes belong to no split yet.")
    if "train" not in [_given(r) for r in read_records(tasks)]:
        raise DataError("has no record of split train, so there would be nothing to learn from.", tasks)


def place(seed: int, name: str) -> float:
    """A number in [0, 1), the same for the same seed and name."""
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def split_records(records: Sequence[Record], seed: int, by: By = "hash") -> dict[str, list[Record]]:
    """The records of each part, in their order, with the part's name as their split."""
    if by == "given":
        names = [_given(r) for r in records]
    elif by == "hash":
        names = [_part(place(seed, r.key)) for r in records]
    else:
        order = sorted(range(len(records)), key=lambda i: (place(seed, records[i].key), records[i].key))
        names = [""] * len(records)
        for rank, i in enumerate(order):
            names[i] = _part((rank + 0.5) / len(records))
    return {part: [replace(r, split=part) for r, n in zip(records, names) if n == part] for part in SHARES}


def _part(where: float) -> str:
    end = 0.0
    for name, share in SHARES.items():
        end += share
        if where < end - 1e-12:
            return name
    return "test"


def _given(record: Record) -> str:
    for part, word in (("train", "train"), ("validate", "valid"), ("test", "test")):
        if word in record.split:
            return part
    raise DataError(f"record '{record.key}' says split '{record.split}': train, validate or test was expected.")
