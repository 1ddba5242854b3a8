"""Porter's stemmer (1980), with its author's two later changes: "bli" becomes "ble", and "logi" becomes "log".

A word is consonants C and vowels V in turns, [C](VC)^m[V]. m is its measure; y is a vowel after a consonant.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

STEP_2 = (
    ("ational", "ate"), ("tional", "tion"), ("enci", "ence"), ("anci", "ance"), ("izer", "ize"), ("bli", "ble"),
    ("alli", "al"), ("entli", "ent"), ("eli", "e"), ("ousli", "ous"), ("ization", "ize"), ("ation", "ate"),
    ("ator", "ate"), ("alism", "al"), ("iveness", "ive"), ("fulness", "ful"), ("ousness", "ous"), ("aliti", "al"),
    ("iviti", "ive"), ("biliti", "ble"), ("logi", "log"),
)  # fmt: skip
STEP_3 = (
    ("icate", "ic"), ("ative", ""), ("alize", "al"), ("iciti", "ic"), ("ical", "ic"), ("ful", ""), ("ness", ""),
)  # fmt: skip
STEP_4 = (
    "al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent", "sion", "tion", "ou", "ism",
    "ate", "iti", "ous", "ive", "ize",
)  # fmt: skip


def _vowels(word: str) -> list[bool]:
    out: list[bool] = []
    for i, c in enumerate(word):
        out.append(c in "aeiou" or (c == "y" and i > 0 and not out[-1]))
    return out


def _measure(stem: str) -> int:
    vowels = _vowels(stem)
    return sum(a and not b for a, b in pairwise(vowels))


def _short(stem: str) -> bool:
    """Whether it ends consonant, vowel, consonant, and the last is not w, x or y."""
    return len(stem) > 2 and _vowels(stem)[-3:] == [False, True, False] and stem[-1] not in "wxy"


def _double(stem: str) -> bool:
    return len(stem) > 1 and stem[-1] == stem[-2] and not _vowels(stem)[-1]


@lru_cache(1 << 18)
def stem(word: str) -> str:
    """The stem of a word in lower case."""
    if len(word) < 3:
        return word
    word = _plural(word)
    word = _past(word)
    if word.endswith("y") and any(_vowels(word[:-1])):
        word = word[:-1] + "i"
    for endings in (STEP_2, STEP_3):
        end, new = next((pair for pair in endings if word.endswith(pair[0])), ("", ""))
        if end and _measure(word[: -len(end)]) > 0:
            word = word[: -len(end)] + new
    word = _without_suffix(word)
    if word.endswith("e"):
        m = _measure(word[:-1])
        if m > 1 or (m == 1 and not _short(word[:-1])):
            word = word[:-1]
    if word.endswith("ll") and _measure(word) > 1:
        word = word[:-1]
    return word


def _plural(word: str) -> str:
    if word.endswith(("sses", "ies")):
        return word[:-2]
    return word[:-1] if word.endswith("s") and not word.endswith("ss") else word


def _past(word: str) -> str:
    if word.endswith("eed"):
        return word[:-1] if _measure(word[:-3]) > 0 else word
    end = next((e for e in ("ed", "ing") if word.endswith(e)), "")
    if not end or not any(_vowels(word[: -len(end)])):
        return word
    word = word[: -len(end)]
    if word.endswith(("at", "bl", "iz")):
        return word + "e"
    if _double(word):
        return word if word[-1] in "lsz" else word[:-1]
    return word + "e" if _measure(word) == 1 and _short(word) else word


def _without_suffix(word: str) -> str:
    """Step 4: of the longest ending that fits; "ion" only behind s or t."""
    fits = [e for e in STEP_4 if word.endswith(e)]
    if not fits:
        return word
    end = max(fits, key=len)
    if end in ("sion", "tion"):
        end = "ion"
    return word[: -len(end)] if _measure(word[: -len(end)]) > 1 else word
