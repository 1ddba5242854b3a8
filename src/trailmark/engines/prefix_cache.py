"""Which free slots still hold the keys and values of an ended sequence, so that a longer prompt can start from them.

In a conversation the next prompt is the last prompt, the answer, and the world's reply. A slot is not cleared when its
sequence ends. Until another sample takes the slot, a prompt that begins with the same tokens computes only the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LEAST = 32  # below this many tokens a lookup is not worth it
_BASE = np.uint64(0x9E3779B97F4A7C15)


class PrefixCache:
    """Ended sequences by slot. They are found by a hash of their tokens, and then compared token by token."""

    def __init__(self) -> None:
        self._rows: dict[int, list[tuple[int, int]]] = {}  # slot -> its keys
        self._found: dict[tuple[int, int], tuple[int, np.ndarray]] = {}  # (length, hash) -> slot and tokens
        self._lengths: dict[int, int] = {}  # length -> how many keys have it

    def add(self, row: int, tokens: Sequence[int], ends: Sequence[int]) -> None:
        """Slot `row` holds `tokens`. Prompts may begin with any of its prefixes of the lengths `ends`."""
        self.drop(row)
        whole = np.asarray(tokens, np.int64)
        hashes = prefix_hashes(whole)
        for end in {e for e in ends if e >= LEAST}:
            key = end, int(hashes[end])
            if key not in self._found:
                self._found[key] = row, whole[:end]
                self._rows.setdefault(row, []).append(key)
                self._lengths[end] = self._lengths.get(end, 0) + 1

    def drop(self, row: int) -> None:
        """Slot `row` is in use again."""
        for key in self._rows.pop(row, ()):
            del self._found[key]
            self._lengths[key[0]] -= 1
            if not self._lengths[key[0]]:
                del self._lengths[key[0]]

    def clear(self) -> None:
        self._rows, self._found, self._lengths = {}, {}, {}

    def find(self, prompt: Sequence[int]) -> tuple[int, int] | None:
        """The slot with the longest prefix of the prompt, and the length of that prefix. At least one token is left to
        compute."""
        lengths = sorted((n for n in self._lengths if n < len(prompt)), reverse=True)
        if not lengths:
            return None
        whole = np.asarray(prompt, np.int64)
        hashes = prefix_hashes(whole)
        for n in lengths:
            hit = self._found.get((n, int(hashes[n])))
            if hit is not None and np.array_equal(hit[1], whole[:n]):
                return hit[0], n
        return None


def prefix_hashes(tokens: np.ndarray) -> np.ndarray:
    """[n + 1]: a hash of every prefix, from the empty one to the whole."""
    powers = np.multiply.accumulate(np.full(len(tokens), _BASE))
    return np.concatenate([np.zeros(1, np.uint64), np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * powers)])
