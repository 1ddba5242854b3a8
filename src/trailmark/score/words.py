"""What could explain an improvement besides reasoning: words that were copied, and the length of the text."""

from __future__ import annotations

import re
from collections.abc import Sequence

_WORD = re.compile(r"\w+")


def words_of(text: str) -> list[str]:
    """Words in lower case, without punctuation."""
    return _WORD.findall(text.lower())


def trigrams(words: Sequence[str]) -> list[tuple[str, ...]]:
    return [tuple(words[k : k + 3]) for k in range(len(words) - 2)]


def copied_share(text: str, shown: str) -> float | None:
    """The share of the text's different trigrams that stand in what the model was shown; None if it has none."""
    mine = set(trigrams(words_of(text)))
    return len(mine & set(trigrams(words_of(shown)))) / len(mine) if mine else None


def correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Pearson's correlation; None for fewer than three pairs, or if one side does not vary."""
    import numpy as np

    x, y = np.asarray(a, float), np.asarray(b, float)
    if len(x) < 3 or x.std() == 0 or y.std() == 0:
        return None
    return float(np.corrcoef(x, y)[0, 1])
