"""How alike two short texts are: the token-set ratio on the longest common subsequence, as rapidfuzz gives it.

    A, B                the sets of words of the two texts;  S = A and B,  a = A - S,  b = B - S, each sorted and joined
    ratio(x, y)         100 * 2 * LCS(x, y) / (|x| + |y|)
    token_set_ratio     100 if S is not empty and a or b is; else the largest of ratio(S a, S b) and, if S is not
                        empty, ratio(S, S a) and ratio(S, S b)

It is rounded to a whole number (halves to the even one) and compared with 85.
"""

from __future__ import annotations

import re
from functools import lru_cache

ALIKE = 85  # alike: more than this
_NO_WORD = re.compile(r"\W")
_UPPER_HALF = re.compile("[\x80-\xff]")


def plain(text: str) -> str:
    """A text as it is compared: characters 128 to 255 removed, other than word characters to spaces, lower case."""
    return _NO_WORD.sub(" ", _UPPER_HALF.sub("", text)).lower().strip()


def common_length(a: str, b: str) -> int:
    """The length of the longest common subsequence. One number holds a row of the table: bit i is 0 if the row grows
    at character i of `a` (Hyyrö 2004)."""
    places: dict[str, int] = {}
    for i, c in enumerate(a):
        places[c] = places.get(c, 0) | 1 << i
    full = (1 << len(a)) - 1
    row = full
    for c in b:
        same = row & places.get(c, 0)
        row = (row + same | row - same) & full
    return len(a) - row.bit_count()


def token_set_ratio(a: str, b: str) -> float:
    """From 0 to 100, of texts that are `plain`. An empty text is like nothing."""
    left, right = set(a.split()), set(b.split())
    both = left & right
    if not left or not right:
        return 0.0
    if both and (left == both or right == both):
        return 100.0
    x, y = " ".join(sorted(left - both)), " ".join(sorted(right - both))
    shared = len(" ".join(both))
    space = 1 if shared else 0
    total = 2 * (shared + space) + len(x) + len(y)
    best = _ratio(len(x) + len(y) - 2 * common_length(x, y), total)
    if shared:
        for rest in (x, y):
            best = max(best, _ratio(space + len(rest), 2 * shared + space + len(rest)))
    return best


def _ratio(distance: int, total: int) -> float:
    return 100.0 - 100.0 * distance / total


@lru_cache(1 << 16)
def alike(a: str, b: str) -> bool:
    """Whether two texts count as the same attribute or option."""
    return round(token_set_ratio(plain(a), plain(b))) > ALIKE
