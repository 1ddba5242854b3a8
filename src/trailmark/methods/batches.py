"""The rows of each step: which ones they are, and made ahead of the step that needs them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Generic, TypeVar

import numpy as np

from trailmark.errors import RecipeError
from trailmark.tasks.base import TaskSource, draw_tasks
from trailmark.types import Task

T = TypeVar("T")
REFILL = 7_919_000_057  # between the seeds of a step's first starts and of further ones


def batch_rows(rows: int, batch: int, step: int, seed: int, epochs: int | None = None) -> list[int]:
    """The rows of step `step` (from 1): epochs are seeded permutations laid end to end, so that a position in the
    data is the step number alone and a resumed run reads on where it stopped. With `epochs` the last step ends with the
    last row."""
    end = step * batch if epochs is None else min(step * batch, epochs * rows)
    return [int(_order(rows, seed, i // rows)[i % rows]) for i in range((step - 1) * batch, end)]


def epoch_steps(rows: int, batch: int, epochs: int) -> int:
    """The number of steps of so many epochs."""
    return math.ceil(epochs * rows / batch)


@lru_cache(maxsize=4)
def _order(rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(rows)


def how_long(steps: int, epochs: int | None) -> str:
    """How long a training is, in words."""
    return f"{steps} steps" if epochs is None else f"{epochs} epoch{'s' * (epochs > 1)}"


class Batches(Generic[T]):
    """The rows of one step after the other. While a step is learnt, a thread makes the rows of the next one. What is
    in a batch depends on (seed, step) alone."""

    def __init__(self, rows: Sequence[T], batch: int, seed: int, steps: int, epochs: int | None = None):
        self.rows, self.batch, self.seed, self.epochs = rows, batch, seed, epochs
        self.steps = steps if epochs is None else epoch_steps(len(rows), batch, epochs)
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
        return [self.rows[r] for r in batch_rows(len(self.rows), self.batch, step, self.seed, self.epochs)]


class Walk:
    """The starts of one step after the other. A task with a finite list of starts is walked in shuffled epochs, as rows
    are (`batch_rows`); each epoch has a seed of its own, so that a world draws new random numbers. Any other task makes
    new starts for each step. What a step gets depends on (seed, step) alone."""

    def __init__(self, source: TaskSource, n: int, seed: int, split: str = "train", epochs: int | None = None):
        self.source, self.seed, self.split, self.epochs = source, seed, split, epochs
        self.n, self.rows = n, 0
        self._held: dict[int, Sequence[Task]] = {}  # the starts of the epochs that are used now
        if getattr(source, "finite", False):
            self.n = len(draw_tasks(source, split, n, seed))  # fewer, if a step must not repeat a row
            self.rows = len(self._epoch(0))
        elif epochs is not None:
            raise RecipeError(
                f"epochs is {epochs}, and task '{source.name}' makes its starts, so it has no rows to pass over: set "
                "steps in place of epochs."
            )

    def steps(self, steps: int) -> int:
        """The number of steps: of the epochs, if they are given."""
        return steps if self.epochs is None else epoch_steps(self.rows, self.n, self.epochs)

    def take(self, step: int) -> Sequence[Task]:
        if not self.rows:
            return draw_tasks(self.source, self.split, self.n, self.seed * 1_000_003 + step)
        end = step * self.n if self.epochs is None else min(step * self.n, self.epochs * self.rows)
        picks = batch_rows(self.rows, self.n, step, self.seed, self.epochs)
        return [self._epoch(i // self.rows)[r] for i, r in zip(range((step - 1) * self.n, end), picks, strict=True)]

    def more(self, step: int, k: int, n: int, used: Collection[str]) -> Sequence[Task]:
        """`n` further starts of a step, in round `k` (from 1): rows that are not `used` first."""
        if not self.rows:
            return draw_tasks(self.source, self.split, n, self.seed * 1_000_003 + step + k * REFILL)
        rows = self._epoch((step - 1) * self.n // self.rows)
        order = [rows[r] for r in np.random.default_rng([self.seed, step, k]).permutation(self.rows)]
        return sorted(order, key=lambda t: t.id in used)[:n]

    def _epoch(self, number: int) -> Sequence[Task]:
        if number not in self._held:
            self._held = {k: rows for k, rows in self._held.items() if k == number - 1}
            self._held[number] = draw_tasks(self.source, self.split, None, self.seed * 1_000_003 + number)
        return self._held[number]
