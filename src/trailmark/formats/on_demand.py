"""A sequence whose items are made when they are asked for. Some are kept, up to a limit of memory.

Rows of a file are read in another order in every epoch, so the item that was used last is not needed soonest, and
there is nothing to gain from forgetting one item for another. Items are kept until the limit is reached, and the
others are made anew each time. A small file is then made once, and a large one needs no more memory than a small one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, overload

T = TypeVar("T")
LIMIT = 128 << 20  # bytes of the items that a sequence keeps


class OnDemand(Sequence[T]):
    """`make(i)` gives item `i` of `length`. `weigh` says how many bytes an item takes; without it, none is kept."""

    def __init__(self, length: int, make: Callable[[int], T], weigh: Callable[[T], int] | None = None):
        self._length, self._make, self._weigh = length, make, weigh
        self._kept: dict[int, T] = {}
        self._left = LIMIT

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, i: int) -> T: ...
    @overload
    def __getitem__(self, i: slice) -> list[T]: ...
    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(self._length))]
        if not -self._length <= i < self._length:
            raise IndexError(f"item {i} of {self._length}")
        i = int(i) % self._length
        if (found := self._kept.get(i)) is None:
            found = self._make(i)
            self.keep(i, found)
        return found

    def __iter__(self) -> Iterator[T]:
        return (self[i] for i in range(self._length))

    def keep(self, i: int, item: T) -> None:
        """Keep an item that was made anyway, if there is room."""
        if self._weigh is not None and self._left > 0:
            self._kept[i] = item
            self._left -= self._weigh(item)

    def then(self, change: Callable[[T], T]) -> OnDemand[T]:
        """The same sequence with `change` done to each item. The changed items are kept in place of these."""
        made = OnDemand(self._length, lambda i: change(self._make(i)), self._weigh)
        self._kept, self._weigh = {}, None
        return made
