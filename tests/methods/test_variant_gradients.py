"""The first gradient of every named variant, from the stored episodes and a plain loop over their tokens."""

import json
import math
from dataclasses import replace

import pytest
import torch

from trailmark.config import load_recipe, resolve
from trailmark.methods import get_config, get_method
from trailmark.methods.online_configs import VARIANTS
from trailmark.methods.policy_gradient import advantages, credit_name, penalised, varied
from trailmark.models.load import load_model
from trailmark.runs.launch import launch
from trailmark.runs.store import read_metrics, read_segment
from trailmark.types import Episode, Scored, Task, Turn

KL, MOST = 0.3, 5
SHIFT = (0.35, -0.4, 0.02, -0.06, 0.0)  # by how much the stored log-prob of token t is above the model's
REWARD = "def score(prompt, answer):\n    return 1.0 if 'same' in prompt else sum(ord(c) % 3 for c in answer) / 9\n"


class Shifted(get_method("policy_gradient")):
    """Stores old log-probs that are not the model's, so that ratios differ from 1, and keeps the gradient."""

    def stored(self, e):
        shifted = [replace(t, logq=tuple(q + SHIFT[k] for k, q in enumerate(t.logq))) for t in e.turns]
        return replace(e, turns=tuple(shifted))

    def updates(self, step):
        for update in super().updates(step):
            self.learner.gradient(update.samples, update.objective)
            type(self).found = [p.grad.clone() for _, p in self.learner.models["policy"].parameters()]
            yield update


def rewards_of(episodes):
    groups = {}
    for e in episodes:
        groups.setdefault(e.group, []).append(e.outcome.reward)
    return groups


def credit_of(name, e, groups):
    r, mine = e.outcome.reward, groups[e.group]
    mean = sum(mine) / len(mine)
    if name == "rloo":
        return r - (sum(mine) - r) / (len(mine) - 1)
    if name == "dr_grpo":
        return r - mean
    if name == "reinforce_pp":
        return r
    deviation = math.sqrt(sum((x - mean) ** 2 for x in mine) / (len(mine) - 1))
    return 0.0 if max(mine) == min(mine) else (r - mean) / deviation


def by_hand(name, config, lm, episodes):
    """The loss as one expression of the model's log-probs."""
    groups = rewards_of(episodes)
    if name == "dapo":
        episodes = [e for e in episodes if max(groups[e.group]) > min(groups[e.group])]
    rows = []
    for e in episodes:
        (turn,) = e.turns
        ids = torch.tensor([[*turn.prompt, *turn.tokens]])
        logp = lm.model(ids).logits[0].log_softmax(-1)
        own = torch.stack([logp[len(turn.prompt) + k - 1, t] for k, t in enumerate(turn.tokens)])
        a = [credit_of(name, e, groups)] * len(turn.tokens)
        if name == "reinforce_pp":  # the model is its own reference in the first step
            each = [q - float(x.detach()) for q, x in zip(turn.logq, own)]
            a = [x - KL * sum(each[k:]) for k, x in enumerate(a)]
        rows.append((own, turn.logq, a))
    if name == "reinforce_pp":
        flat = [x for _, _, a in rows for x in a]
        mean = sum(flat) / len(flat)
        deviation = math.sqrt(sum((x - mean) ** 2 for x in flat) / len(flat))
        rows = [(own, old, [(x - mean) / deviation for x in a]) for own, old, a in rows]
    tokens, loss = sum(len(a) for *_, a in rows), 0.0
    low, high = config.objective.get("low", 0), config.objective.get("high", 0)
    for own, old, a in rows:
        share = {"token": 1 / tokens, "sequence": 1 / len(a) / len(rows), "constant": 1 / MOST / len(rows)}[config.mean]
        gaps = [x - q for x, q in zip(own, old)]
        for x, gap, adv in zip(own, gaps, a):
            ratio = (sum(gaps) / len(gaps) if name == "gspo" else gap).exp()
            inside = ratio.clamp(1 - low, 1 + high)
            if name == "rloo":
                gain = adv * x
            elif name == "cispo":
                gain = inside.detach() * adv * x
            else:
                gain = torch.minimum(ratio * adv, inside * adv)
            loss = loss - share * gain
    return loss


def recipe(tmp_path, *words, reward=REWARD):
    (tmp_path / "reward.py").write_text(reward)
    given = ["steps=1", "prompts_per_step=4", "n=3", f"sampling.max_tokens={MOST}",
             "engine={max_num_seqs: 12, max_len: 64}",
             "eval.every=0", f"out={tmp_path}/run", f"data={tmp_path}/rows.jsonl", f"reward={tmp_path}/reward.py:score",
             "model={name: tiny, shape: {layers: 1, width: 32, heads: 2, context: 64}}"]  # fmt: skip
    return resolve(load_recipe("recipes/prompts-grpo.yaml", [*given, *words]), get_config("policy_gradient"))


