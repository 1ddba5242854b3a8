"""OREO on problems that are solved exactly: the optimum it reaches, the effect of alpha, and what the data leave
open."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from bellman_tables import Tables, every_path

from trailmark.methods.oreo.soft_bellman import SoftBellman
from trailmark.objectives.sft import Sft
from trailmark.tasks.solved import bandit, evaluate, solve_soft, tree

LEVELS = ["token", "step", "response", "one_step", "undetached"]


def some_ref(problem, seed=0):
    return np.random.default_rng(seed).dirichlet(np.full(problem.next.shape[1], 2.0), size=len(problem.next))


def oreo(**more):
    return SoftBellman(part="both", actions="action", **more)


@pytest.mark.parametrize("beta", [1.0, 0.3])
@pytest.mark.parametrize("level", LEVELS)
def test_every_variant_reaches_the_optimum(level, beta):
    """Depth 4, three actions, every play in the data: V* at every state that has a value, and pi* at every one. Steps
    are two letters long, so their values sit at depths 0 and 2."""
    problem = tree(4, 3, seed=1)
    ref = some_ref(problem)
    tables = Tables(problem, ref, size=2 if level == "step" else 1)
    tables.fit(oreo(level=level, beta=beta))
    v, _, pi = solve_soft(problem.next, problem.reward, ref, beta)
    known = [0, *range(4, 13)] if level == "step" else range(40)
    assert np.abs(tables.value - v)[known].max() < 1e-4
    assert np.abs(tables.pi - pi).max() < 1e-4
    assert np.abs(pi - ref).max() > 0.1 and np.abs(v[0]) > 0.05  # far from where it started


def test_a_small_beta():
    problem = tree(4, 3, seed=2)
    ref = some_ref(problem, 3)
    tables = Tables(problem, ref)
    tables.fit(oreo(beta=0.1), steps=600)
    v, _, pi = solve_soft(problem.next, problem.reward, ref, 0.1)
    assert np.abs(tables.value - v).max() < 1e-4 and np.abs(tables.pi - pi).max() < 1e-4


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_moves_at_the_optimum(level):
    problem = tree(3, 3, seed=5)
    ref = some_ref(problem)
    v, _, pi = solve_soft(problem.next, problem.reward, ref, 0.3)
    tables = Tables(problem, ref)
    with torch.no_grad():
        tables.logits.copy_(torch.tensor(np.log(pi)))
        tables.v.copy_(torch.tensor(v))
    loss, _ = tables.loss(oreo(level=level, beta=0.3))
    loss.backward()
    assert loss.item() < 1e-25
    assert tables.logits.grad.abs().max() < 1e-13 and tables.v.grad.abs().max() < 1e-13


def test_a_scaled_reward():
    """r -> a r + b at the end, at temperature a beta, has the value a V + b and the same policy."""
    problem = tree(3, 2, seed=4)
    ref = some_ref(problem)
    v, _, pi = solve_soft(problem.next, problem.reward, ref, 0.3)
    ends = problem.next == -1
    scaled, _, same = solve_soft(problem.next, np.where(ends, 2 * problem.reward - 1, 0.0), ref, 0.6)
    assert scaled == pytest.approx(2 * v - 1, abs=1e-12) and same == pytest.approx(pi, abs=1e-12)
    tables = Tables(problem, ref)
    tables.data["reward"] = torch.where(tables.data["action"] != 0, 2 * tables.data["reward"] - 1, 0.0)
    tables.fit(oreo(beta=0.6))
    assert tables.value == pytest.approx(2 * v - 1, abs=1e-4) and tables.pi == pytest.approx(pi, abs=1e-4)


# --- what alpha does ----------------------------------------------------------------------------------------------


def test_alpha_moves_the_optimum():
    """One decision, data from mu: e_a = alpha pi_a (KL - l_a) / (2 beta mu_a), and V is the mean of r - beta l. At the
    paper's 0.03 and 0.01 the policy is (.743, 0, .257) with V .646 where the unregularised optimum is (1, 0, 0) with V*
    .952. That one fulfils the identity too: with large steps it is where it ends, so the regularised problem has more
    than one end."""
    ref, r, beta, alpha = np.array([[0.2, 0.3, 0.5]]), np.array([1.0, 0.0, 0.5]), 0.03, 0.01
    problem = bandit(rewards=r)
    tables = Tables(problem, ref, mu=ref[0])
    tables.fit(oreo(beta=beta, alpha=alpha), steps=600, lr=0.05)
    pi, v = tables.pi[0], tables.value[0]
    ratio = np.log(pi) - np.log(ref[0])
    kl = float((pi * ratio).sum())
    e = v - r + beta * ratio
    assert e == pytest.approx(alpha * pi * (kl - ratio) / (2 * beta * ref[0]), abs=1e-5)
    assert v == pytest.approx(float((ref[0] * (r - beta * ratio)).sum()), abs=1e-5)
    assert pi == pytest.approx([0.743, 0.0, 0.257], abs=1e-3) and v == pytest.approx(0.646, abs=1e-3)
    best, _, peak = solve_soft(problem.next, problem.reward, ref, beta)
    assert best[0] == pytest.approx(0.952, abs=1e-3) and peak[0, 0] > 0.999
    large = Tables(problem, ref, mu=ref[0])
    large.fit(oreo(beta=beta, alpha=alpha), steps=800, lr=0.2)
    assert large.value[0] == pytest.approx(best[0], abs=1e-4) and large.pi[0] == pytest.approx(peak[0], abs=1e-4)


@pytest.mark.parametrize(("beta", "alpha"), [(0.03, 0.01), (0.3, 0.1)])
def test_effective_temperature(beta, alpha):
    """Near the reference, with data from it, alpha acts as a temperature of beta + alpha / (2 beta): 0.197, not
    0.03."""
    ref, r = np.array([[0.2, 0.3, 0.5]]), 1e-3 * np.array([1.0, 0.0, 0.5])
    tables = Tables(bandit(rewards=r), ref, mu=ref[0])
    tables.fit(oreo(beta=beta, alpha=alpha), steps=300, lr=0.005)
    ratio = np.log(tables.pi[0]) - np.log(ref[0])
    measured = np.polyfit(ratio, r, 1)[0]
    assert measured == pytest.approx(beta + alpha / (2 * beta), rel=0.02)


def test_an_unseen_action_leaves_the_value_open_and_alpha_closes_it():
    """Three actions, one never played. Without alpha two starts both reach loss 0 and disagree; with a little they
    agree."""

    def ends(alpha, v0):
        tables = Tables(bandit(rewards=[0.0, 1.0, 0.0]), np.full((1, 3), 1 / 3), mu=[0.5, 0.5, 0.0], v0=v0)
        _, report = tables.fit(oreo(beta=0.3, alpha=alpha), steps=400, lr=0.05)
        return tables.value[0], report["value"], tables.pi[0, 2]

    low, high = ends(0.0, 0.0), ends(0.0, 1.5)
    assert low[1] < 1e-12 and high[1] < 1e-12 and high[0] - low[0] > 0.01
    low, high = ends(1e-3, 0.0), ends(1e-3, 1.5)
    assert low[0] == pytest.approx(high[0], abs=1e-3) and low[0] == pytest.approx(0.867, abs=3e-3)
    assert low[2] == pytest.approx(0.46, abs=0.01)


@pytest.mark.parametrize("kind", ["reverse", "forward"])
def test_a_kl_target_is_met(kind):
    """The coefficient rises while the KL is above its target; the KL ends within 10 % of it."""
    ref, target = np.array([[0.2, 0.3, 0.5]]), 0.1
    tables = Tables(bandit(rewards=[1.0, 0.0, 0.5]), ref, mu=ref[0])
    objective = oreo(beta=0.3, kl=kind, kl_target=target, kl_lr=0.05, kl_start=-3.0)
    learned, report = tables.fit(objective, steps=400, lr=0.05)
    assert learned["log_kl"] > -1.5 and report["kl"] == pytest.approx(target, rel=0.1)
    free = Tables(bandit(rewards=[1.0, 0.0, 0.5]), ref, mu=ref[0])
    _, report = free.fit(oreo(beta=0.3, kl=kind, alpha=1e-6), steps=200, lr=0.05)
    assert report["kl"] > 0.5


def test_the_dual_step_is_adams():
    """Against torch's own Adam on -c (KL - target)."""
    objective = oreo(kl_target=0.2, kl_lr=0.01, kl_start=0.5)
    c = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    adam, learned = torch.optim.Adam([c], lr=0.01), objective.begin()
    for kl in (0.5, 0.4, 0.1, 0.05, 0.3):
        adam.zero_grad()
        (-c * (kl - 0.2)).backward()
        adam.step()
        learned = objective.learn(learned, {"kl": kl, "value": 1.0, "policy": 2.0})
        assert learned["log_kl"] == pytest.approx(c.item(), abs=1e-12)
    assert learned["value_mean"] == pytest.approx(1 - 0.9**5) and learned["policy_mean"] == pytest.approx(
        2 - 2 * 0.9**5
    )


