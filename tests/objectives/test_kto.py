"""KTO by hand, and its reference point: found once over the batch, whatever the micro-batches."""

import math

import numpy as np
import pytest
import torch
from tabular import TabularLM

from trailmark.config import LearnerConfig, OptimConfig
from trailmark.errors import LearnError
from trailmark.learn.learner import Learner
from trailmark.models.readout import Readout
from trailmark.objectives.kto import Kto, mismatched
from trailmark.types import Sample


def row(prompt, answer, role, name=""):
    weight = np.r_[np.zeros(len(prompt)), np.ones(len(answer))]
    return Sample(np.r_[prompt, answer].astype(np.int64), {"weight": weight}, {"weight": 1.0}, episode=name, role=role)


def sigma(x):
    return 1 / (1 + math.exp(-x))


def test_by_hand():
    """Prompts 7 and 8, answers 0 and 1; pi(0|7) = .8, pi(0|8) = .4, ref uniform over two. Crossed: (7, 1) has log .4
    and (8, 0) log .8, so their mean is below 0 and z = 0. With another policy it is above, and counts."""
    for p7, p8 in ((0.8, 0.4), (0.1, 0.9)):
        policy, ref = TabularLM([(7,), (8,)], 9), TabularLM([(7,), (8,)], 9)
        policy.set_policy({(7,): [p7, 1 - p7, *[0] * 7], (8,): [p8, 1 - p8, *[0] * 7]})
        ref.set_policy({(7,): [0.5, 0.5, *[0] * 7], (8,): [0.5, 0.5, *[0] * 7]})
        rows = [row([7], [0], "desirable"), row([8], [1], "undesirable")]
        good, bad = math.log(2 * p7), math.log(2 * (1 - p8))
        z = max(0.0, (math.log(2 * (1 - p7)) + math.log(2 * p8)) / 2)
        assert (z > 0) == (p7 == 0.1)
        learner = Learner({"policy": policy, "ref": ref}, LearnerConfig(), {})
        rows = learner.fill(rows, ref=Readout("", model="ref", law=False))
        got = learner.gradient(rows, Kto(beta=0.5, desirable=1.5, undesirable=0.5), ("policy",))
        want = 1.5 * (1 - sigma(0.5 * (good - z))) + 0.5 * (1 - sigma(0.5 * (z - bad)))
        assert got["kto"] == pytest.approx(want / 2, abs=1e-12)
        assert got["reference_point"] == pytest.approx(z, abs=1e-12)
        assert got["desirable_reward_median"] == pytest.approx(0.5 * good, abs=1e-12)
        s = sigma(0.5 * (good - z))  # z carries no gradient: dL/d logp(good) = -1.5 beta s (1 - s) / 2
        row7 = policy.model.logits.grad[policy.row[(7,)]]
        assert row7[0].item() == pytest.approx(-1.5 * 0.5 * s * (1 - s) * (1 - p7) / 2, abs=1e-12)


def test_mismatched_rows():
    rows = [row([1, 2], [3], "desirable"), row([1, 2], [4, 5], "undesirable"), row([6], [7, 8], "desirable")]
    made = mismatched(rows)
    assert [s.tokens.tolist() for s in made] == [[1, 2, 7, 8], [1, 2, 7, 8], [6, 4, 5]]
    assert [s.streams["weight"].tolist() for s in made] == [[0, 0, 1, 1], [0, 0, 1, 1], [0, 1, 1]]
    assert [len(s.tokens) for s in mismatched(rows, 3)] == [3, 3, 3]
    with pytest.raises(LearnError, match="two different prompts"):
        mismatched(rows[:2])


def test_micro_batches_change_nothing(make_lm):
    models = {"policy": make_lm("gpt2", dtype=torch.float64), "ref": make_lm("gpt2", dtype=torch.float64, seed=3)}
    models["ref"].freeze()
    draw = np.random.default_rng(2)
    rows = [
        row(draw.integers(0, 250, 3 + k % 4), draw.integers(0, 250, 2 + 3 * (k % 3)),
        ("desirable", "undesirable")[k % 2], f"e{k}")
        for k in range(7)
    ]  # fmt: skip
    seen = []
    for budget, layout in [(10_000, "rows"), (1, "rows"), (10_000, "left"), (30, "flat"), (20, "tree")]:
        config = LearnerConfig(micro_tokens=budget).model_copy(update={"layout": layout})
        learner = Learner(models, config, {"policy": OptimConfig()})
        full = learner.fill(rows, ref=Readout("", model="ref", law=False))
        report = learner.gradient(full, Kto(beta=0.3), ("policy",))
        seen.append((report, {n: p.grad.clone() for n, p in models["policy"].parameters()}))
    assert len({round(r["reference_point"], 10) for r, _ in seen}) == 1
    for report, grads in seen[1:]:
        assert report == pytest.approx(seen[0][0], abs=1e-10)
        assert max(float((grads[n] - g).abs().max()) for n, g in seen[0][1].items()) < 1e-10


def test_roles_are_checked():
    policy = TabularLM([(7,), (8,)], 9)
    learner = Learner({"policy": policy, "ref": policy}, LearnerConfig(), {})
    rows = learner.fill([row([7], [0], "chosen"), row([8], [0], "rejected")], ref=Readout("", model="ref", law=False))
    with pytest.raises(LearnError, match="desirable"):
        learner.gradient(rows, Kto())