@pytest.mark.parametrize("name", VARIANTS)
def test_the_gradient_of_a_variant(tmp_path, name):
    words = ["same", "other", "more", "so"]
    rows = [json.dumps({"prompt": f"{words[k % 4]} {k}"}) + "\n" for k in range(24)]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    more = [f"kl_reward={KL}"] if name == "reinforce_pp" else ["refill=2"] if name == "dapo" else []
    config = recipe(tmp_path, f"variant={name}", "old_logp=sampler", *more)
    launch(Shifted, config)
    episodes = read_segment(tmp_path / "run" / "episodes" / "000001.jsonl")
    groups = rewards_of(episodes)
    assert len(groups) >= 4 and sum(max(g) > min(g) for g in groups.values()) >= 2
    assert any(max(g) == min(g) for g in groups.values())  # a group that teaches nothing, or dilutes the mean
    lm = load_model(config.model)
    by_hand(name, config, lm, episodes).backward()
    want = [p.grad for _, p in lm.parameters()]
    size = math.sqrt(sum(float((g**2).sum()) for g in want))
    off = math.sqrt(sum(float(((a - b) ** 2).sum()) for a, b in zip(Shifted.found, want, strict=True)))
    assert size > 1e-3 and off < 1e-4 * size
    (row,) = read_metrics(tmp_path / "run")
    assert ("dropped_groups" in row) is (name == "dapo") and ("kl_ref" in row) is (name == "reinforce_pp")
    if name == "dapo":
        assert row["dropped_groups"] == sum(max(g) == min(g) for g in groups.values())
    if name == "reinforce_pp":
        shifts = [SHIFT[k] for e in episodes for k in range(len(e.turns[0].tokens))]
        assert row["kl_ref"] == pytest.approx(sum(shifts) / len(shifts), abs=1e-4)


@pytest.mark.parametrize("refill", [0, 1, 3])
def test_rounds_of_further_starts_end_and_a_step_without_a_lesson_changes_nothing(tmp_path, refill):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"say {k}"}) + "\n" for k in range(40)))
    config = recipe(tmp_path, f"refill={refill}", reward="def score(prompt, answer):\n    return 0.5\n")
    launch(get_method("policy_gradient"), config)
    episodes = read_segment(tmp_path / "run" / "episodes" / "000001.jsonl")
    assert len(episodes) == 4 * 3 * (refill + 1) == len({e.id for e in episodes})
    assert {e.id.split(":")[0] for e in episodes} == {"1", *(f"1.{k}" for k in range(1, refill + 1))}
    assert all(len(g) == 3 for g in rewards_of(episodes).values())
    (row,) = read_metrics(tmp_path / "run")
    assert row["reward"] == 0.5 and row.get("dropped_groups") == (4 * (refill + 1) if refill else None)
    assert ("grad_norm" in row) is (refill == 0)  # without refill the step is made, with a gradient of 0
    assert row.get("grad_norm", 0.0) == 0.0
    (final,) = (tmp_path / "run" / "checkpoints").glob("*/policy")
    saved = load_model(config.model.model_copy(update={"name": str(final), "shape": None}))
    for (n, a), (_, b) in zip(saved.parameters(), load_model(config.model).parameters(), strict=True):
        assert torch.equal(a, b), n


def play(name, group, reward, turns=1):
    made = tuple(Turn("policy", (1,), (5, 6), reward=reward / turns) for _ in range(turns))
    return Episode(name, Task("t"), group, made, {"self": Scored(reward)})


def test_credit_by_hand():
    episodes = [play("a", "g", 1.0), play("b", "g", 3.0, 2), play("c", "h", 4.0), play("d", "h", 4.0)]
    deviation = math.sqrt(2)
    assert advantages(episodes, "group", 1.0) == {
        "a": [pytest.approx(-1 / deviation)], "b": [pytest.approx(1 / deviation)] * 2, "c": [0.0], "d": [0.0]
    }  # fmt: skip
    tiny = [play(e.id, e.group, 1e-8 * e.outcome.reward) for e in episodes]  # in another unit: the same advantages
    assert advantages(tiny, "group", 1.0)["a"] == [pytest.approx(-1 / deviation, rel=0.1)]
    assert advantages(tiny, "group_mean", 1.0)["b"] == [pytest.approx(1e-8)] and len(varied(tiny)) == 1
    same = [play("a", "g", 0.9), play("b", "g", 0.9), play("c", "g", 0.9)]
    assert advantages(same, "group", 1.0) == {"a": [0.0], "b": [0.0], "c": [0.0]} and varied(same) == set()
    large = [play("a", "g", 1e9), play("b", "g", 0.0), play("c", "h", 1.0), play("d", "h", 1.0 + 1e-4)]
    assert advantages(large, "group", 1.0)["c"] == [0.0] and varied(large) == {"g"}
    assert advantages(episodes, "group_mean", 1.0) == {"a": [-1.0], "b": [1.0, 1.0], "c": [0.0], "d": [0.0]}
    assert advantages(episodes, "leave_one_out", 1.0) == {"a": [-2.0], "b": [2.0, 2.0], "c": [0.0], "d": [0.0]}
    assert advantages(episodes, "batch", 1.0) == {"a": [1.0], "b": [3.0, 3.0], "c": [4.0], "d": [4.0]}
    assert advantages(episodes[1:2], "returns", 0.5) == {"b": [1.5 + 0.5 * 1.5, 1.5]}
    assert advantages(episodes[1:2], "returns", 0.5, "nobody") == {"b": []}


@pytest.mark.parametrize("credit, gamma, kl, want", [
    ("group", 1.0, 0.0, "against its group"), ("group_mean", 1.0, 0.0, "above the mean of its group"),
    ("leave_one_out", 0.9, 0.0, "against the others of its group"), ("returns", 1.0, 0.0, "return to go"),
    ("batch", 1.0, 0.01, "against the batch, KL in the reward (0.01)"),
    ("returns", 0.9, 0.5, "return to go, discounted by 0.9, KL in the reward (0.5)"),
])  # fmt: skip
def test_how_a_credit_is_called(credit, gamma, kl, want):
    assert credit_name(credit, gamma, kl) == want


def test_no_samples_have_no_penalty():
    assert penalised([], 1.0) == ([], 0.0)
