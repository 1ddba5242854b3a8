"""Checkpoints hold everything, transformers loads them as they lie, and the loop keeps, stops and resumes as it
says."""

import json
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trailmark.config import (
    CheckpointConfig,
    EvalConfig,
    LearnerConfig,
    LoraConfig,
    ModelConfig,
    ModelShape,
    OptimConfig,
    RunConfig,
)
from trailmark.errors import LearnError, RunError
from trailmark.learn.learner import Learner, Update, split
from trailmark.learn.loop import Training, train
from trailmark.learn.optim import Optimiser, rate
from trailmark.models.load import load_model
from trailmark.objectives.sft import Sft
from trailmark.objectives.value import Value
from trailmark.runs import checkpoints
from trailmark.runs.diff import diff_runs
from trailmark.runs.store import Run, read_metrics
from trailmark.types import Sample

SHAPE = ModelShape(layers=1, width=32, heads=2, context=64)


def rows(seed, n=4, head=False):
    draw = np.random.default_rng(seed)
    out = []
    for _ in range(n):
        tokens = draw.integers(0, 250, 9)
        weight = np.r_[0, np.ones(8)]
        streams = {"weight": weight, "value_weight": weight, "returns": draw.normal(size=9)}
        out.append(Sample(tokens, streams, {"weight": 8.0, "value_weight": 8.0}))
    return out


class Toy(Training):
    """Two models, two optimisers, two kinds of update, a critic every second step, a replay of what was seen before,
    and a memory of its own: a sixth method that touches no file of the core."""

    def __init__(self, config, evals=None):
        policy, critic = load_model(config.model), load_model(config.model.model_copy(update={"seed": 5, "lora": None}))
        critic.add_head("value")
        trains = {"policy": config.learner.optim, "critic": OptimConfig(lr=1e-2, groups={"heads.*": {"lr": 0.1}})}
        self.learner = Learner({"policy": policy, "critic": critic}, config.learner, trains, total=config.steps)
        self.replay, self.evals = [], evals or {}

    def updates(self, step):
        fresh = rows(step)
        yield Update(fresh, Sft(), name="fresh")
        if self.replay:
            yield Update(rows(self.replay[0], 2), Sft(), name="replay")
        if step % 2 == 0:
            yield Update(fresh, Value(), model="critic", passes=2, minibatches=2, name="critic")
        self.replay = [*self.replay, step][-3:]

    def evaluate(self, step):
        return {"reward": self.evals.get(step, 0.0)}

    def state(self):
        return {"replay": self.replay}

    def load(self, state):
        self.replay = list(state["replay"])


def config(steps=6, lora=False, **more):
    settings = {
        "method": "toy", "steps": steps, "model": ModelConfig(shape=SHAPE, lora=LoraConfig(rank=2) if lora else None),
        "learner": LearnerConfig(optim=OptimConfig(lr=1e-2, schedule="cosine", warmup=2), ema=0.9),
        "checkpoint": CheckpointConfig(every=3),
    }  # fmt: skip
    return RunConfig(**{**settings, **more})


@pytest.mark.parametrize("lora", [False, True])
def test_twice_n_is_n_resume_n(tmp_path, lora):
    """Weights, both optimisers, the moving average, the replay, metrics: bit for bit."""
    whole = Run.create(tmp_path / "whole", "method: toy\n")
    train(Toy(config(lora=lora)), config(lora=lora), whole)
    parts = Run.create(tmp_path / "parts", "method: toy\n")

    class Dies(Toy):
        def updates(self, step):
            if step == 5:
                raise KeyboardInterrupt
            yield from super().updates(step)

    with pytest.raises(KeyboardInterrupt):
        train(Dies(config(lora=lora)), config(lora=lora), parts)
    assert [r["step"] for r in read_metrics(parts.path)] == [1, 2, 3, 4]
    train(Toy(config(lora=lora)), config(lora=lora), parts, resume=True)
    assert diff_runs(whole.path, parts.path) == []
    assert "critic/value" in read_metrics(whole.path)[1] and "critic/value" not in read_metrics(whole.path)[2]


@pytest.mark.parametrize("lora", [False, True])
def test_transformers_loads_it_as_it_lies(tmp_path, lora):
    run = Run.create(tmp_path / "run", "method: toy\n")
    method = Toy(config(lora=lora))
    train(method, config(lora=lora), run)
    folder = run.checkpoints_dir / "000006"
    theirs = AutoModelForCausalLM.from_pretrained(folder / "policy")
    ids = torch.arange(8)[None]
    with torch.no_grad():
        want = method.learner.models["policy"].base(ids).logits
        assert torch.allclose(theirs(ids).logits, want, atol=1e-6)
    assert AutoTokenizer.from_pretrained(folder / "policy").encode("ab") == [64, 65]
    assert not [p for p in folder.rglob("*") if p.suffix in (".bin", ".pt", ".pkl", ".pth")]
    again = load_model(ModelConfig(name=str(folder / "policy")))
    with torch.no_grad():
        assert torch.equal(again.base(ids).logits, want)


