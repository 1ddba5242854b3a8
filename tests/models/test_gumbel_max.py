"""Drawing without most of the noise, against the arg max over all noise: the same tokens, bit for bit."""

import math

import numpy as np
import pytest
import torch

from trailmark.engines import drawing
from trailmark.engines.base import Request, draw_key, run
from trailmark.engines.local import LocalEngine
from trailmark.models import gumbel_max
from trailmark.models.gumbel_max import winners
from trailmark.models.sampling import NEVER, gumbel, law_logits, noise_of
from trailmark.types import SamplingLaw

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def all_noise(logits, keys, positions):
    return (logits + gumbel(keys, positions, torch.arange(logits.shape[1]), logits.dtype)).argmax(-1)


def words(rows, name="k"):
    return torch.tensor([draw_key(4, name, n) for n in range(rows)]), torch.arange(rows) * 37 % 500


def rows_of(rows, vocab, scale, dtype, seed=0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed), dtype=dtype) * scale


@BOTH
@pytest.mark.parametrize("vocab", [1, 2, 3, 7, 31, 260, 1000, 4099, 49_152])
def test_the_winners_of_all_noise(vocab, dtype):
    """From logits that are all alike to logits of which one alone can win."""
    many = 40 if vocab > 4000 else 600
    keys, positions = words(many)
    for scale in (0.0, 0.05, 0.5, 1.5, 3.0, 10.0, 1e3, 1e30):
        logits = rows_of(many, vocab, scale, dtype)
        assert torch.equal(winners(logits, keys, positions), all_noise(logits, keys, positions)), scale


@BOTH
@pytest.mark.parametrize("seed", range(40))
def test_the_winners_of_rounded_logits(seed, dtype):
    """Real logits: one mode, a tail, a few equal values, as bfloat16 rounds them; far from 0, where sums round most."""
    logits = rows_of(24, 2000, 2.5, dtype, seed)
    logits[:, ::7] += 5 * rows_of(24, 286, 1.0, dtype, seed + 100)
    logits = (logits + 40 * (seed % 5)).bfloat16().to(dtype) * (1 + seed % 3)
    keys, positions = words(24, f"seed {seed}")
    assert torch.equal(winners(logits, keys, positions), all_noise(logits, keys, positions))


LAWS = [
    SamplingLaw(temperature=0.0),
    SamplingLaw(temperature=0.05),
    SamplingLaw(temperature=0.7),
    SamplingLaw(temperature=4.0),
    SamplingLaw(top_k=1),
    SamplingLaw(top_k=40, temperature=1.3),
    SamplingLaw(top_p=0.9),
    SamplingLaw(top_p=0.3, top_k=200, temperature=2.0),
    SamplingLaw(allowed=(0, 5, 1999)),
    SamplingLaw(allowed=tuple(range(0, 2000, 3)), temperature=0.6),
    SamplingLaw(min_tokens=9, stop_ids=(1, 2, 3)),
]


@BOTH
@pytest.mark.parametrize("law", LAWS, ids=str)
def test_the_winners_under_a_law(law, dtype):
    keys, positions = words(200)
    for scale in (0.2, 2.0):
        logits = rows_of(200, 2000, scale, dtype)
        logits[:, 17] = NEVER
        under = law_logits(logits, [law], np.zeros(200, int), np.arange(200) % 20)
        assert torch.equal(winners(under, keys, positions), all_noise(under, keys, positions))


@BOTH
def test_equal_scores_and_words_at_the_edges(dtype):
    """Few different words and logits, so that scores tie: the first token wins, as in an arg max."""
    draw = np.random.default_rng(0)
    vocab = 300
    k = round(math.log2(vocab) / 2)
    least = 2**32 - (2**32 >> k)
    edges = np.array([0, 1, 2**31, least - 2, least - 1, least, least + 1, 2**32 - 1], np.uint32)
    real = np.float32 if dtype == torch.float32 else np.float64
    for tail in (8, 5, 3):  # with and without any large word
        for step in (0.25, 2.0, 12.0):
            bits = edges[:tail][draw.integers(0, tail, (400, vocab))]
            logits = (draw.integers(-4, 5, (400, vocab)) * step).astype(real)
            logits[draw.random((400, vocab)) < 0.1] = NEVER
            want = (logits + noise_of(bits).astype(real)).argmax(1)
            got = gumbel_max._winners(logits, bits)
            assert got is not None and (got == want).all()


@BOTH
def test_rows_without_a_finite_logit(dtype):
    """They get all noise: the answer is that of the arg max, whatever it is worth."""
    logits = rows_of(6, 50, 1.0, dtype)
    logits[1] = NEVER
    logits[2, 7] = math.nan
    logits[3, 9] = math.inf
    logits[4, :49] = NEVER
    keys, positions = words(6)
    assert torch.equal(winners(logits, keys, positions), all_noise(logits, keys, positions))


def test_noise_of_a_few_words_is_that_of_many():
    """The logarithm of a number does not depend on its place in an array."""
    bits = np.random.default_rng(1).integers(0, 2**32, 100_000, dtype=np.uint32)
    whole = noise_of(bits)
    for few in (1, 2, 3, 5, 8, 13, 100):
        at = np.random.default_rng(few).integers(0, len(bits), (200, few))
        assert all((noise_of(bits[i]) == whole[i]).all() for i in at)


def test_an_engine_draws_the_same_tokens(make_lm, monkeypatch):
    lm = make_lm("llama")
    laws = [SamplingLaw(), SamplingLaw(temperature=0.7, top_p=0.9), SamplingLaw(top_k=5), SamplingLaw(temperature=0.0)]
    asked = [Request((3, 5 + k), laws[k % 4], 8, 20, key=str(k)) for k in range(8)]
    drawn = []
    monkeypatch.setattr(drawing, "winners", lambda *a: (drawn.append(len(a[0])), winners(*a))[1])
    got = run(LocalEngine(lm, slots=64, max_len=64), asked)
    assert max(drawn) == 64
    monkeypatch.setattr(drawing, "winners", all_noise)
    assert run(LocalEngine(lm, slots=64, max_len=64), asked) == got
