"""Conversations through the engine, against a forward pass of transformers over each whole sequence.

Laws, stop tokens and stop texts, several samples, callers that go away, long prompts in chunks, windows: for every
token, the law and the noise are computed again here in plain Python, and the token must be the best of their sum."""

import asyncio
import copy
import hashlib
import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from trailmark.engines import local
from trailmark.engines.base import Request
from trailmark.engines.local import LocalEngine
from trailmark.types import SamplingLaw

ENDS, MASK = tuple(range(4, 11)), 0xFFFFFFFF


def mix(x):
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK
    x ^= x >> 15
    x = x * 0x846CA68B & MASK
    return x ^ (x >> 16)


def noise(request, sample, place, vocab):
    words = hashlib.blake2b(f"{request.seed}\0{request.key}\0{sample}".encode(), digest_size=8).digest()
    a, b = int.from_bytes(words[:4], "little"), int.from_bytes(words[4:], "little")
    row = mix(a ^ mix((place * 0x9E3779B9 + 0x632BE5AB) & MASK))
    bits = [mix(mix((t * 0x9E3779B9 + row) & MASK) ^ mix(row ^ b)) for t in range(vocab)]
    return -np.log(-np.log((np.array(bits) + 0.5) / 2**32))


def under(logits, law, written):
    out = logits.copy()
    if law.allowed is not None:
        out[~np.isin(np.arange(len(out)), law.allowed)] = -np.inf
    if written < law.min_tokens:
        out[list(law.stop_ids)] = -np.inf
    if law.temperature == 0:
        return np.where(np.arange(len(out)) == out.argmax(), 0.0, -np.inf)
    out /= law.temperature
    if law.top_k:
        out[out < np.sort(out)[-law.top_k]] = -np.inf
    if law.top_p < 1:
        order = np.argsort(-out, kind="stable")
        p = np.exp(out[order] - out.max())
        out[order[np.cumsum(p) - p >= law.top_p * p.sum()]] = -np.inf
    return out


def logs(x):
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def check(theirs, tokenizer, request, sample, done, longest):
    whole = [*request.prompt, *done.tokens]
    with torch.no_grad():
        rows = theirs(torch.tensor([whole])).logits[0, len(request.prompt) - 1 :].double().numpy()
    for k, token in enumerate(done.tokens):
        law = under(rows[k], request.law, k)
        worth = law + noise(request, sample, k, len(law))
        assert worth[token] > worth.max() - 1e-4  # rounding of float32
        assert done.logp[k] == pytest.approx(logs(rows[k])[token], abs=1e-4)
        assert done.logq[k] == pytest.approx(logs(law)[token], abs=1e-4)
    text, last = tokenizer.decode(done.tokens), done.tokens[-1] in request.stop_ids
    assert not set(done.tokens[:-1]) & set(request.stop_ids)
    if last:
        assert done.stop == "stopped" and done.text == tokenizer.decode(done.tokens[:-1])
    elif done.ended:
        assert done.text == text[: min(text.find(s) for s in request.stop_strings if s in text)]
    else:
        assert done.text == text and (len(done.tokens) == request.max_tokens or len(whole) == longest)


LAWS = [
    SamplingLaw(), SamplingLaw(temperature=0.7), SamplingLaw(temperature=0), SamplingLaw(top_k=7),
    SamplingLaw(top_p=0.8), SamplingLaw(allowed=(3, 50, 51, 90, 200)), SamplingLaw(min_tokens=3, stop_ids=ENDS),
]  # fmt: skip


@pytest.mark.parametrize(("ahead", "fixed"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize(("family", "window"), [("llama", None), ("gpt2", None), ("gemma2", 24)])
def test_every_token_is_what_transformers_would_write(make_lm, monkeypatch, family, window, ahead, fixed):
    monkeypatch.setattr(local, "AHEAD", ahead)
    draw, lm = random.Random(7), make_lm(family, window=window, layers=2, width=32, heads=4)
    with torch.no_grad():
        for p in lm.model.parameters():
            if p.ndim > 1:
                p.mul_(6)  # sharp distributions: what is wrong shows
    theirs = AutoModelForCausalLM.from_config(copy.deepcopy(lm.base.config), attn_implementation="eager").eval()
    theirs.load_state_dict(lm.model.state_dict())
    engine = LocalEngine(lm, slots=12, max_len=160, fixed=fixed)
    engine.prefiller.chunk = 40
    checked = []

    async def talk(n):
        said = [draw.randrange(lm.vocab) for _ in range(draw.randrange(1, 80))]
        for turn in range(3):
            law = draw.choice(LAWS)
            ends = ENDS if law.min_tokens or draw.random() < 0.6 else ()
            texts = tuple(draw.sample(["a", "e", "th", "1"], 2)) if not law.min_tokens and draw.random() < 0.3 else ()
            many, most = draw.choice([1, 1, 2, 3]), draw.choice([1, 2, 9, 20])
            request = Request(tuple(said), law, many, most, ends, texts, seed=7, key=f"{n} {turn}")
            asked = asyncio.create_task(engine.sample(request))
            if draw.random() < 0.1:  # this caller goes away
                await asyncio.sleep(0)
                asked.cancel()
                continue
            done = await asked
            for k, one in enumerate(done):
                check(theirs, engine.tokenizer, request, k, one, engine.max_len)
                checked.append(len(one.tokens))
            said += [*done[0].tokens, *(draw.randrange(lm.vocab) for _ in range(draw.randrange(12)))]

    async def all_of_them():
        await asyncio.gather(*(talk(n) for n in range(8)))

    asyncio.run(all_of_them())
    assert len(checked) > 20 and sum(checked) > 100
    assert (engine.counts.reused > 0) == (ahead and not fixed)
