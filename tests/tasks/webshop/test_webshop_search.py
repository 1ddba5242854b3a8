"""The search: words, stems and scores by hand, and ranks against the formula summed in the plainest way."""

import math
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from trailmark.errors import TaskError
from trailmark.tasks.webshop.search import IndexWriter, rounded_length, words
from trailmark.tasks.webshop.stemmer import stem


def index_of(texts, lengths="exact"):
    writer = IndexWriter(lengths)
    for text in texts:
        writer.add(text)
    return writer.index()


def test_stems():
    """From Porter's paper, and its author's two changes."""
    said = (
        "caresses caress ponies poni ties ti caress caress cats cat feed feed agreed agre plastered plaster bled bled "
        "motoring motor sing sing conflated conflat troubled troubl sized size hopping hop tanned tan falling fall "
        "hissing hiss fizzed fizz failing fail filing file happy happi sky sky relational relat conditional condit "
        "rational ration valenci valenc digitizer digit conformabli conform radicalli radic differentli differ "
        "vileli vile analogousli analog vietnamization vietnam predication predic operator oper feudalism feudal "
        "decisiveness decis hopefulness hope callousness callous formaliti formal sensitiviti sensit sensibiliti "
        "sensibl triplicate triplic formative form formalize formal electriciti electr electrical electr hopeful hope "
        "goodness good revival reviv allowance allow inference infer airliner airlin gyroscopic gyroscop adjustable "
        "adjust defensible defens irritant irrit replacement replac adjustment adjust dependent depend adoption adopt "
        "homologou homolog communism commun activate activ angulariti angular homologous homolog effective effect "
        "bowdlerize bowdler probate probat rate rate cease ceas controll control roll roll possibly possibl "
        "archaeology archaeolog is is"
    )
    pairs = said.split()
    assert [(w, stem(w)) for w in pairs[::2]] == list(zip(pairs[::2], pairs[1::2]))


def test_nltk_gives_the_same_stems():
    """If it is installed: of every word of our pages."""
    nltk = pytest.importorskip("nltk.stem.porter")
    theirs = nltk.PorterStemmer(mode="MARTIN_EXTENSIONS")
    pages = [*(Path(__file__).parents[3] / "docs").rglob("*.md")]
    found = {w for page in pages for w in re.findall("[a-z]+", page.read_text().lower())}
    assert len(found) > 1000 and [w for w in found if stem(w) != theirs.stem(w)] == []


def test_words():
    assert words("The Women's shoes, for running") == ["women", "shoe", "run"]
    assert words("3.4oz 1,000 t-shirt i3-8130u O’Neill’s") == ["3.4oz", "1,000", "t", "shirt", "i3", "8130u", "o'neil"]
    assert words("color:red AC/DC x_1 12:30 中文 ...") == ["color:r", "ac", "dc", "x_1", "12", "30", "中", "文"]
    assert words("") == words("to be or not to be -") == []


def test_lengths_in_a_byte():
    assert [rounded_length(n) for n in (0, 1, 39, 40, 41, 42, 56, 57, 60, 88, 100)] == [
        0, 1, 39, 40, 40, 42, 56, 56, 60, 88, 96,
    ]  # fmt: skip


@pytest.mark.parametrize("lengths", ["exact", "lucene"])
def test_ranks_are_those_of_the_formula(lengths):
    draw = random.Random(11)
    vocabulary = [f"w{i}" for i in range(40)]
    texts = [" ".join(draw.choices(vocabulary, range(1, 41), k=draw.randrange(1, 90))) for _ in range(300)]
    index = index_of(texts, lengths)
    counts = [Counter(t.split()) for t in texts]
    mean = sum(map(len, map(str.split, texts))) / len(texts)
    for _ in range(200):
        query = draw.choices(vocabulary, k=draw.randrange(1, 6))
        scores = []
        for count in counts:
            long = sum(count.values())
            norm = 0.9 * (1 - 0.4 + 0.4 * (rounded_length(long) if lengths == "lucene" else long) / mean)
            n = {w: sum(w in c for c in counts) for w in query}
            scores.append(sum(math.log(1 + (300 - n[w] + 0.5) / (n[w] + 0.5)) * count[w] / (count[w] + norm)
                              for w in query))  # fmt: skip
        found = index.search(" ".join(query), 50)
        assert len(found) == min(50, sum(s > 0 for s in scores)) and len(set(found)) == len(found)
        assert [scores[i] for i in found] == pytest.approx(sorted(scores, reverse=True)[: len(found)], rel=1e-12)


def test_ties_and_nothing_found():
    index = index_of(["red bed", "blue bed", "red bed", "red bed"])
    assert index.search("bed", 3) == [0, 1, 2] and index.search("red", 9) == [0, 2, 3]
    assert index.search("lamp", 9) == index.search("the", 9) == index.search("", 9) == []
    assert index_of(["the", ""]).search("bed", 3) == []
    writer = IndexWriter()
    writer.add("red bed")
    writer.skip()
    writer.add("bed")
    assert writer.index().search("bed", 9) == [2, 0] and writer.index().n == 2
    with pytest.raises(TaskError, match="no lengths 'luzene'. Did you mean 'lucene'"):
        IndexWriter("luzene")
