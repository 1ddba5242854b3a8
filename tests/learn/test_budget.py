"""How large micro-batches are where the recipe does not say, and what happens when they do not fit."""

import numpy as np
import pytest
import torch

from trailmark.config import LearnerConfig, OptimConfig
from trailmark.errors import LearnError
from trailmark.learn import budget
from trailmark.learn.learner import Learner
from trailmark.models.readout import Readout
from trailmark.objectives.weighted_logp import WeightedLogp
from trailmark.types import Sample


def batch(n=6, length=40):
    draw = np.random.default_rng(0)
    head = draw.integers(3, 50, length // 2)
    rows = [np.concatenate([head, draw.integers(3, 50, length // 2)]) for _ in range(n)]
    weight = np.r_[np.zeros(length // 2), np.ones(length - length // 2)]
    return [
        Sample(r, {"weight": weight, "advantage": weight * k}, {"weight": weight.sum()}) for k, r in enumerate(rows)
    ]


def test_a_cpu_keeps_its_micro_batches(make_lm):
    learner = Learner({"policy": make_lm("llama")}, LearnerConfig())
    learner.pack(batch())
    assert learner.places == budget.PLAIN == 8192


def test_what_is_free_is_filled_and_rounded_down(make_lm, monkeypatch):
    lm, frozen = (make_lm("llama", layers=2, width=64, ffn=256) for _ in range(2))
    weights = sum(p.numel() for p in lm.model.parameters())
    # one layer, uncompiled: (3 * 256 + 8 * 64) * 1.5 numbers of 4 bytes; two layers are kept
    each = 2 * 1280 * 1.5 * 4
    assert budget.bytes_per_token(lm, True, False) == each
    free = weights * 12 + 2048 * lm.vocab * 12 + 5000 * each / budget.SHARE
    monkeypatch.setattr(budget, "free_memory", lambda device: int(free) + 100)
    monkeypatch.setattr(type(lm), "device", property(lambda self: torch.device("cuda")))
    for one in (lm, frozen):
        monkeypatch.setattr(one.compiled, "wanted", False)
    assert budget.places({"policy": lm}, {"policy": None}, False) == 4096
    assert budget.places({"policy": lm, "same": lm}, {"policy": None}, False) == 4096
    assert budget.places({"policy": lm, "ref": frozen}, {"policy": None}, False) == 2048
    assert [budget.rounded(x) for x in (0, 1023, 1024, 5000, 1e9)] == [1024, 1024, 1024, 4096, 131072]


def test_a_batch_that_does_not_fit_is_cut_smaller_with_one_line(make_lm, monkeypatch, capsys):
    lm = make_lm("llama", dtype=torch.float64)
    samples = batch()
    want = Learner({"policy": lm}, LearnerConfig()).gradient(samples, WeightedLogp())
    full = torch.cat([p.grad.flatten() for p in lm.model.parameters() if p.grad is not None])
    learner = Learner({"policy": lm}, LearnerConfig())
    learner.places = 4096
    seen, own = [], lm.hidden

    def tight(ids, layout, pos):
        seen.append(learner.places)
        if learner.places > 1024:
            raise torch.OutOfMemoryError("no room")
        return own(ids, layout, pos)

    monkeypatch.setattr(lm, "hidden", tight)
    got = learner.gradient(samples, WeightedLogp())
    assert got == pytest.approx(want, abs=1e-12) and seen[:3] == [4096, 2048, 1024]
    again = torch.cat([p.grad.flatten() for p in lm.model.parameters() if p.grad is not None])
    assert torch.allclose(again, full, atol=1e-12)
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "micro-batches of 4,096 tokens do not fit cpu: 2,048 from now on",
        "micro-batches of 2,048 tokens do not fit cpu: 1,024 from now on",
    ]


def test_what_a_recipe_asks_for_is_not_changed_behind_its_back(make_lm, monkeypatch):
    lm = make_lm("llama")
    learner = Learner({"policy": lm}, LearnerConfig(micro_tokens=5000))

    def none(ids, layout, pos):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(lm, "hidden", none)
    for work in (
        lambda: learner.gradient(batch(), WeightedLogp()),
        lambda: learner.fill(batch(), old=Readout("")),
    ):
        with pytest.raises(LearnError, match="5,000 tokens does not fit the memory of cpu: lower learner.micro_tokens"):
            work()
    assert all(p.grad is None for p in lm.model.parameters())


def test_frozen_models_may_lie_elsewhere(make_lm):
    policy, ref = make_lm("llama"), make_lm("llama", seed=1)
    plain = Learner({"policy": policy, "ref": ref}, LearnerConfig())
    away = Learner({"policy": policy, "ref": ref}, LearnerConfig(offload=["frozen"]))
    a, b = (x.fill(batch(), ref=Readout("", model="ref")) for x in (plain, away))
    assert all(np.array_equal(x.streams["ref"], y.streams["ref"]) for x, y in zip(a, b, strict=True))
    assert away._frozen == [ref]


def test_eight_bits_need_a_gpu_and_say_so(make_lm):
    with pytest.raises(LearnError, match="learner.optim.bits=8 needs"):
        Learner({"policy": make_lm("llama")}, LearnerConfig(optim=OptimConfig(bits=8)))
