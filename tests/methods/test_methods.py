"""Methods end to end: they learn what they should, resume, and refuse what they should."""

import json

import numpy as np
import pytest

from trailmark import methods
from trailmark.config import resolve
from trailmark.errors import RecipeError
from trailmark.methods.batches import batch_rows
from trailmark.runs.store import Run, read_episodes, read_metrics
from trailmark.types import Scored

TINY = {"name": "tiny", "shape": {"layers": 1, "width": 32, "heads": 2, "context": 64}}


def go(tmp_path, name, **recipe):
    method = methods.get_method(recipe["method"])
    config = resolve({"out": str(tmp_path / name), "model": TINY, **recipe}, method.Config)
    run = Run.create(config.out, "method: x\n")
    method.train(config, run)
    return run


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("objective", ["weighted_logp", "clipped"])
def test_a_bandit_of_six_is_learned(tmp_path, seed, objective):
    """One good arm of six: success rises from about 1/6 to 0.9 within 30 iterations, for every seed."""
    run = go(
        tmp_path, "bandit", method="policy_gradient", seed=seed, steps=30, prompts_per_step=4, n=8,
        credit="leave_one_out",
        task={"name": "solved", "options": {"kind": "bandit", "actions": 6, "rewards": [0, 0, 0, 1, 0, 0]}},
        objective={"kind": objective}, learner={"optim": {"lr": 6e-3}}, engine={"max_num_seqs": 8, "max_len": 64},
    )  # fmt: skip
    success = [row["success"] for row in read_metrics(run.path)]
    assert np.mean(success[:3]) < 0.5 and np.mean(success[-10:]) > 0.9


def test_a_tree_is_learned_turn_by_turn(tmp_path):
    """Three binary decisions, each its own turn; discounted returns find the best leaf."""
    run = go(
        tmp_path, "tree", method="policy_gradient", steps=50, prompts_per_step=8, n=4, credit="returns",
        mean="decision",
        task={"name": "solved", "options": {"kind": "tree", "depth": 3, "actions": 2, "seed": 3}},
        objective={"kind": "weighted_logp"}, learner={"optim": {"lr": 3e-3}}, engine={"max_num_seqs": 16,
            "max_len": 64},
    )  # fmt: skip
    success = [row["success"] for row in read_metrics(run.path)]
    assert np.mean(success[-10:]) > 0.9 > np.mean(success[:3])
    episodes = list(read_episodes(run.episodes_dir))
    assert len(episodes) == 50 * 32 and all(isinstance(e.outcome, Scored) for e in episodes)
    assert all(len(t.tokens) == 1 and t.law.allowed for e in episodes for t in e.turns)
    assert {e.turns[0].version for e in episodes} == set(range(50))


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_the_reference_is_the_policy_as_it_starts(tmp_path, lora):
    """Also where it starts from an adapter: then the model below that is somebody else."""
    bandit = {"name": "solved", "options": {"kind": "bandit", "actions": 4, "rewards": [0, 0, 0, 1]}}
    common = {"method": "policy_gradient", "prompts_per_step": 2, "n": 4, "task": bandit,
        "engine": {"max_num_seqs": 8, "max_len": 64},
              "learner": {"optim": {"lr": 3e-3}}}  # fmt: skip
    first = go(tmp_path, "first", steps=2, model={**TINY, "lora": lora}, **common)
    start = {**TINY, "lora": lora, "name": str(first.path / "checkpoints" / "000002" / "policy")}
    run = go(tmp_path, "second", steps=2, objective={"kind": "clipped", "beta": 0.1}, model=start, **common)
    before, after = (row["kl"] for row in read_metrics(run.path))
    assert abs(before) < 1e-9 and after > 1e-6


def test_sft_learns_what_the_assistant_says(tmp_path):
    rows = [{"messages": [{"role": "user", "content": c}, {"role": "assistant", "content": c.upper()}]} for c in "abcd"]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    data = str(tmp_path / "data.jsonl")
    run = go(
        tmp_path,
        "sft",
        method="sft",
        data=data,
        eval_data=data,
        steps=60,
        batch=4,
        learner={"optim": {"lr": 1e-2}},
        eval={"every": 60},
    )
    last = read_metrics(run.path)[-1]
    assert last["eval/nll"] < 0.05
    from trailmark.config import ModelConfig
    from trailmark.engines.local import LocalEngine
    from trailmark.models.load import load_model
    from trailmark.rollout.play import Seat, play
    from trailmark.tasks.base import Observation, Step
    from trailmark.types import SamplingLaw, Task

    class Upper:
        name, markov = "upper", False

        def tasks(self, split="train", n=None, seed=0):
            return [Task(c, data={"c": c}) for c in "abcd"]

        def make(self):
            return Upper()

        def reset(self, task):
            self.c = task.data["c"]
            return Observation(self.c)

        def step(self, action):
            right = action == self.c.upper()
            return Step(Observation(""), float(right), True, False, Scored(float(right), right))

    lm = load_model(ModelConfig(name=str(run.checkpoints_dir / "000060" / "policy")))
    seat = Seat("policy", LocalEngine(lm, 4, 64), SamplingLaw(temperature=0), 8)
    for e in play(Upper(), Upper().tasks(), [seat]):
        assert e.outcome == Scored(1.0, True) and e.turns[0].stop == "stopped"  # it says the letter, and then it stops


def test_epochs_are_permutations_laid_end_to_end():
    seen = [r for step in range(1, 8) for r in batch_rows(10, 3, step, seed=4)]
    assert sorted(seen[:10]) == sorted(seen[10:20]) == list(range(10)) and seen[:10] != seen[10:20]
    assert batch_rows(10, 3, 5, seed=4) == seen[12:15] and batch_rows(2, 5, 1, 0).count(0) in (2, 3)


def test_methods_are_open(tmp_path, monkeypatch):
    mine = (
        "from trailmark.config import RunConfig\nfrom trailmark.methods.base import Method\n"
        "class Recipe(RunConfig):\n    extra: int = 3\n"
        "class Mine(Method):\n    Config = Recipe\n    @classmethod\n    def train(cls, config, run, resume=False):\n"
        "        run.log(1, {'extra': config.extra})\n        return {}\n"
    )
    (tmp_path / "mine.py").write_text(mine)
    (tmp_path / "two_methods.py").write_text(
        mine + "class Other(Mine):\n    pass\nclass Wrong(Method):\n    Config = dict\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for k, name in enumerate(("mine", "mine:Mine", "two_methods:Other")):
        run = go(tmp_path, f"own{k}", method=name, extra=5)
        assert read_metrics(run.path) == [{"step": 1, "extra": 5}]
    with pytest.raises(RecipeError, match="one defines Mine, Other, Wrong: name it as two_methods:Class"):
        methods.get_method("two_methods")
    with pytest.raises(RecipeError, match="Config must be a class that derives from"):
        methods.get_method("two_methods:Wrong")
    with pytest.raises(RecipeError, match="'mine:Recipe' is no method"):
        methods.get_method("mine:Recipe")
    with pytest.raises(RecipeError, match="'mine:Nobody' cannot be imported"):
        methods.get_method("mine:Nobody")
    with pytest.raises(RecipeError, match="Did you mean 'policy_gradient'"):
        methods.get_method("policy_gradien")
    with pytest.raises(RecipeError, match=r"no\.such\.module"):
        methods.get_method("no.such.module")
    with pytest.raises(RecipeError, match="this one defines none"):
        methods.get_method("json.tool")
