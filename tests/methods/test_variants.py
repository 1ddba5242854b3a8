"""GRPO's relatives by name: what each name means, its loss by hand, KL in the reward, groups that teach nothing."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from trailmark.config import LearnerConfig, load_recipe, resolve
from trailmark.errors import RecipeError
from trailmark.learn.learner import Learner
from trailmark.methods import get_config, get_method
from trailmark.methods.online_configs import VARIANTS
from trailmark.methods.policy_gradient import penalised, varied, whitened
from trailmark.objectives.clipped import Clipped
from trailmark.runs.launch import launch
from trailmark.runs.store import read_metrics, read_segment
from trailmark.types import Episode, Sample, Scored, Task

RECIPE = "recipes/prompts-grpo.yaml"
TINY = "model={name: tiny, shape: {layers: 1, width: 32, heads: 2, context: 64}}"


def config(*words):
    given = ["data=rows.jsonl", "reward=reward.py:score", *words]
    return resolve(load_recipe(RECIPE, given), get_config("policy_gradient"))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_name_is_its_credit_mean_and_objective(name):
    c = config(f"variant={name}")
    want = VARIANTS[name]
    assert (c.credit, c.mean) == (want["credit"], want["mean"])
    assert {k: c.objective[k] for k in want["objective"]} == want["objective"]
    assert c.refill == want.get("refill", 0) and c.kl_reward == want.get("kl_reward", 0)


def test_settings_may_change_and_what_the_name_means_may_not():
    c = config("variant=dapo", "objective.high=0.5", "refill=1")
    assert c.objective["high"] == 0.5 and c.objective["low"] == 0.2 and c.refill == 1
    with pytest.raises(RecipeError, match="variant dapo means mean: token, and the recipe says sequence"):
        config("variant=dapo", "mean=sequence")
    with pytest.raises(RecipeError, match="variant gspo means objective.ratio: sequence, and the recipe says token"):
        config("variant=gspo", "objective.ratio=token")
    with pytest.raises(RecipeError, match="variant"):
        config("variant=ppo")


def test_a_stored_recipe_resolves_to_itself():
    c = config("variant=cispo")
    assert resolve(c.model_dump(mode="json"), get_config("policy_gradient")) == c


def loss_and_gradient(make_lm, objective, old_gap):
    """One sample of four tokens whose old log-probs are `old_gap` below the model's."""
    lm = make_lm("llama", dtype=torch.float64)
    tokens = np.array([5, 9, 12, 7])
    on = np.array([0, 0, 1.0, 1.0])
    with torch.no_grad():
        logp = lm.model(torch.as_tensor(tokens)[None]).logits[0, :-1].log_softmax(-1)
        own = logp.gather(1, torch.as_tensor(tokens)[1:, None])[:, 0].numpy()
    old = np.r_[0, own] - np.array(old_gap)
    advantage = np.array([0, 0, 2.0, -1.0])
    sample = Sample(tokens, {"weight": on, "advantage": advantage, "old": old}, {"weight": 2.0})
    learner = Learner({"policy": lm}, LearnerConfig())
    report = learner.gradient([sample], objective)
    grads = torch.cat([p.grad.flatten() for p in lm.model.parameters() if p.grad is not None])
    lm.model.zero_grad(set_to_none=True)
    logp = lm.model(torch.as_tensor(tokens)[None]).logits[0, :-1].log_softmax(-1)
    return report, grads, logp.gather(1, torch.as_tensor(tokens)[1:, None])[:, 0], lm, own


def test_cispo_by_hand(make_lm):
    """Ratios e^0.7 = 2.01, cut to 1.5, and e^-0.3 = 0.74: both tokens keep a gradient, weighted by what is left."""
    objective = Clipped(surrogate="cispo", low=1.0, high=0.5)
    report, grads, logp, lm, own = loss_and_gradient(make_lm, objective, [0, 0, 0.7, -0.3])
    weights = np.array([1.5, np.exp(-0.3)])
    assert report["policy"] == pytest.approx(-(weights * [2.0, -1.0] * own[1:]).sum() / 2)
    (-(torch.as_tensor(weights * [2.0, -1.0]) * logp[1:]).sum() / 2).backward()
    want = torch.cat([p.grad.flatten() for p in lm.model.parameters() if p.grad is not None])
    assert torch.allclose(grads, want, atol=1e-12)


def test_the_clipped_surrogate_drops_the_gradient_that_cispo_keeps(make_lm):
    gap = [0, 0, 0.7, 0.0]
    kept = loss_and_gradient(make_lm, Clipped(surrogate="cispo", low=1.0, high=0.5), gap)[1]
    dropped = loss_and_gradient(make_lm, Clipped(low=0.5, high=0.5), gap)[1]
    assert not torch.allclose(kept, dropped, atol=1e-6)


