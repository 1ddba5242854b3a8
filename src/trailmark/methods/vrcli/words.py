"""What could explain an improvement besides reasoning: words that were copied, and the length of the text."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence

_NO_SPACES = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[^\W{_NO_SPACES}]+|[{_NO_SPACES}]")
SPACELESS = re.compile(f"[{_NO_SPACES}]")  # a character of such a script


def words_of(text: str) -> list[str]:
    """Words in lower case, without punctuation. In scripts without spaces between words (Chinese, Japanese, Thai and
    others) each character counts as one: otherwise a copied sentence would be one word."""
    return _WORD.findall(text.lower())


def up_to_word(text: str, n: int) -> str:
    """The text up to the end of its n-th word, if it has so many."""
    ends = [m.end() for m in itertools.islice(_WORD.finditer(text), n)]
    return text[: ends[-1]] if len(ends) == n else text


def trigrams(words: Sequence[str]) -> list[tuple[str, ...]]:
    return [tuple(words[k : k + 3]) for k in range(len(words) - 2)]


def copied_share(text: str, prompt: str) -> float | None:
    """The share of the text's different trigrams that stand in what the model was shown; None if it has none."""
    mine = set(trigrams(words_of(text)))
    return len(mine & _trigrams_in(prompt)) / len(mine) if mine else None


@functools.lru_cache(maxsize=4)  # the plays of a row follow each other
def _trigrams_in(prompt: str) -> frozenset[tuple[str, ...]]:
    return frozenset(trigrams(words_of(prompt)))


def correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Pearson's correlation; None for fewer than three pairs, or if one side does not vary."""
    import numpy as np

    x, y = np.asarray(a, float), np.asarray(b, float)
    if len(x) < 3 or x.std() == 0 or y.std() == 0:
        return None
    return float(np.corrcoef(x, y)[0, 1])