def test_best_last_and_early_stop(tmp_path):
    """Evaluations 1 3 2 2 …: the best (step 4) and the newest two are kept, and after two without a better one it
    stops."""
    more = {
        "steps": 20,
        "checkpoint": CheckpointConfig(every=2, keep_last=2, keep_best=1),
        "eval": EvalConfig(every=2, patience=2),
    }
    run = Run.create(tmp_path / "run", "method: toy\n")
    train(Toy(config(**more), {2: 1.0, 4: 3.0, 6: 2.0, 8: 2.0, 10: 9.0}), config(**more), run)
    assert [p.name for p in checkpoints.listed(run.checkpoints_dir)] == ["000004", "000006", "000008"]
    assert read_metrics(run.path)[-1]["step"] == 8
    assert train(Toy(config(**more)), config(**more), run, resume=True) == {}  # it is complete, and stays as it is
    assert read_metrics(run.path)[-1]["step"] == 8


def test_moving_average_is_the_recursion():
    lm = load_model(ModelConfig(shape=SHAPE))
    optimiser = Optimiser(lm, OptimConfig(lr=0.1), 10, ema=0.75)
    name, p = next(iter(lm.parameters()))
    shadow = p.detach().clone()
    for _ in range(3):
        for q in dict(lm.parameters()).values():
            q.grad = torch.ones_like(q)
        optimiser.step()
        shadow = 0.75 * shadow + 0.25 * p.detach()
    assert torch.allclose(optimiser.average[name], shadow, atol=1e-6)


def test_schedules_by_hand():
    cosine = OptimConfig(schedule="cosine", warmup=0.2, final=0.1)
    assert [rate(cosine, s, 10) for s in (0, 1, 2, 6, 10)] == pytest.approx([0.5, 1.0, 1.0, 0.55, 0.1])
    linear = OptimConfig(schedule="linear", warmup=4, final=0.0)
    assert [rate(linear, s, 12) for s in (0, 3, 4, 8, 12)] == pytest.approx([0.25, 1.0, 1.0, 0.5, 0.0])
    assert rate(OptimConfig(), 7, 3) == 1.0


def test_groups_clip_and_norm():
    lm = load_model(ModelConfig(shape=SHAPE))
    lm.add_head("value")
    optim = OptimConfig(lr=1.0, betas=(0.0, 0.0), clip=0.5, groups={"heads.*": {"lr": 0.25}})
    optimiser = Optimiser(lm, optim, 1)
    before = {n: p.detach().clone() for n, p in lm.parameters()}
    for p in dict(lm.parameters()).values():
        p.grad = torch.full_like(p, 2.0)
    count = sum(p.numel() for p in before.values())
    assert optimiser.step()["grad_norm"] == pytest.approx(2 * count**0.5, rel=1e-5)
    moved = {n: float((before[n] - p.detach()).mean()) for n, p in lm.parameters()}
    assert moved["heads.value.weight"] == pytest.approx(0.25, rel=1e-3)  # Adam's first step is the sign, times the rate
    assert moved["lm_head.weight" if "lm_head.weight" in moved else "model.norm.weight"] == pytest.approx(1.0, rel=1e-3)
    with pytest.raises(LearnError, match="'nothing\\.\\*' matches no trained parameter"):
        Optimiser(lm, OptimConfig(groups={"nothing.*": {"lr": 1.0}}), 1)


def test_a_gradient_that_is_not_finite_changes_nothing():
    lm = load_model(ModelConfig(shape=SHAPE))
    learner = Learner({"policy": lm}, LearnerConfig())
    before = lm.fingerprint()
    bad = [
        Sample(s.tokens, {**s.streams, "weight": np.where(s.streams["weight"] > 0, np.inf, 0)}, s.mass) for s in rows(0)
    ]
    with pytest.raises(LearnError, match="nothing was changed"):
        learner.update(Update(bad, Sft()))
    for p in dict(lm.parameters()).values():
        p.grad = torch.full_like(p, float("nan"))
    with pytest.raises(LearnError, match="not finite"):
        learner.optimisers["policy"].step()
    assert lm.fingerprint() == before


def test_minibatches_keep_units():
    parts = split([Sample(np.arange(3), unit=f"u{k // 2}") for k in range(10)], 3)
    assert [len(p) for p in parts] == [2, 4, 4] and [s.unit for s in parts[1]] == ["u1", "u1", "u2", "u2"]
    assert [len(p) for p in split(rows(0), 9)] == [1, 1, 1, 1]


def test_mixed_precision_trains_float32_weights():
    lm = load_model(ModelConfig(shape=SHAPE))
    learner = Learner({"policy": lm}, LearnerConfig(amp="bf16", optim=OptimConfig(lr=1e-2)))
    exact = Learner({"policy": load_model(ModelConfig(shape=SHAPE))}, LearnerConfig(optim=OptimConfig(lr=1e-2)))
    low, full = (m.update(Update(rows(0), Sft()))["nll"] for m in (learner, exact))
    assert low == pytest.approx(full, rel=2e-2) and low != full
    assert all(p.dtype == torch.float32 for _, p in lm.parameters())


