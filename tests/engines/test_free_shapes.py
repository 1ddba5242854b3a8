"""Free shapes: whatever the neighbours do, each sample has the log-probs of the model's own forward pass."""

import numpy as np
import pytest
import torch

from trailmark.engines.base import Request, run
from trailmark.engines.local import LocalEngine
from trailmark.models.attention import How, Slots
from trailmark.models.free_decoding import FreeDecoding, Groups
from trailmark.types import SamplingLaw

FAMILIES = ["gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2"]


# tokens of a prompt, samples, tokens of each. There are more samples than slots: they come and go.
MIXED = ((40, 4, 20), (40, 3, 9), (7, 1, 30), (61, 1, 3), (35, 5, 14), (2, 2, 25), (90, 1, 12), (33, 4, 6))
GROUPS = ((40, 4, 20), (33, 4, 9), (61, 4, 12), (40, 4, 30), (35, 3, 14), (90, 4, 12))


def asked(sizes):
    draw = np.random.default_rng(3)
    ids = [tuple(draw.integers(0, 250, n).tolist()) for n, *_ in sizes]
    return [
        Request(prompt, SamplingLaw(), samples, tokens, key=f"r{k}")
        for k, (prompt, (_, samples, tokens)) in enumerate(zip(ids, sizes))
    ]


@pytest.mark.parametrize("slots", [3, 12, 32])
@pytest.mark.parametrize("sizes", [MIXED, GROUPS], ids=["mixed", "groups"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_log_probs_of_a_teacher_forced_scoring(make_lm, family, sizes, slots, monkeypatch):
    lm = make_lm(family, window=16 if family in ("mistral", "gemma2") else None, heads=8)
    engine = LocalEngine(lm, slots=slots, max_len=128, fixed=False)
    used, products = [], Groups.products
    monkeypatch.setattr(Groups, "products", lambda self, *args: (used.append(self.rows), products(self, *args))[1])
    for request, samples in zip(asked(sizes), run(engine, asked(sizes))):
        for sample in samples:
            assert len(sample.tokens) == request.max_tokens
            want = engine.score_rows([[*request.prompt, *sample.tokens]], [len(request.prompt)])[0]
            np.testing.assert_allclose(sample.logp, want, atol=1e-4)
    if sizes is GROUPS and slots == 12 and family in ("gpt2", "llama"):
        assert any(rows is None for rows in used) and any(rows is not None for rows in used)


ALIKE = (3, 3, 3, 1, 1, 1), (3, 1, 3, 1, 3, 1), (5, 5, -1, 5, 5, 5), (1, 1, 2, 2, 2, -1), (-1, 4, 0, 0, 4, 0)


@pytest.mark.parametrize("group", ALIKE)
def test_a_step_of_rows_that_begin_alike(group):
    draw = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=draw)
    module = torch.nn.Module()
    module.layer_idx = 0
    cache, numbers = Slots(6, 64), np.array(group)
    kept = {0: (normal(6, 2, 50, 16), normal(6, 2, 50, 16))}
    prefix = np.array([0 if n < 0 else 32 + n for n in group])
    for row, n in enumerate(group):
        for tensor in kept[0]:
            tensor[row, :, : 32 + n] = tensor[group.index(n), :, : 32 + n]
    cache.write(list(range(6)), kept, list(range(6)))
    index = torch.tensor([0 if n < 0 else 40 + row for row, n in enumerate(group)])
    q, k, v = normal(6, 8, 1, 16), normal(6, 2, 1, 16), normal(6, 2, 1, 16)
    groups, live = Groups(numbers, prefix), numbers >= 0
    assert groups.worth
    got = FreeDecoding(cache, index, groups).attend(module, q, k, v, How())
    want = cache.at(index, 64).attend(module, q, k, v, How())
    torch.testing.assert_close(got[live], want[live], atol=1e-5, rtol=0)


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
