"""The rows of each step: which ones they are, and made ahead of the step that needs them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")


def batch_rows(rows: int, batch: int, step: int, seed: int) -> list[int]:
    """The rows of step `step` (from 1): epochs are seeded permutations laid end to end, so that a position in the
    data is the step number alone and a resumed run reads on where it stopped."""
    wanted = range((step - 1) * batch, step * batch)
    return [int(_order(rows, seed, i // rows)[i % rows]) for i in wanted]


@lru_cache(maxsize=4)
def _order(rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(rows)


class Batches(Generic[T]):
    """The rows of one step after the other. While a step is learnt, a thread makes the rows of the next one. What is
    in a batch depends on (seed, step) alone."""

    def __init__(self, rows: Sequence[T], batch: int, seed: int, steps: int):
        self.rows, self.batch, self.seed, self.steps = rows, batch, seed, steps
        self._ahead: tuple[int, Future[list[T]]] | None = None
        # A list is there already. Anything else may read and encode.
        self._thread = None if isinstance(rows, list) else ThreadPoolExecutor(1, "trailmark-rows")

    def take(self, step: int) -> list[T]:
        ahead, self._ahead = self._ahead, None
        made = ahead[1].result() if ahead is not None and ahead[0] == step else self._make(step)
        if self._thread is not None and step < self.steps:
            self._ahead = step + 1, self._thread.submit(self._make, step + 1)
        return made

    def _make(self, step: int) -> list[T]:
        return [self.rows[r] for r in batch_rows(len(self.rows), self.batch, step, self.seed)]
