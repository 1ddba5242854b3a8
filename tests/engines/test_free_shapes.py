"""Free shapes: whatever the neighbours do, each sample has the log-probs of the model's own forward pass."""

import numpy as np
import pytest
import torch

from trailmark.engines.base import Request, run
from trailmark.engines.local import LocalEngine
from trailmark.models.attention import How, Slots
from trailmark.models.free_decoding import FreeDecoding
from trailmark.types import SamplingLaw

FAMILIES = ["gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2"]


def asked():
    """Groups and single samples, prompts of several lengths, and more samples than slots: they come and go."""
    draw = np.random.default_rng(3)
    sizes = ((40, 4, 20), (40, 3, 9), (7, 1, 30), (61, 1, 3), (35, 5, 14), (2, 2, 25), (90, 1, 12), (33, 4, 6))
    return [
        Request(tuple(draw.integers(0, 250, n).tolist()), SamplingLaw(), samples, tokens, key=f"r{k}")
        for k, (n, samples, tokens) in enumerate(sizes)
    ]


@pytest.mark.parametrize("slots", [3, 12, 32])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_log_probs_of_a_teacher_forced_scoring(make_lm, family, slots):
    lm = make_lm(family, window=16 if family in ("mistral", "gemma2") else None, heads=8)
    engine = LocalEngine(lm, slots=slots, max_len=128, fixed=False)
    for request, samples in zip(asked(), run(engine, asked())):
        for sample in samples:
            assert len(sample.tokens) == request.max_tokens
            want = engine.score_rows([[*request.prompt, *sample.tokens]], [len(request.prompt)])[0]
            np.testing.assert_allclose(sample.logp, want, atol=1e-4)


@pytest.mark.parametrize("how", [How(), How(0.3), How(window=9)])
@pytest.mark.parametrize("lengths", [(31, 31, 31, 31), (30, 3, 0, 17)])
def test_attention_of_a_step(how, lengths):
    draw = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=draw)
    module = torch.nn.Module()
    module.layer_idx = 0
    cache = Slots(6, 64)
    cache.write(list(range(6)), {0: (normal(6, 2, 40, 16), normal(6, 2, 40, 16))}, list(range(6)))
    index, q, k, v = torch.tensor(lengths), normal(4, 8, 1, 16), normal(4, 2, 1, 16), normal(4, 2, 1, 16)
    free = FreeDecoding(cache, index).attend(module, q, k, v, how)
    torch.testing.assert_close(free, cache.at(index, 32).attend(module, q, k, v, how), atol=1e-5, rtol=0)
