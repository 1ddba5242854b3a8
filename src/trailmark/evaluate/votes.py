"""The value of k tries: pass@k (one of them is right) and maj@k (the most common answer is right). Both are exact
expectations over all choices of k of the n tries; nothing is drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction


def pass_at_k(n: int, right: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the probability that k of n tries, c of them right, include a right one."""
    if not 0 <= right <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} is not defined for {n} tries with {right} right")
    return float(1 - Fraction(math.comb(n - right, k), math.comb(n, k)))


def majority_at_k(answers: Sequence[str | None], right: Mapping[str, bool], k: int) -> float:
    """The probability that the most common answer among k of the tries is right. Blanks (None) do not vote. A tie is
    broken at random. k blanks are wrong.

    The sum goes over each right answer and each number v of its votes: the number of ways in which no other answer gets
    more than v, divided by how many answers get exactly v."""
    n = len(answers)
    if not 1 <= k <= n:
        raise ValueError(f"maj@{k} is not defined for {n} tries")
    counts: dict[str, int] = {}
    for answer in answers:
        if answer is not None:
            counts[answer] = counts.get(answer, 0) + 1
    blanks, won = n - sum(counts.values()), Fraction(0)
    for answer, own in counts.items():
        if not right.get(answer, False):
            continue
        others = [c for other, c in counts.items() if other != answer]
        for votes in range(1, min(own, k) + 1):
            for (used, equal), ways in _ways(others, votes, k - votes).items():
                left = k - votes - used
                won += Fraction(math.comb(own, votes) * ways * math.comb(blanks, left), 1 + equal)
    return float(won / math.comb(n, k))


def _ways(counts: Sequence[int], most: int, room: int) -> dict[tuple[int, int], int]:
    """(tries used, answers with exactly `most`) -> the number of ways in which no answer gets more than `most`."""
    table = {(0, 0): 1}
    for count in counts:
        grown: dict[tuple[int, int], int] = {}
        for (used, equal), ways in table.items():
            for votes in range(min(count, most, room - used) + 1):
                key = (used + votes, equal + (votes == most))
                grown[key] = grown.get(key, 0) + ways * math.comb(count, votes)
        table = grown
    return table


def powers_of_two(n: int) -> list[int]:
    """1, 2, 4, … up to n, and n itself."""
    return sorted({2**i for i in range(n.bit_length()) if 2**i <= n} | {n})