def sample(advantage, old, ref, weight=(0, 1, 1, 1)):
    streams = {"advantage": np.array(advantage, float), "old": np.array(old, float), "ref": np.array(ref, float),
               "weight": np.array(weight, float)}  # fmt: skip
    return Sample(np.arange(len(advantage)), streams, {"weight": 3.0})


def test_kl_in_the_reward_by_hand():
    s = sample([0, 1, 1, 1], [0, -1, -2, -3], [np.nan, -1.5, -2.0, -2.0])
    (got,), mean = penalised([s], 0.1)
    # KL per token 0.5, 0, -1; to go -0.5, -1, -1
    assert got.streams["advantage"] == pytest.approx([0, 1.05, 1.1, 1.1])
    assert mean == pytest.approx(-0.5 / 3)


def test_against_the_batch_by_hand():
    a, b = (sample([0, v, v, v], [0] * 4, [0] * 4) for v in (1.0, 0.0))
    c = replace(b, streams={**b.streams, "weight": np.array([0, 0, 0, 1.0])})
    x, y = whitened([a, c])
    each = np.array([1, 1, 1, 0.0])
    want = (each - each.mean()) / each.std()
    assert x.streams["advantage"] == pytest.approx([0, *want[:3]])
    assert y.streams["advantage"] == pytest.approx([0, 0, 0, want[3]])


def test_groups_that_vary():
    made = lambda k, g, r: Episode(f"{k}", Task("t"), g, (), {"self": Scored(r)})
    rewards = {"a": [0.1, 0.1], "b": [0.1, 5.0], "c": [0.1, 0.1 + 1e-7], "d": [2.0, 2.0]}
    episodes = [made(f"{g}{k}", g, r) for g, both in rewards.items() for k, r in enumerate(both)]
    assert varied(episodes) == {"b"}
    assert varied([]) == set()


def test_groups_without_variance_are_dropped_and_refilled(tmp_path):
    rows = "".join(json.dumps({"prompt": f"{'same' if k % 2 else 'other'} {k}"}) + "\n" for k in range(40))
    (tmp_path / "rows.jsonl").write_text(rows)
    text = "return 1.0 if 'same' in prompt else sum(ord(c) % 3 for c in answer) / 9"
    (tmp_path / "reward.py").write_text(f"def score(prompt, answer, row):\n    {text}\n")
    words = ["steps=3", "prompts_per_step=4", "n=4", "sampling.max_tokens=5", "eval.every=0", f"out={tmp_path}/run",
        "refill=30",
             TINY, "engine={max_num_seqs: 16, max_len: 64}",
             f"data={tmp_path}/rows.jsonl", f"reward={tmp_path}/reward.py:score"]  # fmt: skip
    launch(get_method("policy_gradient"), resolve(load_recipe(RECIPE, words), get_config("policy_gradient")))
    for step, row in enumerate(read_metrics(tmp_path / "run"), 1):
        episodes = read_segment(tmp_path / "run" / "episodes" / f"{step:06d}.jsonl")
        groups = {e.group for e in episodes}
        assert len(varied(episodes)) == 4 and row["dropped_groups"] == len(groups) - 4
        assert len({e.id for e in episodes}) == len(episodes)
        trained = (tmp_path / "run" / "annotations" / "advantage" / f"{step:06d}.jsonl").read_text().splitlines()
        assert {json.loads(x)["episode"] for x in trained} == {e.id for e in episodes if e.group in varied(episodes)}


def test_kl_in_the_reward_trains_towards_the_reference(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{k}"}) + "\n" for k in range(12)))
    (tmp_path / "reward.py").write_text("def score(prompt, answer, row):\n    return sum(map(ord, answer)) % 7 / 7\n")
    far = {}
    for weight in (0.0, 5.0):
        out = tmp_path / f"run{weight:g}"
        words = ["steps=24", "prompts_per_step=4", "n=8", "variant=reinforce_pp", f"kl_reward={max(weight, 1e-9)}",
                 "eval.every=0", "sampling.max_tokens=5", "learner.optim.lr=0.01", f"out={out}",
                 f"data={tmp_path}/rows.jsonl", TINY, "engine={max_num_seqs: 32, max_len: 64}",
                 f"reward={tmp_path}/reward.py:score"]  # fmt: skip
        launch(get_method("policy_gradient"), resolve(load_recipe(RECIPE, words), get_config("policy_gradient")))
        far[weight] = np.mean([r["kl_ref"] for r in read_metrics(out)[-4:]])
    assert far[5.0] < 0.5 * far[0.0]
