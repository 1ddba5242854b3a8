"""Prompts that go on from what a slot still holds write what they write when everything is computed again."""

import asyncio

import numpy as np
import pytest
import torch

from trailmark.engines import local
from trailmark.engines.base import Request, publish, run
from trailmark.engines.local import LocalEngine
from trailmark.engines.prefix_cache import PrefixCache, prefix_hashes
from trailmark.types import SamplingLaw

FAMILIES = ["llama", "gpt2", "mistral", "gemma"]


@pytest.fixture
def ahead(monkeypatch):
    monkeypatch.setattr(local, "AHEAD", True)


def talk(engine, law, turns=4, people=5, answer=6, most=7):
    """Conversations of several turns side by side; returns what was written, and the prompts' tokens in all."""
    asked = 0

    async def one(k):
        nonlocal asked
        prompt, written = tuple(3 + (j * (k + 2)) % 50 for j in range(70 + 3 * k)), []
        for turn in range(turns):
            asked += len(prompt)
            (done,) = await engine.sample(Request(prompt, law, 1, most, stop_ids=(1,), key=f"{k}/{turn}"))
            written.append(done)
            prompt = (*prompt, *done.tokens, *((11 * k + 5 * turn + j) % 50 + 3 for j in range(answer + k)))
        return written

    async def everyone():
        return await asyncio.gather(*(one(k) for k in range(people)))

    return asyncio.run(everyone()), asked


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("most", [1, 7])
def test_conversations_write_the_same_with_and_without_reuse(make_lm, ahead, family, most):
    lm = make_lm(family)
    lm.model.double()
    law = SamplingLaw(temperature=0.8)
    without = LocalEngine(lm, 8, 256, fixed=False)
    without.decoder.reuse = False
    want, asked = talk(without, law, most=most)
    engine = LocalEngine(lm, 8, 256, fixed=False)
    got, _ = talk(engine, law, most=most)
    for a, b in zip(got, want, strict=True):
        for x, y in zip(a, b, strict=True):
            assert (x.tokens, x.text, x.stop) == (y.tokens, y.text, y.stop)
            assert x.logp == pytest.approx(y.logp, abs=1e-10)
    assert (without.counts.computed, without.counts.reused) == (asked, 0)
    assert engine.counts.computed + engine.counts.reused == asked
    assert engine.counts.computed < 0.6 * asked


def test_more_people_than_slots_lose_reuse_and_nothing_else(make_lm, ahead):
    lm = make_lm("llama")
    lm.model.double()
    without = LocalEngine(lm, 2, 256, fixed=False)
    without.decoder.reuse = False
    want, asked = talk(without, SamplingLaw(), people=6)
    engine = LocalEngine(lm, 2, 256, fixed=False)
    got, _ = talk(engine, SamplingLaw(), people=6)
    assert [[c.tokens for c in p] for p in got] == [[c.tokens for c in p] for p in want]
    assert engine.counts.computed + engine.counts.reused == asked


def test_weights_that_change_make_slots_forget(make_lm, ahead):
    lm = make_lm("llama")
    engine = LocalEngine(lm, 4, 128, fixed=False)
    prompt = tuple(range(3, 60))
    (first,) = run(engine, [Request(prompt, SamplingLaw(temperature=0.0), 1, 8)])[0]
    longer = (*prompt, *first.tokens, 9, 8, 7)
    with torch.no_grad():
        for p in lm.model.parameters():
            p.mul_(1.5)
    publish(engine, 1)
    (got,) = run(engine, [Request(longer, SamplingLaw(temperature=0.0), 1, 8)])[0]
    (want,) = run(LocalEngine(lm, 4, 128), [Request(longer, SamplingLaw(temperature=0.0), 1, 8)])[0]
    assert engine.counts.reused == 0 and got.tokens == want.tokens


def test_fixed_shapes_never_reuse(make_lm, ahead):
    engine = LocalEngine(make_lm("llama"), 8, 256, fixed=True)
    talk(engine, SamplingLaw())
    assert engine.counts.reused == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_prompt_in_chunks_is_the_same_prompt(make_lm, ahead, family):
    lm = make_lm(family)
    lm.model.double()
    draw = np.random.default_rng(0)
    prompts = [tuple(int(t) for t in draw.integers(3, 60, n)) for n in (31, 32, 33, 64, 100, 150)]
    asked = [Request(p, SamplingLaw(), 2, 6, key=str(k)) for k, p in enumerate(prompts)]
    want = run(LocalEngine(lm, 4, 256), asked)
    engine = LocalEngine(lm, 4, 256, fixed=False)
    engine.prefiller.chunk = 32
    got = run(engine, asked)
    for a, b in zip(got, want, strict=True):
        for x, y in zip(a, b, strict=True):
            assert x.tokens == y.tokens and x.logp == pytest.approx(y.logp, abs=1e-10)


def test_the_longest_beginning_is_found_and_a_taken_slot_is_not():
    kept = PrefixCache()
    kept.add(0, range(100), (40, 99))
    kept.add(1, [*range(60), 7, 7], (60, 62))
    assert kept.find(list(range(120))) == (0, 99)
    assert kept.find(list(range(99))) == (1, 60)  # one token is always left to compute
    assert kept.find([*range(60), 7, 7, 8]) == (1, 62)
    assert kept.find([*range(1, 70)]) is None
    kept.drop(1)
    assert kept.find([*range(60), 7, 7, 8]) == (0, 40)
    kept.add(0, range(5), (5,))  # too short to be worth it
    assert kept.find(list(range(120))) is None


def test_hashes_tell_order_and_length_apart():
    rows = [[], [0], [0, 0], [1, 2, 3], [3, 2, 1], [1, 2, 4]]
    found = [int(prefix_hashes(np.array(r, np.int64))[-1]) for r in rows]
    assert len(set(found)) == len(rows)
    assert list(prefix_hashes(np.array([1, 2, 3])))[:3] == list(prefix_hashes(np.array([1, 2])))
