"""Drawing on the device, with the host a step behind, writes what drawing on the host writes: here on a CPU, where both
can run."""

import asyncio

import pytest
import torch
from test_independence import requests

from trailmark.engines import local
from trailmark.engines.base import Request, run
from trailmark.engines.local import LocalEngine
from trailmark.types import SamplingLaw


@pytest.fixture
def ahead(monkeypatch):
    monkeypatch.setattr(local, "AHEAD", True)


def plain(n=2, most=24):
    laws = [SamplingLaw(), SamplingLaw(temperature=0.7), SamplingLaw(temperature=0.0)]
    return [
        Request(tuple(range(3, 6 + 5 * k)), laws[k % 3], n, most - k, stop_ids=(7, 9), key=str(k)) for k in range(7)
    ]


@pytest.mark.parametrize("asked", [plain(), requests()], ids=["temperatures", "any law"])
def test_the_same_tokens_a_step_behind(make_lm, ahead, monkeypatch, asked):
    lm = make_lm("llama")
    behind = LocalEngine(lm, 4, 128)
    assert behind.decoder._ahead is not None
    got = run(behind, asked)
    monkeypatch.setattr(local, "AHEAD", False)
    want = run(LocalEngine(lm, 4, 128), asked)
    for a, b in zip(got, want, strict=True):
        for x, y in zip(a, b, strict=True):
            assert (x.tokens, x.text, x.stop) == (y.tokens, y.text, y.stop)
            assert x.logp == pytest.approx(y.logp, abs=1e-5) and x.logq == pytest.approx(y.logq, abs=1e-5)


def test_bitwise_over_neighbours_and_arrival(make_lm, ahead):
    lm, asked = make_lm("llama"), [*plain(), *requests()]
    together = run(LocalEngine(lm, 8, 128), asked)
    assert together == run(LocalEngine(lm, 8, 128), asked[::-1])[::-1]
    assert together == [run(LocalEngine(lm, 8, 128), [r])[0] for r in asked]


def test_a_listener_hears_every_token_and_a_client_may_go(make_lm, ahead):
    lm = make_lm("llama")
    engine = LocalEngine(lm, 4, 128)
    heard = []

    async def two():
        slow = asyncio.create_task(engine.sample(Request((3, 4, 5), max_tokens=100, key="gone")))
        done = await engine.sample(Request((3, 4, 5), max_tokens=10, key="heard"), heard.append, top=2)
        slow.cancel()
        return done

    (done,) = asyncio.run(two())
    assert tuple(w.token for w in heard) == done.tokens and all(len(w.top) == 2 for w in heard)
    assert heard[-1].done == done
    assert run(engine, [Request((3, 4, 5), max_tokens=10, key="heard")])[0] == [done]


def test_a_temperature_is_not_rounded_in_float64(make_lm, ahead):
    """logq = log softmax(logits / 0.7), to the digits of float64."""
    lm = make_lm("gpt2", dtype=torch.float64)
    ((done,),) = run(LocalEngine(lm, 2, 64), [Request((3, 4, 5), SamplingLaw(temperature=0.7), max_tokens=6)])
    ids = torch.tensor([[3, 4, 5, *done.tokens]])
    with torch.no_grad():
        logits = lm.base(input_ids=ids, use_cache=False).logits[0, 2:-1]
    want = (logits / 0.7).log_softmax(-1).gather(1, ids[0, 3:, None])[:, 0]
    assert done.logq == pytest.approx(want.tolist(), abs=1e-10)
