"""The learner around its gradient: who is trained, what is refused, what stays finite."""

import dataclasses

import numpy as np
import pytest
import torch

from trailmark.config import LearnerConfig, ModelConfig, ModelShape, OptimConfig
from trailmark.errors import LearnError
from trailmark.learn.learner import Learner, Update
from trailmark.models.load import load_model
from trailmark.models.readout import Readout
from trailmark.objectives.clipped import Clipped
from trailmark.objectives.sft import Sft
from trailmark.objectives.value import Value
from trailmark.objectives.weighted_logp import WeightedLogp
from trailmark.samples import build_samples
from trailmark.types import Episode, Sample, SamplingLaw, Scored, Task, Turn

SHAPE = ModelConfig(shape=ModelShape(layers=1, width=32, heads=2, context=64))


def row(seed=0, law=None, n=12):
    draw = np.random.default_rng(seed)
    weight = np.r_[0, np.ones(n - 1)]
    streams = {
        "weight": weight,
        "value_weight": weight,
        "returns": draw.normal(size=n),
        "advantage": weight * draw.normal(),
    }
    laws = () if law is None else (law,)
    streams["law"] = np.where(weight > 0, 0 if laws else -1, -1)
    return Sample(draw.integers(0, 250, n), streams, {"weight": n - 1.0, "value_weight": n - 1.0}, laws)


def test_the_same_sample_twice_is_filled_twice():
    learner = Learner({"policy": load_model(SHAPE)}, LearnerConfig())
    a, b = row(0), row(1)
    filled = learner.fill([a, b, a], x=Readout("", law=False))
    assert len(filled) == 3 and np.array_equal(filled[0].streams["x"], filled[2].streams["x"])
    assert [f.tokens.tolist() for f in filled] == [s.tokens.tolist() for s in (a, b, a)]


def test_only_the_named_model_is_trained():
    policy, critic = load_model(SHAPE), load_model(SHAPE)
    critic.add_head("value", zero=False)
    learner = Learner(
        {"policy": policy, "critic": critic}, LearnerConfig(), {"policy": OptimConfig(), "critic": OptimConfig()}
    )
    with pytest.raises(LearnError, match="value reads nothing of model 'policy'"):
        learner.update(Update([row()], Value()))
    with pytest.raises(LearnError, match="'teacher' has no optimiser"):
        learner.update(Update([row()], Sft(), model="teacher"))
    before = policy.fingerprint(), critic.fingerprint()
    first = learner.update(Update([row()], Value(), model="critic"))
    assert policy.fingerprint() == before[0] and critic.fingerprint() != before[1]
    assert all(p.grad is None for _, p in policy.parameters())
    assert first["grad_norm"] > 0


def test_a_shared_body_runs_once_and_trains():
    """One model under two names: the policy term and the value term meet in one body."""
    lm = load_model(SHAPE)
    lm.add_head("value", zero=False)
    learner = Learner({"policy": lm, "critic": lm}, LearnerConfig(), {"policy": OptimConfig()})
    calls = []
    lm.base.base_model.register_forward_hook(lambda *a: calls.append(lm.model.training))

    class Both(WeightedLogp):
        def readouts(self):
            return [*super().readouts(), *Value().readouts()]

        def terms(self, view):
            return [*super().terms(view), *Value().terms(view)]

    learner.update(Update([row()], Both()))
    assert calls == [True]


def test_the_poorest_model_decides_the_layout():
    policy, critic = load_model(SHAPE), load_model(SHAPE)
    critic.sharing = "rows"
    learner = Learner({"policy": policy, "critic": critic}, LearnerConfig(layout="tree"))
    twice = [row(0), row(0)]
    assert learner.pack(twice)[0].computed == 2 * len(twice[0].tokens)
    critic.sharing = "tree"
    assert learner.pack(twice)[0].computed == len(twice[0].tokens)


@pytest.mark.parametrize(
    "law", [SamplingLaw(top_p=0.05), SamplingLaw(top_k=2), SamplingLaw(top_k=3, top_p=0.5, temperature=0.5)]
)
def test_a_drawn_token_stays_in_the_nucleus(law):
    """Random tokens lie outside almost every nucleus: their log-probs stay finite, and so does every term."""
    ref, policy = load_model(SHAPE.model_copy(update={"seed": 1})).freeze(), load_model(SHAPE)
    learner = Learner({"policy": policy, "ref": ref}, LearnerConfig(optim=OptimConfig(lr=0.05)))
    samples = learner.fill([row(k, law) for k in range(4)], old=Readout(""), ref=Readout("", model="ref"))
    for kl in ("k3", "exact"):
        for _ in range(3):
            report = learner.update(Update(samples, Clipped(beta=0.1, kl=kl)))
            assert all(np.isfinite(v) for v in report.values()) and {"policy", "kl"} <= set(report)
            assert all(torch.isfinite(p).all() for _, p in policy.parameters())


def test_greedy_tokens_have_no_gradient_to_follow():
    learner = Learner({"policy": load_model(SHAPE)}, LearnerConfig())
    with pytest.raises(LearnError, match="temperature 0"):
        learner.gradient([row(0, SamplingLaw(temperature=0))], WeightedLogp())
    learner.gradient([row(0, SamplingLaw(temperature=0))], Sft())  # imitation reads the model's own distribution


def test_mass_follows_weight():
    """Two sequences of one episode, 1 and 9 tokens: under a mean over turns each carries half, so any minibatch is a
    mean."""
    turns = (Turn("policy", (1,), (2,)), Turn("policy", (1,), tuple(range(3, 12))))
    e = Episode("e", Task("t"), "g", turns, {"self": Scored(1.0)})
    for mean, want in [
        ("turn", [0.5, 0.5]),
        ("decision", [1, 1]),
        ("token", [1, 9]),
        ("sequence", [0.1, 0.9]),
        ("constant", [0.1, 0.9]),
    ]:
        assert [s.mass["weight"] for s in build_samples([e], "policy", mean=mean, length=5)] == pytest.approx(want)


def test_low_precision_training_is_warned_of():
    with pytest.warns(UserWarning, match="learner.amp"):
        Learner({"policy": load_model(SHAPE.model_copy(update={"dtype": "bfloat16"}))}, LearnerConfig())


def test_heads_compute_in_float32_under_autocast():
    lm = load_model(SHAPE)
    head = lm.add_head("value", zero=False)
    got = Learner({"policy": lm}, LearnerConfig(amp="bf16")).fill([row()], v=Readout("", "head"))[0].streams["v"]
    assert head.weight.dtype == torch.float32
    assert len({float(np.float32(x)) for x in got[1:]} - {float(torch.tensor(x).bfloat16()) for x in got[1:]}) > 5


def test_a_frozen_adapter_stays_frozen():
    from trailmark.config import LoraConfig

    lm = load_model(SHAPE.model_copy(update={"lora": LoraConfig(rank=2)})).freeze()
    with lm.without_adapter():
        pass
    assert not list(lm.parameters())


def test_long_chains_are_read_in_a_loop():
    turns = tuple(Turn("policy", (1,), (2,), continues=k - 1 if k else None) for k in range(3000))
    e = Episode("e", Task("t"), "g", turns, {"self": Scored(1.0)})
    assert e.sequence(2999) == (1, 2) * 3000
    assert dataclasses.replace(e, turns=turns[:2]).context(1) == (1, 2, 1)
