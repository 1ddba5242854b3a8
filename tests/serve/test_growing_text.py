"""Streamed text: the pieces make the whole text, whatever the tokens, and no piece could still change."""

import random

import pytest

from trailmark.models.tiny import tiny_tokenizer
from trailmark.serve.growing_text import BROKEN, Growing

TOKENIZER = tiny_tokenizer(["stop", " sto", "opst"])


def pieces(tokens, stops=()):
    growing = Growing(TOKENIZER, stops)
    out = [growing.add(t) for t in tokens[:-1]]
    text = TOKENIZER.decode(tokens)
    found = [at for s in stops if (at := text.find(s)) >= 0]
    return [*out, growing.finish(text[: min(found)] if found else text)]


def test_whole_characters():
    tokens = TOKENIZER.encode("aé完😀")
    assert len(tokens) == 1 + 2 + 3 + 4
    assert pieces([*tokens, *TOKENIZER.encode("x")]) == ["a", "", "é", "", "", "完", "", "", "", "😀", "x"]
    half = tokens[:2] + TOKENIZER.encode("b") + tokens[3:5]  # a first byte without its second; two of three at the end
    assert pieces(half) == ["a", "", BROKEN + "b", "", BROKEN]


def test_no_text_that_a_stop_text_cuts():
    tokens = TOKENIZER.encode("a st stop b")
    assert "".join(pieces(tokens, ["stop"])) == "a st "
    letters = TOKENIZER.encode("nonono!")
    assert pieces(letters, ["nono!"]) == ["", "", "", "", "no", "", ""]
    assert pieces(letters[:-1], ["nono!"]) == ["", "", "", "", "no", "nono"]
    assert "".join(pieces(TOKENIZER.encode("x stopstop"), ["opst", "ps"])) == "x st"


@pytest.mark.parametrize("seed", range(20))
def test_any_tokens(seed):
    draw = random.Random(seed)
    words = [draw.choice(["é", "a", "完了", "完", "stop", "😀"]) for _ in range(3)]
    tokens = TOKENIZER.encode("".join(draw.choice(["é", "完了", "a", "😀 ", "stop", " sto"]) for _ in range(60)))
    if seed % 2:
        tokens = [t if draw.random() < 0.8 else draw.randrange(len(TOKENIZER)) for t in tokens]
    text = TOKENIZER.decode(tokens)
    assert "".join(pieces(tokens)) == text
    stops = [w * 2 for w in words]
    found = [at for s in stops if (at := text.find(s)) >= 0]
    growing, given = Growing(TOKENIZER, stops), ""
    for t in tokens:
        given += growing.add(t)
        assert (text[: min(found)] if found else text).startswith(given)
