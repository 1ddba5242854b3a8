"""The token-set ratio: by hand, and its subsequences against the textbook's table."""

import random

import pytest

from trailmark.tasks.webshop.similarity import alike, common_length, plain, token_set_ratio


def by_table(a, b):
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


def test_the_longest_common_subsequence():
    draw = random.Random(5)
    for _ in range(2000):
        a, b = ("".join(draw.choices("abcd ", k=draw.randrange(12))) for _ in "ab")
        assert common_length(a, b) == by_table(a, b)


@pytest.mark.parametrize("a, b, want", [
    ("", "a", 0), ("a", "", 0), ("", "", 0), ("a", "a", 100), ("a b", "b a", 100), ("a a a", "a", 100),
    ("abcd", "abxd", 75),  # 2 * 3 / 8
    ("a b", "a c", 100 - 100 * 2 / 6),
    ("long shared part a", "long shared part bbbbbbbb", 100 - 100 * 2 / (16 + 18)),  # the shared part and the first
])  # fmt: skip
def test_ratios(a, b, want):
    assert token_set_ratio(a, b) == pytest.approx(want) == token_set_ratio(b, a)


def test_what_is_compared():
    assert plain("  Café-Noir, 5½! ") == "caf noir  5"
    assert plain("\x80\xff") == "" and plain("“中文”") == "中文"
    assert alike("Non-Slip", "slip non") and not alike("—", "—")


def test_thefuzz_gives_the_same():
    """If it is installed. There `_` is a space."""
    fuzz = pytest.importorskip("thefuzz.fuzz")
    draw = random.Random(7)
    for _ in range(20_000):
        a = "".join(draw.choices("aab b  cé›x-9 B", k=draw.randrange(14)))
        b = a[: draw.randrange(len(a) + 1)] + draw.choice(["x", " y", ""]) + a[draw.randrange(len(a) + 1) :]
        assert round(token_set_ratio(plain(a), plain(b))) == fuzz.token_set_ratio(a, b)
