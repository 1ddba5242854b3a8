"""Step PPO, GRPO and ReMax: where rewards lie, what each token is credited, that each learns, and that runs go on."""

import dataclasses
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from tabular import TabularLM

from trailmark.config import LearnerConfig, ModelConfig, resolve
from trailmark.errors import ModelError, RecipeError
from trailmark.learn.checkpoint import save_model
from trailmark.learn.learner import Learner
from trailmark.methods.online_configs import StepRewards, StepRlRecipe
from trailmark.methods.step_rl import StepRlMethod, against_group, on_tokens, turn_rewards
from trailmark.models.load import load_model
from trailmark.models.tiny import tiny_tokenizer
from trailmark.objectives.clipped import Clipped
from trailmark.runs.diff import diff_runs
from trailmark.runs.launch import launch
from trailmark.runs.store import Run, read_metrics, read_segment
from trailmark.types import Episode, Sample, Scored, Task, Turn

TINY = {"name": "tiny", "shape": {"layers": 1, "width": 32, "heads": 2, "context": 64}}
BANDIT = {"name": "solved", "options": {"kind": "bandit", "rewards": [0, 0, 0, 1, 0, 0]}}
ARITH = {"name": "arith", "options": {"level": 1}}


def config(tmp_path, name="run", **more):
    given = {
        "method": "step_rl",
        "out": str(tmp_path / name),
        "model": TINY,
        "steps": 3,
        "prompts_per_step": 2,
        "n": 4,
        "engine": {"max_num_seqs": 8, "max_len": 64},
    }
    return resolve({**given, "learner": {"optim": {"lr": 3e-3}}, **more}, StepRlRecipe)


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """A reward model whose head was never trained, but is not 0: its scores differ from step to step."""
    folder = tmp_path_factory.mktemp("judge")
    lm = load_model(ModelConfig.model_validate({**TINY, "seed": 3}))
    head = lm.add_head("step", 4, zero=False, seed=1)
    with torch.no_grad():
        head.weight *= 8
    save_model(lm, folder / "value", folder / "base")
    return str(folder / "value")


def answer(name, steps, reward, end=True, group="g", text="x"):
    size = steps[-1][1] + end
    turn = Turn(
        "policy", (1, 2), tuple(range(3, 3 + size)), steps=tuple(steps), stop="stopped" if end else "length", text=text
    )
    return Episode(name, Task("t"), group, (turn,), {"self": Scored(reward, reward > 0)})


def test_rewards_lie_at_the_ends_of_steps_alone():
    e = answer("e", [(0, 2), (2, 5), (5, 6)], 1.0)
    scores = {("e", 0): np.array([0.9, 0.5, 0.8])}
    put = lambda **s: on_tokens(
        e, turn_rewards(e, "policy", scores, StepRewards(model="m", **s)), "policy", s.get("at_end", False)
    )
    assert put()[0].tolist() == [0, 0.9, 0, 0, 0.5, 0.8, 0]
    assert put(running="product", alpha=2.0, clip=None)[0].tolist() == pytest.approx([0, 1.8, 0, 0, 0.9, 0.72, 0])
    assert put(right=2.0, at_end=True)[0].tolist() == [0, 0.9, 0, 0, 0.5, 0, 2.0]
    wrong = dataclasses.replace(e, outcomes={"self": Scored(0.0, False)})
    mixed = StepRewards(model="m", right=2.0, wrong=-1.0, alpha=0.1)
    assert turn_rewards(wrong, "policy", scores, mixed)[0].tolist() == pytest.approx([0.09, 0.05, -1.0])
    outcome = StepRewards(right=1.0)
    assert on_tokens(e, turn_rewards(e, "policy", {}, outcome), "policy", False)[0].tolist() == [0, 0, 0, 0, 0, 1, 0]
    whole = answer("w", [(0, 3)], 1.0)
    whole = dataclasses.replace(
        whole, turns=(dataclasses.replace(whole.turns[0], steps=()),)
    )  # nothing was cut into steps
    assert on_tokens(whole, turn_rewards(whole, "policy", {}, outcome), "policy", False)[0].tolist() == [0, 0, 0, 1]


