"""Which part of its data a row belongs to."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
SPLITS = {"test": range(0, 10), "val": range(10, 20), "train": range(20, 100)}


def split_of(text: str) -> str:
    """The split of a text by its hash: 80 % train, 10 % val, 10 % test, disjoint by construction."""
    bucket = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % 100
    return next(name for name, buckets in SPLITS.items() if bucket in buckets)


def drawn(rows: Sequence[T], n: int, rng: random.Random) -> list[T]:
    """`n` rows. None repeats before all have occurred."""
    out: list[T] = []
    while len(out) < n:
        out += rng.sample(rows, min(len(rows), n - len(out)))
    return out
