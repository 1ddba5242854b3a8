"""BM25 over the products, as the original's index of Lucene ranks them, up to ties: k1 0.9, b 0.4, English stop words,
Porter's stemmer, and for a word in n of N products

    idf = ln(1 + (N - n + 0.5) / (n + 0.5))
    score of a product = sum over the words of the query of  idf * tf / (tf + k1 (1 - b + b length / mean length))

A word that the query has twice counts twice. Ties: the first product first. Words are those of Lucene's standard
tokenizer: runs of letters and digits, with one of . ' : · between letters, or . , ' ; between digits; each ideograph.

Lucene keeps a product's length in one byte, so it rounds lengths from 40 words on. `lengths="lucene"` does so too; with
"exact" the formula is taken at its word.

The index is numpy arrays: for each word the products that have it, and how often.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter

import numpy as np

from trailmark.errors import TaskError, nearest
from trailmark.tasks.webshop.stemmer import stem

K1, B = 0.9, 0.4
LONGEST = 255  # letters of a word; a longer run is cut into such
LENGTHS = ("exact", "lucene")
_STOP_WORDS = """
    a an and are as at be but by for if in into is it no not of on or such that the their then there these they this
    to was will with
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())
_IDEOGRAPH = "\u3040-\u309f\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_LETTER = rf"[^\W\d_{_IDEOGRAPH}]"
_WORDS = re.compile(
    rf"[{_IDEOGRAPH}]"
    rf"|(?:_*(?:{_LETTER}|\d)(?:[.'’:·](?<={_LETTER}.)(?={_LETTER})|[.,'’;](?<=\d.)(?=\d))?)+_*"
)


def words(text: str) -> list[str]:
    """The words of a text that count, stemmed."""
    out = []
    for found in _WORDS.findall(text.lower().replace("’", "'")):
        for at in range(0, len(found), LONGEST):
            word = found[at : at + LONGEST].removesuffix("'s")
            if word and word not in STOP_WORDS:
                out.append(stem(word))
    return out


def rounded_length(n: int) -> int:
    """A length as Lucene keeps it in one byte: exact below 40; else what is above 24 keeps its four highest bits."""
    if n < 40:
        return n
    rest = n - 24
    drop = rest.bit_length() - 4
    return 24 + (rest >> drop << drop)


class IndexWriter:
    """Takes the products in turn."""

    def __init__(self, lengths: str = "exact"):
        if lengths not in LENGTHS:
            raise TaskError(f"webshop has no lengths '{lengths}'.{nearest(str(lengths), LENGTHS)}")
        self.lengths = lengths
        self.words: dict[str, int] = {}
        self.word, self.product, self.times, self.length = array("i"), array("i"), array("i"), array("i")

    def add(self, contents: str) -> None:
        found = Counter(words(contents))
        for word, times in found.items():
            self.word.append(self.words.setdefault(word, len(self.words)))
            self.product.append(len(self.length))
            self.times.append(times)
        self.length.append(sum(found.values()))

    def skip(self) -> None:
        """A row that is no product: it keeps its number, and is not counted."""
        self.length.append(-1)

    def index(self) -> Index:
        word = np.frombuffer(self.word, np.int32) if self.word else np.zeros(0, np.int32)
        order = np.argsort(word, kind="stable")
        starts = np.concatenate([[0], np.cumsum(np.bincount(word, minlength=len(self.words)))])
        length = np.array(self.length, np.float64)
        counted = length[length >= 0]
        mean = max(counted.mean(), 1e-9)
        if self.lengths == "lucene":
            length = np.array([rounded_length(n) for n in self.length], np.float64)
        product = np.array(self.product, np.int32)[order]
        return Index(
            self.words, starts, product, np.array(self.times, np.int32)[order], K1 * (1 - B + B * length / mean),
            len(counted),
        )  # fmt: skip


class Index:
    def __init__(
        self, words: dict[str, int], starts: np.ndarray, product: np.ndarray, times: np.ndarray, norm: np.ndarray,
        n: int,
    ):  # fmt: skip
        self.words, self.starts, self.product, self.times, self.norm, self.n = words, starts, product, times, norm, n

    def search(self, query: str, most: int) -> list[int]:
        """The numbers of the products with the largest scores, at most `most`; none without a word of the query."""
        asked = Counter(w for w in words(query) if w in self.words)
        if not asked:
            return []
        scores = np.zeros(len(self.norm))
        for word, weight in asked.items():
            at = self.words[word]
            here = slice(self.starts[at], self.starts[at + 1])
            product, times = self.product[here], self.times[here]
            idf = np.log(1 + (self.n - len(product) + 0.5) / (len(product) + 0.5))
            scores[product] += weight * idf * times / (times + self.norm[product])
        found = np.flatnonzero(scores)
        if len(found) > most:
            least = np.partition(scores[found], -most)[-most]
            found = found[scores[found] >= least]
        return found[np.argsort(-scores[found], kind="stable")][:most].tolist()