def test_types_that_earn_nothing():
    words = tiny_tokenizer()
    said = ["Thought 1: a\n", "Action 1: b\n", "c"]
    parts = [words(x, add_special_tokens=False)["input_ids"] for x in said]
    borders = np.cumsum([0, *map(len, parts)]).tolist()
    tokens = tuple(t for p in parts for t in p)
    turn = Turn("policy", (1,), tokens, steps=tuple(pairwise(borders)), text="".join(said))
    e = Episode("e", Task("t"), "g", (turn,), {"self": Scored(1.0, True)})
    scores = {("e", 0): np.array([0.5, 0.6, 0.7])}
    earned = turn_rewards(e, "policy", scores, StepRewards(model="m", skip=["Action"]), words)
    assert earned[0].tolist() == [0.5, 0.0, 0.7]


def test_a_group_compares_all_steps_of_its_answers():
    """Steps 1 and 3 of one answer and 2 of another have mean 2 and deviation 1 (n - 1): -1, 1 and 0."""
    a, b = answer("a", [(0, 1), (1, 3)], 1.0), answer("b", [(0, 2)], 1.0)
    earned = {"a": [np.array([1.0, 3.0])], "b": [np.array([2.0])]}
    every = {name: [np.ones(len(r), bool) for r in rewards] for name, rewards in earned.items()}
    got = against_group([a, b], earned, "policy", False, every)
    assert got["a"][0].tolist() == pytest.approx([-1, 0, 1, 0], abs=1e-8) and got["b"][0].tolist() == [0, 0, 0]


def test_the_kl_of_grpo_pulls_towards_the_reference():
    """One token of two, advantage 0: what is left is beta times k3. It raises a token that the reference likes more."""
    for ref, sign in ((-0.1, 1), (-3.0, -1)):
        lm = TabularLM([(0,)], 2)
        streams = {
            "weight": np.array([0.0, 1.0]),
            "advantage": np.zeros(2),
            "old": np.array([0.0, -math.log(2)]),
            "ref": np.array([0.0, ref]),
        }
        row = Sample(np.array([0, 1]), streams, {"weight": 1.0})
        Learner({"policy": lm}, LearnerConfig()).gradient([row], Clipped(beta=0.5))
        grad = next(p.grad for _, p in lm.parameters() if p.grad is not None).flatten()
        down = [g for g in grad.tolist() if g]
        d = ref + math.log(2)
        wanted = (
            0.5 * (1 - math.exp(d)) * 0.5
        )  # d(k3)/d(logp) = 1 - e^d, and logp moves by 1 - p with the token's logit
        assert sorted(down) == pytest.approx(sorted([wanted, -wanted]), abs=1e-9) and np.sign(-wanted) == sign


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "remax"])
def test_each_learns_the_good_arm_from_its_outcome(tmp_path, algorithm):
    c = config(
        tmp_path,
        algorithm=algorithm,
        task=BANDIT,
        steps=30,
        n=8,
        kl=0.01,
        rewards={"right": 1.0, "split": "turn"},
        critic={"optim": {"lr": 1e-2}},
        learner={"optim": {"lr": 1e-2}},
    )
    launch(StepRlMethod, c)
    rows = read_metrics(tmp_path / "run")
    assert np.mean([r["success"] for r in rows[:3]]) < 0.5 and np.mean([r["success"] for r in rows[-3:]]) > 0.8
    assert rows[0]["kl_reference"] == pytest.approx(0.0, abs=1e-6) and rows[0]["sampler_gap"] < 1e-4
    if algorithm == "ppo":
        assert rows[0]["lr"] == 1e-2 and rows[0]["critic/lr"] == 1e-2
        assert (tmp_path / "run/checkpoints/000030/critic/heads.safetensors").is_file()


