"""A turn says by name why it ended, and which weights wrote it."""

import asyncio
from dataclasses import replace

import pytest
from rollout_talk import TOKENIZER, Talk, encode, seat, speaker

from trailmark.engines.base import Completion, EngineError
from trailmark.engines.scripted import ScriptedEngine
from trailmark.formats.turns import Writer, messages_of
from trailmark.rollout.branch import Point, branch
from trailmark.rollout.play import Seat, play
from trailmark.runs.episode_json import from_json, to_json
from trailmark.tasks.arith import Arith
from trailmark.tasks.taxi import Taxi
from trailmark.types import CUT_OFF, ENDED, Failed, SamplingLaw, Turn


def turns(engine, source, **options):
    return [t for e in play(source, source.tasks(n=2), [Seat("policy", engine, **options)]) for t in e.turns]


def test_a_full_context_is_not_a_limit_of_tokens(tiny):
    """Every answer is cut off, by the one limit or the other."""
    never = SamplingLaw(min_tokens=1000)
    assert {t.stop for t in turns(tiny, Arith(), law=never, max_tokens=5)} == {"length"}
    full = turns(tiny, Arith(), law=never, max_tokens=4000)
    assert {t.stop for t in full} == {"context_full"} and all(t.cut_off and not t.ended for t in full)
    assert all(len(t.prompt) + len(t.tokens) == tiny.max_len for t in full)


def test_a_label_is_chosen_and_not_cut_off(tiny):
    labels = turns(tiny, Taxi(mode="pickup", horizon=3, history="none", menu=False))
    assert labels and all(t.stop == "label" and len(t.tokens) == 1 and not t.cut_off and not t.ended for t in labels)


def test_an_end_token_and_a_stop_text_are_two_ends(tiny):
    free = turns(tiny, Arith(), law=SamplingLaw(temperature=5.0), max_tokens=400)
    ended = [t for t in free if t.tokens[-1] == TOKENIZER.eos_token_id]
    assert ended and all(t.stop == "stopped" and t.ended for t in ended)
    cut = turns(tiny, Arith(), max_tokens=400, stop_strings=tuple("abcdefghijklmnopqrstuvwxyz0123456789"))
    assert {t.stop for t in cut} <= {"stop_string", "stopped"} and "stop_string" in {t.stop for t in cut}


def test_every_name_has_one_meaning():
    names = ("", "stopped", "stop_string", "label", "length", "context_full", "forced_end", "failed")
    found = {name: (Turn("a", (), (), stop=name).ended, Turn("a", (), (), stop=name).cut_off) for name in names}
    assert {n for n, (ended, _) in found.items() if ended} == set(ENDED) == {"stopped", "stop_string"}
    assert {n for n, (_, cut) in found.items() if cut} == set(CUT_OFF) == {"length", "context_full", "forced_end"}


class Silent:
    """An engine that answers its first question, and then is gone."""

    name, version, tokenizer = "silent", 3, TOKENIZER

    def __init__(self):
        self.inner, self.asked = ScriptedEngine(speaker, TOKENIZER), 0

    async def sample(self, request):
        self.asked += 1
        if self.asked > 1:
            raise EngineError("the server is gone")
        return await self.inner.sample(request)


def test_a_failed_play_shows_what_the_engine_was_asked():
    source = Talk()
    (e,) = play(source, source.tasks(n=1), [Seat("policy", Silent(), max_tokens=20)])
    assert e.outcome == Failed("engine: the server is gone") and [t.stop for t in e.turns] == ["stopped", "failed"]
    lost = e.turns[1]
    assert (lost.tokens, lost.action, lost.version, lost.continues) == ((), None, 3, 0)
    assert "line 1" in TOKENIZER.decode(lost.prompt) and from_json(to_json(e)) == e
    written = messages_of(Writer(TOKENIZER, None, ()), e)  # nobody said anything there
    assert [m["content"] for m in written if m["role"] == "assistant"] == ["line 1"]
    again = branch(source, [Point(e, 1)], [seat(speaker, max_tokens=20)])[0][0]  # it can be played on from there
    assert again.turns[1].prompt == lost.prompt and again.turns[1].stop == "stopped"


class Moving:
    """An engine whose weights are published anew while it writes. It may say itself which weights wrote."""

    name, tokenizer = "moving", TOKENIZER

    def __init__(self, says=None):
        self.version, self.says = 4, says

    async def sample(self, request):
        self.version += 1
        await asyncio.sleep(0)
        ids = encode("ab")
        return [Completion(ids, (-1.0, -1.0), (-1.0, -1.0), "ab", "stopped", versions=self.says)]


@pytest.mark.parametrize(("says", "want"), [(None, (4, 5)), ((5, 5), (5, 5)), ((2, 4), (2, 4))])
def test_a_turn_names_the_first_and_the_last_weights_that_wrote_it(says, want):
    (e,) = play(Arith(), Arith().tasks(n=1), [Seat("policy", Moving(says))])
    (turn,) = e.turns
    assert turn.versions == want and turn.version == want[0]
    assert (turn.last_version is None) == (want[0] == want[1])
    line = to_json(e)
    assert from_json(line) == e and ('"last_version"' in line) == (want[0] != want[1])
    assert replace(turn, last_version=None).versions == (want[0], want[0])