# --- what it is compared with -------------------------------------------------------------------------------------


def test_rejection_sampling_ends_at_the_posterior():
    """Imitating successes of ref: pi(a|s) is ref(a|s) P(success | s, a) / P(success | s)."""
    problem = tree(3, 3, seed=6)
    ref = some_ref(problem)
    paths = every_path(problem)
    mu = np.array([np.prod(ref[states, acts]) * (total > 0) for acts, states, total in paths])
    tables = Tables(problem, ref, mu=mu / mu.sum())
    _, q = evaluate(problem.next, problem.reward, ref)
    reached = {s for (_, states, total) in tables.paths for s in states}
    adam = torch.optim.Adam([tables.logits], lr=0.5)
    for _ in range(500):
        view = tables.view(oreo())
        view.streams = {**view.streams, "weight": view.streams["action"]}
        (term,) = Sft().terms(view)
        adam.zero_grad()
        term.sum.backward()
        adam.step()
    for s in reached:
        want = ref[s] * q[s] / (ref[s] * q[s]).sum()
        assert tables.pi[s] == pytest.approx(want, abs=3e-4)  # what never succeeds goes to 0 as 1 / steps
    assert len(reached) > 5


def test_rounds_from_the_last_policy_divide_beta():
    """k rounds, each with the last policy as reference, end where one round with beta / k does; the reward never
    falls."""
    problem, beta = tree(2, 3, seed=1), 1.0
    first = ref = some_ref(problem)
    rewards = [evaluate(problem.next, problem.reward, ref)[0][0]]
    for k in (1, 2, 3):
        tables = Tables(problem, ref)
        tables.fit(oreo(beta=beta), steps=250)
        ref = tables.pi
        _, _, want = solve_soft(problem.next, problem.reward, first, beta / k)
        assert ref == pytest.approx(want, abs=1e-4)
        rewards.append(evaluate(problem.next, problem.reward, ref)[0][0])
    assert all(b > a for a, b in pairwise(rewards))


def test_k3_has_the_right_mean_only_on_policy():
    """E_pi[e^-l + l - 1] = KL(pi || ref); with tokens from the reference it is another number."""
    pi, ref = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    problem = bandit(rewards=[0.0, 0.0, 0.0])
    exact = float((pi * np.log(pi / ref)).sum())
    found = {}
    for name, mu in (("pi", pi), ("ref", ref)):
        tables = Tables(problem, ref[None], mu=mu)
        with torch.no_grad():
            tables.logits.copy_(torch.tensor(np.log(pi))[None])
        found[name] = tables.loss(oreo(alpha=1.0, kl="k3"))[1]["kl"]
        both = [tables.loss(oreo(alpha=1.0, kl=k))[1]["kl"] for k in ("reverse", "forward")]
        assert both == pytest.approx([exact, float((ref * np.log(ref / pi)).sum())], abs=1e-12)
    assert found["pi"] == pytest.approx(exact, abs=1e-12) and abs(found["ref"] - exact) > 0.05
    assert math.isfinite(exact)