def test_the_critic_has_its_own_learning_rate(tmp_path, judge):
    c = config(
        tmp_path,
        task=ARITH,
        rewards={"model": judge, "classes": [2, 3]},
        steps=2,
        critic={"optim": {"lr": 5e-4}},
        sampling={"max_tokens": 8},
    )
    launch(StepRlMethod, c)
    row = read_metrics(tmp_path / "run")[0]
    assert row["lr"] == 3e-3 and row["critic/lr"] == 5e-4 and row["steps_written"] >= 1
    assert 0 < row["step_reward"] < 1  # a sum of probabilities
    notes = {p.name for p in (tmp_path / "run/annotations").iterdir()}
    assert {"advantage", "step_score", "value"} <= notes


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "remax"])
def test_the_advantages_of_a_step_are_those_of_the_definition(tmp_path, judge, algorithm, monkeypatch):
    """Everything is computed again from the samples, token by token, in plain loops."""
    made = []
    updates, greedy_of = StepRlMethod.updates, StepRlMethod.greedy

    def greedy(self, step, answers):
        self.greedy_rewards = greedy_of(self, step, answers)
        return self.greedy_rewards

    def seen(self, step):
        for update in updates(self, step):
            if update.model == "policy":
                known = {e.id: e for e in read_segment(self.run.episodes_dir / f"{step:06d}.jsonl")}
                made.extend((known[s.episode], s, getattr(self, "greedy_rewards", {})) for s in update.samples)
            yield update

    monkeypatch.setattr(StepRlMethod, "greedy", greedy)
    monkeypatch.setattr(StepRlMethod, "updates", seen)
    c = config(
        tmp_path,
        algorithm=algorithm,
        task=ARITH,
        steps=2,
        gamma=0.9,
        lam=0.8,
        kl=0.2,
        sampling={"max_tokens": 7},
        rewards={"model": judge, "classes": [2, 3], "wrong": 0.25, "right": 1.0, "alpha": 0.5},
    )
    launch(StepRlMethod, c)
    for e, s, greedy in made[:8]:
        on = np.nonzero(s.streams["weight"])[0]
        st = {k: v[on] for k, v in s.streams.items()}
        ends = {end - 1 for _, end in e.turns[0].steps}
        assert set(np.nonzero(st["reward"])[0]) <= ends
        n, price = len(on), 0.2 * (st["old"] - st["ref"])
        if algorithm == "grpo":
            wanted = [st["reward"][t:].sum() for t in range(n)]
        elif algorithm == "remax":
            wanted = [0.9 ** (n - 1 - t) * (st["reward"].sum() - greedy[e.group]) - price[t] for t in range(n)]
        else:
            r, v = st["reward"] - price, [*st["value"], st["after"][-1] if e.turns[0].stop == "length" else 0.0]
            delta = [r[t] + 0.9 * v[t + 1] - v[t] for t in range(n)]
            wanted = [sum((0.9 * 0.8) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)]
            assert st["returns"] == pytest.approx(np.array(wanted) + st["value"], abs=1e-9)
        assert st["advantage"] == pytest.approx(np.array(wanted), abs=1e-9)


def test_a_resumed_run_is_the_run(tmp_path, judge, monkeypatch):
    more = {
        "task": ARITH,
        "rewards": {"model": judge},
        "steps": 4,
        "checkpoint": {"every": 1},
        "sampling": {"max_tokens": 6},
    }
    launch(StepRlMethod, config(tmp_path, "whole", **more))
    updates = StepRlMethod.updates

    def dies(self, step):
        if step == 3:
            raise KeyboardInterrupt
        yield from updates(self, step)

    monkeypatch.setattr(StepRlMethod, "updates", dies)
    c = config(tmp_path, "parts", **more)
    with pytest.raises(KeyboardInterrupt):
        launch(StepRlMethod, c)
    monkeypatch.undo()
    launch(StepRlMethod, c, resume=True)
    assert diff_runs(Run.open(tmp_path / "whole").path, tmp_path / "parts") == []


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"rewards": {"alpha": 1.0}}, "nothing is paid"),
        ({"algorithm": "grpo", "n": 1}, "n is 1, and algorithm grpo"),
        ({"algorithm": "dpo"}, "algorithm"),
    ],
)
def test_recipes_that_cannot_be(tmp_path, more, why):
    with pytest.raises(RecipeError, match=why):
        config(tmp_path, **more)


def test_a_reward_model_that_does_not_fit(tmp_path, judge):
    with pytest.raises(ModelError, match="has classes 0 to 3"):
        launch(StepRlMethod, config(tmp_path, task=ARITH, rewards={"model": judge, "classes": [4]}))
    lm = load_model(ModelConfig.model_validate(TINY), ("another",))
    lm.add_head("step", 4)
    save_model(lm, tmp_path / "other", tmp_path / "base")
    with pytest.raises(ModelError, match="has another tokenizer than the policy"):
        launch(StepRlMethod, config(tmp_path, task=ARITH, rewards={"model": str(tmp_path / "other")}))
