"""With fixed shapes a step on a CPU looks at few columns while samples are short: the bits are those of all columns."""

import numpy as np
import pytest
import torch

from trailmark.engines.base import Request, run
from trailmark.engines.local import LocalEngine
from trailmark.models import attention
from trailmark.models.attention import any_width, widths
from trailmark.types import SamplingLaw


def asked():
    draw = np.random.default_rng(3)
    laws = [SamplingLaw(), SamplingLaw(temperature=0.7, top_p=0.9), SamplingLaw(temperature=0)]
    lengths = (3, 30, 61, 94, 127, 190)
    return [
        Request(tuple(draw.integers(0, 250, n).tolist()), laws[k % 3], 1 + k % 2, 40, key=f"r{k}")
        for k, n in enumerate(lengths)
    ]


def seen(monkeypatch):
    """The widths of the keys that the steps of four slots read."""
    found = set()
    dense = attention._dense
    step = lambda q: q.shape[2] == 1 and len(q) == 4
    note = lambda q, k, *rest: (found.add(k.shape[2]) if step(q) else None, dense(q, k, *rest))[1]
    monkeypatch.setattr(attention, "_dense", note)
    return found


def test_the_widths():
    assert widths(512, 32) == [32, 64, 96, 128, 192, 256, 384, 512]
    assert widths(32, 32) == [32] and widths(160, 32) == [32, 64, 96, 128, 160]
    assert len(widths(8192, 32)) == 16


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "mistral", "gemma", "gemma2"])
def test_the_bits_of_all_columns(make_lm, family, monkeypatch):
    lm = make_lm(family, window=16 if family in ("mistral", "gemma2") else None)
    few, all_ = LocalEngine(lm, slots=4, max_len=256), LocalEngine(lm, slots=4, max_len=256)
    all_.decoder._widths = [256]
    found = seen(monkeypatch)
    got = run(few, asked())
    # with soft-capped scores all columns are read
    assert found == ({256} if family == "gemma2" else {64, 96, 128, 192, 256})
    assert got == run(all_, asked())
    for request, want in zip(asked(), got):  # and the neighbours, who set the width, change nothing
        assert run(LocalEngine(lm, slots=4, max_len=256), [request])[0] == want


def test_a_cpu_that_rounds_otherwise_reads_all_columns(make_lm, monkeypatch):
    lm = make_lm("llama")
    want = run(LocalEngine(lm, slots=4, max_len=256), asked())
    found = seen(monkeypatch)
    monkeypatch.setattr(attention, "any_width", lambda *_: False)
    assert run(LocalEngine(lm, slots=4, max_len=256), asked()) == want and found == {256}


def test_the_look_at_this_cpu_finds_a_sum_in_another_order(monkeypatch):
    def wrong(q, k, v, mask, scale, softcap):  # as if the first half of the columns were summed for itself
        half = k.shape[2] // 2
        w = (q @ k.transpose(2, 3)).masked_fill(~mask, -torch.inf).softmax(-1)
        return w[..., :half] @ v[:, :, :half] + w[..., half:] @ v[:, :, half:]

    monkeypatch.setattr(attention, "_dense", wrong)
    assert not any_width.__wrapped__(4, 4, 16, 256, torch.float32)
