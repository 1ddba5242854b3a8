"""Credit of turns where the policy decides when to stop: every play of a small process is enumerated."""

import importlib.util
import itertools
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tabular import TabularLM

from trailmark.config import LearnerConfig
from trailmark.credit.returns import discounted
from trailmark.learn.learner import Learner
from trailmark.methods.policy_gradient import advantages
from trailmark.objectives.clipped import Clipped
from trailmark.objectives.weighted_logp import WeightedLogp
from trailmark.samples import build_samples
from trailmark.types import Episode, Player, Scored, Task, Turn

# Only this file of `bench/`: other names there are names of other tests' modules.
SPEC = importlib.util.spec_from_file_location("turn_credit", Path(__file__).parents[2] / "bench" / "turn_credit.py")
process = sys.modules["turn_credit"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(process)


def episode(name, turns, group="g", rewards=None, logp=None):
    made, paid = [], process.rewards(turns) if rewards is None else rewards
    for k, t in enumerate(turns):
        old = {"logq": tuple(logp[k]) if logp else (), "continues": k - 1 if k else None}
        made.append(Turn("policy", (process.SEEN,), t, action="", reward=paid[k], **old))
    players = {"policy": Player("trained")}
    return Episode(name, Task(group), group, tuple(made), {"": Scored(sum(paid))}, players=players)


def table():
    """The policy of the process as a model, so that samples, the learner and the objective are ours."""
    policy = process.Policy()
    lm = TabularLM(list(policy.row), process.VOCAB)
    with torch.no_grad():
        lm.model.logits[: len(policy.row)] = policy.logits.clamp(min=-1e4)
    return policy, lm


def gradient(lm, samples, objective):
    for _, p in lm.parameters():
        p.grad = None
    Learner({"policy": lm}, LearnerConfig(micro_tokens=500)).gradient(samples, objective)
    return -lm.model.logits.grad[:-1]


def expected(credit, mean):
    """The expected gradient of two plays of one start, by the code of policy_gradient. It is linear in the advantages,
    so they are summed over all pairs first."""
    policy, lm = table()
    every = process.plays()
    chance = [torch.cat(policy.logp(p)).sum().exp().item() for p in every]
    weight = {f"{i}": np.zeros(len(p)) for i, p in enumerate(every)}
    episodes = [episode(f"{i}", p) for i, p in enumerate(every)]
    again = [Episode(f"{e.id}'", e.task, "g", e.turns, e.outcomes, players=e.players) for e in episodes]
    for a, b in itertools.product(range(len(every)), repeat=2):
        found = advantages([episodes[a], again[b]], credit, 1.0)
        share = chance[a] * chance[b] * len(every) / 2
        weight[f"{a}"] += share * np.array(found[f"{a}"])
        weight[f"{b}"] += share * np.array(found[f"{b}'"])
    return policy, gradient(lm, build_samples(episodes, "policy", {"advantage": weight}, mean), WeightedLogp())


@pytest.mark.parametrize("credit", ["turn_leave_one_out", "leave_one_out"])
def test_the_expected_gradient_is_the_true_one(credit):
    policy, found = expected(credit, "constant")
    true = process.true_gradient(policy)
    assert true.abs().max() > 0.05
    assert float((found - true).abs().max()) < 1e-9


def test_the_printed_bias_is_that_of_an_enumeration(capsys):
    """Without our code: the loss of each play by its definition, and the gradient by differences of probabilities."""
    process.main()
    printed = {row.split("|")[1].strip(): float(row.split("|")[2].split()[0])
               for row in capsys.readouterr().out.splitlines()[2:]}  # fmt: skip
    policy = process.Policy()
    p = policy.logits.detach().softmax(-1).numpy()
    true, epo = np.zeros_like(p), np.zeros_like(p)
    for turns in process.plays():
        steps = [(policy.row[s], a) for s, a in process.states(turns)]
        chance, r = math.prod(p[s, a] for s, a in steps), process.rewards(turns)
        g = [sum(r[k:]) for k in range(len(turns))]
        w = [x / (max(map(abs, g)) or 1.0) for x in g]
        for k, (s, a) in zip([k for k, t in enumerate(turns) for _ in t], steps, strict=True):
            score = (np.arange(process.VOCAB) == a) - p[s]
            true[s] += chance * r.sum() * score
            epo[s] += chance * w[k] / (len(turns) * len(turns[k])) * score
    cosine = (true * epo).sum() / np.linalg.norm(true) / np.linalg.norm(epo)
    off = 100 * math.sqrt(1 - cosine**2)
    assert printed["epo: max-abs, mean over tokens and turns"] == pytest.approx(off, abs=0.006)
    assert printed["turn_leave_one_out, constant"] == 0 and 17 < off < 73
    np.testing.assert_allclose(process.true_gradient(policy).numpy(), true, atol=1e-12)


def test_policy_gradient_gives_each_turn_its_own_advantage():
    long = episode("long", ((2,), (3, 2), (1,)), rewards=[0.0, 1.0, 2.0])
    short = episode("short", ((1,),), rewards=[0.5])
    assert advantages([long, short], "turn_leave_one_out", 1.0) == {"long": [2.5, 3.0, 2.0], "short": [-2.5]}
    assert discounted([0, 1, 2], 1.0).tolist() == [3, 3, 2]


# --- EPO's loss -------------------------------------------------------------------------------------------------------


def test_the_gradient_is_the_difference_of_the_loss():
    """-(1/T) sum_t w_t mean_i log p, by finite differences over the table, also where a weight is negative."""
    _, lm = table()
    turns = ((3, 2), (2,), (3, 3))
    weights = {"e": [0.5, -1.0, 0.25]}
    samples = build_samples([episode("e", turns)], "policy", {"advantage": weights}, "turn")
    found = -gradient(lm, samples, WeightedLogp())

    def loss():
        logp = dict.fromkeys(range(3), 0.0)
        steps = iter(process.states(turns))
        for k, t in enumerate(turns):
            each = itertools.islice(steps, len(t))
            logp[k] = sum(lm.model.logits[lm.row[s]].log_softmax(-1)[a].item() for s, a in each)
        return -sum(w * logp[k] / len(turns[k]) for k, w in enumerate(weights["e"])) / 3

    moved = 0
    for s, _ in process.states(turns):
        for a in (1, 2, 3):
            with torch.no_grad():
                cell, eps = lm.model.logits[lm.row[s]], 1e-5
                before = cell[a].item()
                cell[a] = before + eps
                up = loss()
                cell[a] = before - eps
                down = loss()
                cell[a] = before
            assert found[lm.row[s], a].item() == pytest.approx((up - down) / (2 * eps), abs=1e-9)
            moved += abs(found[lm.row[s], a].item()) > 1e-3
    assert moved > 5


def test_weights_of_zero_give_no_gradient_and_negative_ones_lower_the_probability():
    _, lm = table()
    rows = lambda w: build_samples([episode("e", ((2,), (1,)))], "policy", {"advantage": {"e": w}}, "turn")
    assert gradient(lm, rows([0.0, 0.0]), WeightedLogp()).abs().max() == 0
    first = lm.row[(process.SEEN,)]
    down, up = (gradient(lm, rows([w, 0.0]), WeightedLogp())[first, 2] for w in (-1.0, 1.0))
    assert down < 0 < up


def test_a_trajectory_of_zeros_stays_in_the_mean():
    _, lm = table()
    one = episode("a", ((2,), (1,)))
    weights = {"advantage": {"a": [1.0, 1.0], "z": [0.0, 0.0]}}
    alone = gradient(lm, build_samples([one], "policy", weights, "turn"), WeightedLogp())
    both = gradient(lm, build_samples([one, episode("z", ((3, 2), (1,)))], "policy", weights, "turn"), WeightedLogp())
    assert torch.allclose(both, alone / 2, atol=1e-15)


@pytest.mark.parametrize("advantage", [1.5, -0.5])
@pytest.mark.parametrize("shift", [0.0, 0.3, -0.3, 0.05])
def test_a_ratio_of_a_turn_is_one_action(advantage, shift):
    """exp of the summed log-differences of a turn, clipped as one; the other turn is untouched."""
    policy, lm = table()
    turns = ((3, 2), (2,))
    logp = [x.detach().numpy() for x in policy.logp(turns)]
    old = [logp[0] - shift, logp[1]]
    samples = build_samples([episode("e", turns, logp=old)], "policy", {"advantage": {"e": [advantage, 1.0]}}, "turn")
    report = Learner({"policy": lm}, LearnerConfig()).gradient(samples, Clipped(ratio="turn"))
    ratio = math.exp(2 * shift)
    clipped = min(max(ratio, 0.8), 1.2)
    assert report["policy"] == pytest.approx(-(min(ratio * advantage, clipped * advantage) + 1.0) / 2, abs=1e-12)
    assert report["clip_fraction"] == (0.5 if min(ratio * advantage, clipped * advantage) != ratio * advantage else 0.0)


def test_a_ratio_of_turns_keeps_episodes_apart_in_one_batch():
    policy, lm = table()
    rows, want = [], []
    for name, turns, shift in (("a", ((2,), (1,)), 0.1), ("b", ((3, 2), (3, 3), (1,)), -0.05)):
        logp = [x.detach().numpy() for x in policy.logp(turns)]
        e = episode(name, turns, logp=[x - shift for x in logp])
        rows += build_samples([e], "policy", {"advantage": {name: [1.0] * len(turns)}}, "turn")
        want.append(np.mean([min(math.exp(len(t) * shift), 1.2) for t in turns]))
    for budget in (1, 500):
        config = LearnerConfig(micro_tokens=budget)
        report = Learner({"policy": lm}, config).gradient(rows, Clipped(ratio="turn"))
        assert report["policy"] == pytest.approx(-np.mean(want), abs=1e-12)
