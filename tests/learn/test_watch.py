"""A run that learns nothing says so while it runs."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.learn.watch import PATIENCE, Watch, sampler_gap, spread
from trailmark.types import Episode, Failed, Sample, Scored, Task

WORLD = """
from trailmark.tasks.base import Observation, Step
from trailmark.types import Scored, Task

class Make:
    name, markov = "flat", True
    def __init__(self, flat=True):
        self.flat = flat
    def tasks(self, split="train", n=None, seed=0):
        return [Task(f"{split}-{seed}-{k}", k) for k in range(n or 2)]
    def make(self):
        return World(self.flat)

class World:
    def __init__(self, flat):
        self.flat = flat
    def reset(self, task):
        return Observation("go ", labels=("a", "b"))
    def step(self, action):
        return Step(Observation(""), 0.25, True, False, Scored(0.25 if self.flat else float(action == "a")))
"""
RECIPE = """
method: policy_gradient
out: run
steps: 7
prompts_per_step: 2
n: 8
task: {name: "flat_world:Make"}
sampling: {max_tokens: 1}
model: {shape: {layers: 1, width: 16, heads: 2, context: 32}}
"""


@pytest.fixture
def train(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "flat_world.py").write_text(WORLD)
    (tmp_path / "r.yaml").write_text(RECIPE)

    def run(*words):
        done = CliRunner().invoke(app, ["train", "r.yaml", *words])
        assert done.exit_code == 0, done.output
        rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        return done.stderr, rows

    return run


def test_a_reward_that_never_varies_is_warned_about_while_running_and_logged_every_step(train):
    said, rows = train()
    assert said.count("earned the reward 0.25") == 1 and f"step {PATIENCE}: every episode" in said
    assert said.count("grad_norm has been 0") == 1
    assert [r["reward_std"] for r in rows] == [0.0] * 7 and [r["same_groups"] for r in rows] == [1.0] * 7


def test_the_sampler_is_compared_with_the_learner_every_step(train):
    said, rows = train("task.options={flat: false}")
    assert all(0 <= r["sampler_gap"] <= r["sampler_gap_max"] < 1e-5 for r in rows) and "warning" not in said
    assert all(r["reward_std"] == pytest.approx((r["reward"] * (1 - r["reward"])) ** 0.5) for r in rows)


def test_an_engine_with_other_weights_is_warned_about_at_once(train, monkeypatch):
    from trailmark.engines.local import LocalEngine

    sample = LocalEngine.sample

    async def off(self, request, *more):
        import dataclasses

        made = await sample(self, request, *more)
        return [dataclasses.replace(c, logq=tuple(x - 0.5 for x in c.logq)) for c in made]

    monkeypatch.setattr(LocalEngine, "sample", off)
    said, rows = train("task.options={flat: false}", "steps=1")
    assert "step 1: tokens were drawn with log-probs that differ from the learner's by 0.5" in said
    assert rows[0]["sampler_gap"] == pytest.approx(0.5, abs=1e-4)


def episode(group, reward):
    outcome = Failed("x") if reward is None else Scored(reward)
    return Episode(f"{group}{reward}", Task("t"), group, (), {"player": outcome})


def test_the_spread_of_rewards_by_hand():
    made = [episode(g, r) for g, r in (("a", 1.0), ("a", 1.0), ("b", 0.0), ("b", 1.0), ("c", 0.0), ("d", None))]
    assert spread(made) == pytest.approx({"reward_std": np.std([1, 1, 0, 1, 0]), "same_groups": 0.5})
    assert spread([episode("a", None)]) == {} and spread([episode("a", 2.0)]) == {"reward_std": 0.0}


def test_the_gap_by_hand():
    def row(old, weight):
        return Sample(np.zeros(3, np.int64), {"old": np.array(old), "weight": np.array(weight)}, {})

    drawn, scored = [row([0.0, -1.0, np.nan], [0.0, 1.0, 1.0])], [row([9.0, -1.5, -2.0], [0.0, 1.0, 1.0])]
    assert sampler_gap(drawn, scored) == {"sampler_gap": 0.5, "sampler_gap_max": 0.5}
    assert sampler_gap([], []) == {}


def test_a_sign_is_told_once_and_again_when_it_comes_back():
    watch, dull, fine = Watch(), {"reward_std": 0.5, "same_groups": 0.95}, {"reward_std": 0.5, "same_groups": 0.1}
    told = [len(watch.look(m)) for m in [dull] * (PATIENCE + 3) + [fine] + [dull] * PATIENCE]
    assert told == [0] * (PATIENCE - 1) + [1, 0, 0, 0] + [0] + [0] * (PATIENCE - 1) + [1]


@pytest.mark.parametrize(("reward", "many"), [(0.1, 3), (-0.7, 3), (-0.525, 10)])
def test_equal_rewards_have_no_spread_whatever_their_mean_rounds_to(reward, many):
    assert np.std([reward] * many) != 0
    assert spread([episode("a", reward)] * many) == {"reward_std": 0.0, "same_groups": 1.0}


def test_steps_without_any_spread_do_not_hide_groups_without_it():
    watch, flat, dull = Watch(), {"reward_std": 0.0, "same_groups": 1.0}, {"reward_std": 0.5, "same_groups": 0.95}
    told = [text for k in range(2 * PATIENCE) for text in watch.look((flat, dull)[k % 2])]
    assert len(told) == 1 and "of the groups all episodes have had the same reward" in told[0]


def test_episodes_that_fail_step_after_step_are_warned_about():
    watch = Watch()
    told = [watch.look({"failed": 3, "reward_std": 0.5}) for _ in range(PATIENCE + 2)]
    assert [len(x) for x in told] == [0] * (PATIENCE - 1) + [1, 0, 0]
    assert "episodes have failed" in told[PATIENCE - 1][0]


def test_a_solved_task_is_no_reason_to_start_from_another_model():
    def said(**more):
        watch = Watch()
        return [watch.look({"reward_std": 0.0, "reward": 1.0, **more}) for _ in range(PATIENCE)][-1][-1]

    assert said(success=1.0).endswith("All were successes, so the task is solved: stop, or choose harder starts.")
    for other in ({"success": 0.0}, {"success": 1.0, "failed": 2}, {}):
        assert said(**other).endswith("or start from another model.") and "solved" not in said(**other)
