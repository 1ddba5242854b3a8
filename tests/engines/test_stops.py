"""Stop texts while a sample is written: the same result as a search of the whole text after every token, in linear
time."""

import random
import re

import pytest

from trailmark.engines.base import EngineError, Request, run
from trailmark.engines.local import LocalEngine
from trailmark.engines.stops import BROKEN, Pieces, Stop, Watch, cut_text
from trailmark.models.tiny import tiny_tokenizer
from trailmark.types import SamplingLaw

TOKENIZER = tiny_tokenizer(["stop", " sto", "opst", "aa", "é完"])


def brute(tokens, stops, least=0):
    """(tokens read, text) of the first token from number `least` on with which a stop text ends in the whole text."""
    seen = [TOKENIZER.decode(tokens[:n]).rstrip(BROKEN) for n in range(len(tokens) + 1)]
    for n in range(1, len(tokens) + 1):
        ends = (
            (m.start(), m.start() + len(s))
            for s in stops
            for m in re.finditer(f"(?={re.escape(s)})", seen[n])
        )
        if n >= least and (found := [start for start, end in ends if end > len(seen[n - 1])]):
            return n, seen[n][: min(found)]
    return None


@pytest.mark.parametrize("seed", range(40))
def test_stops_are_those_of_a_search_of_the_whole_text(seed):
    draw = random.Random(seed)
    letters = draw.choice(["ab", "stop ", "é完😀a", "aab"])
    text = "".join(draw.choice(letters) for _ in range(120))
    tokens = TOKENIZER.encode(text)
    if seed % 3 == 0:  # halves of characters
        tokens = [t if draw.random() < 0.8 else draw.randrange(256) for t in tokens]
    stops = ["".join(draw.choice(letters) for _ in range(draw.randrange(2, 7))) for _ in range(3)]
    least = draw.choice([0, 0, 30])
    want = brute(tokens, stops, least)
    watch = Watch(TOKENIZER, stops, least)
    got = next(((n, at) for n, t in enumerate(tokens, 1) if (at := watch.add(t)) is not None), None)
    assert (None if got is None else got[0]) == (None if want is None else want[0])
    if want is not None:
        assert cut_text(TOKENIZER, tokens, stops, least) == want[1] == TOKENIZER.decode(tokens)[: got[1]]


def test_a_stop_text_overlaps_itself_and_others():
    stop = Stop("abab")
    assert [stop.feed(c) for c in "abaababab"] == [False] * 6 + [True, False, True]
    assert cut_text(TOKENIZER, TOKENIZER.encode("x stopstop"), ["opst", "ps"]) == "x st"


@pytest.mark.parametrize("kind", ["stray bytes", "first bytes", "words"])
def test_pieces_are_the_text_and_little_is_decoded_twice(kind):
    """Bytes that never become a character must not be held, and decoded, for ever."""
    stray, first = TOKENIZER.convert_tokens_to_ids(["\u0122", "å"])  # the bytes 0x80 and 0xe5
    tokens = {"stray bytes": [stray], "first bytes": [first], "words": TOKENIZER.encode(" stop é完 aab")}[kind] * 300
    decoded = 0

    class Counting:
        def decode(self, ids):
            nonlocal decoded
            decoded += len(ids)
            return TOKENIZER.decode(ids)

    pieces = Pieces(Counting())
    given = "".join(pieces.add(t) for t in tokens)
    text = TOKENIZER.decode(tokens)
    assert text.startswith(given) and len(given) > len(text) - 50
    assert decoded < 500 * len(tokens)


def test_a_megabyte_of_stop_text_costs_what_is_written(make_lm):
    """The table of a stop text grows with the agreement, not with its length."""
    lm = make_lm(context=256)
    letters = tuple(lm.tokenizer.encode("ab"))
    huge = ("ab" * 500_000, *("a" * 100_000 + chr(97 + k) for k in range(16)))
    asked = Request((5,), SamplingLaw(allowed=letters), 2, 100, stop_strings=huge, seed=1)
    plain = Request((5,), SamplingLaw(allowed=letters), 2, 100, seed=1)
    with_stops, without = run(LocalEngine(lm, 4, 128), [asked, plain])
    assert with_stops == without and [c.stop for c in without] == ["length"] * 2
    watch = Watch(lm.tokenizer, huge)
    for token in without[0].tokens:
        watch.add(token)
    assert all(len(s.back) <= 101 for s in watch.stops.stops)
    with pytest.raises(EngineError, match="empty stop text"):
        run(LocalEngine(lm, 4, 128), [Request((5,), stop_strings=("",))])