def test_state_is_readable(tmp_path):
    run = Run.create(tmp_path / "run", "method: toy\n")
    train(Toy(config(steps=3)), config(steps=3), run)
    state = json.loads((run.checkpoints_dir / "000003" / "state.json").read_text())
    assert (
        state["step"] == 3
        and state["method"] == {"replay": [1, 2, 3]}
        and state["optimiser_steps"] == {"policy": 5, "critic": 4}
    )


def test_the_moving_average_can_be_played_with():
    lm = load_model(ModelConfig(shape=SHAPE))
    optimiser = Optimiser(lm, OptimConfig(lr=0.1), 10, ema=0.5)
    for q in dict(lm.parameters()).values():
        q.grad = torch.ones_like(q)
    optimiser.step()
    mine = lm.fingerprint()
    with optimiser.averaged():
        assert lm.fingerprint() != mine
        assert torch.equal(dict(lm.parameters())["model.norm.weight"], optimiser.average["model.norm.weight"])
    assert lm.fingerprint() == mine


def test_the_m_best_are_kept_and_a_run_may_be_moved(tmp_path):
    """.1 .5 .7 .6 .2 .3 with two best and one last: steps 3, 4 and 6."""
    more = {"checkpoint": CheckpointConfig(keep_last=1, keep_best=2), "eval": EvalConfig(every=1), "lora": True}
    run = Run.create(tmp_path / "run", "method: toy\n")
    values = dict(enumerate([0.1, 0.5, 0.7, 0.6, 0.2, 0.3], 1))
    train(Toy(config(**more), values), config(**more), run)
    assert [p.name for p in checkpoints.listed(run.checkpoints_dir)] == ["000003", "000004", "000006"]
    moved = run.path.rename(tmp_path / "elsewhere")
    assert load_model(ModelConfig(name=str(moved / "checkpoints" / "000006" / "policy"))).adapted
    average = load_model(ModelConfig(name=str(moved / "checkpoints" / "000006" / "policy-ema")))
    assert (
        average.fingerprint()
        != load_model(ModelConfig(name=str(moved / "checkpoints" / "000006" / "policy"))).fingerprint()
    )


def test_a_metric_that_is_not_there_is_named(tmp_path):
    from trailmark.errors import RecipeError

    more = {"checkpoint": CheckpointConfig(metric="eval/rewrd"), "eval": EvalConfig(every=2)}
    with pytest.raises(RecipeError, match="eval/rewrd.*Did you mean 'eval/reward'"):
        train(Toy(config(**more)), config(**more), Run.create(tmp_path / "run", "method: toy\n"))


def cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


DAMAGE = {
    "a truncated model": lambda c: cut(c / "policy" / "model.safetensors"),
    "an empty model": lambda c: (c / "policy" / "model.safetensors").write_bytes(b""),
    "no model": lambda c: (c / "policy" / "model.safetensors").unlink(),
    "no optimiser": lambda c: (c / "optimiser-policy.safetensors").unlink(),
    "a truncated optimiser": lambda c: cut(c / "optimiser-policy.safetensors"),
    "half a state": lambda c: cut(c / "state.json"),
    "an empty state": lambda c: (c / "state.json").write_text(""),
    "another state": lambda c: (c / "state.json").write_text("{}"),
    "a state that is a list": lambda c: (c / "state.json").write_text("[1]"),
    "no state": lambda c: (c / "state.json").unlink(),
    "no folder for the critic": lambda c: shutil.rmtree(c / "critic"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_resume_goes_back_to_the_checkpoint_before_a_damaged_one_and_says_so(tmp_path, capsys, damage):
    whole, parts = Run.create(tmp_path / "a", "method: toy\n"), Run.create(tmp_path / "b", "method: toy\n")
    train(Toy(config()), config(), whole)
    train(Toy(config()), config(), parts)
    newest = checkpoints.listed(parts.checkpoints_dir)[-1]
    DAMAGE[damage](newest)
    capsys.readouterr()
    train(Toy(config()), config(), parts, resume=True)
    said = capsys.readouterr().err
    before = checkpoints.listed(whole.checkpoints_dir)[-2].name
    assert f"{newest} is damaged" in said and f"goes on from step {int(before)}" in said
    assert diff_runs(whole.path, parts.path) == []  # as if nothing had happened
    assert (parts.path / "damaged" / newest.name).is_dir()  # nothing is thrown away


def test_resume_with_no_good_checkpoint_left_is_refused_and_touches_nothing(tmp_path):
    run = Run.create(tmp_path / "a", "method: toy\n")
    train(Toy(config()), config(), run)
    for path in checkpoints.listed(run.checkpoints_dir):
        cut(path / "state.json")
    files = sorted(tmp_path.rglob("*"))
    with pytest.raises(RunError, match="is damaged .* no earlier checkpoint can be read"):
        train(Toy(config()), config(), run, resume=True)
    assert sorted(tmp_path.rglob("*")) == files
