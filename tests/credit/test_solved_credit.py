"""Credit against problems whose every value is known: expectations over all plays, none of them sampled."""

import itertools

import numpy as np
import pytest
import torch
from tabular import TabularLM

from trailmark.config import LearnerConfig
from trailmark.credit.gae import gae
from trailmark.credit.groups import group_relative, leave_one_out
from trailmark.credit.returns import discounted
from trailmark.learn.learner import Learner
from trailmark.objectives.weighted_logp import WeightedLogp
from trailmark.samples import build_samples
from trailmark.tasks.solved import END, bandit, evaluate, paths, tree
from trailmark.types import Episode, SamplingLaw, Scored, Task, Turn

PROBLEMS = {
    "inner": tree(3, 3, seed=2, inner=True),
    "early": tree(4, 2, seed=3, inner=True, early=True),
    "deep": tree(5, 2, seed=8, inner=True, early=True),
}
ALL = pytest.mark.parametrize("p", PROBLEMS.values(), ids=PROBLEMS.keys())
GAMMA = pytest.mark.parametrize("gamma", [1.0, 0.9, 0.5])
LAMBDA = pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])


def policy(p, seed=0):
    z = np.random.default_rng(seed).normal(size=p.next.shape)
    return z, np.exp(z) / np.exp(z).sum(1, keepdims=True)


def solved(p, pi, gamma):
    """V and Q with a discount, by one sweep from the last state."""
    v, q = np.zeros(len(pi)), np.zeros(pi.shape)
    for s in range(len(pi) - 1, -1, -1):
        q[s] = p.reward[s] + gamma * np.where(p.next[s] == END, 0.0, v[p.next[s]])
        v[s] = pi[s] @ q[s]
    return v, q


def walks(p, pi):
    """Every play as (probability, states, actions, rewards)."""
    for path in paths(p.next, p.reward, pi):
        states, s = [], 0
        for a in path.actions:
            states.append(s)
            s = int(p.next[s, a])
        assert s == END
        yield path.probability, states, list(path.actions), [float(p.reward[x]) for x in zip(states, path.actions)]


class Mean:
    """Weighted means by key."""

    def __init__(self):
        self.sums, self.mass = {}, {}

    def add(self, key, weight, value):
        self.sums[key] = self.sums.get(key, 0.0) + weight * value
        self.mass[key] = self.mass.get(key, 0.0) + weight

    def items(self):
        return [(k, self.sums[k] / self.mass[k]) for k in self.sums]


def test_the_problems_have_what_the_tests_need():
    assert len({len(w[1]) for w in walks(PROBLEMS["early"], PROBLEMS["early"].uniform)}) > 1
    for p in PROBLEMS.values():
        _, pi = policy(p)
        np.testing.assert_allclose(solved(p, pi, 1.0)[0], evaluate(p.next, p.reward, pi)[0], atol=1e-15)
        np.testing.assert_allclose(solved(p, pi, 1.0)[1], evaluate(p.next, p.reward, pi)[1], atol=1e-15)
        assert ((p.next != END) & (p.reward != 0)).any()


@ALL
@GAMMA
def test_mean_return_is_the_value(p, gamma):
    _, pi = policy(p)
    v, q = solved(p, pi, gamma)
    of_state, of_action = Mean(), Mean()
    for weight, states, actions, rewards in walks(p, pi):
        for s, a, g in zip(states, actions, discounted(rewards, gamma)):
            of_state.add(s, weight, g)
            of_action.add((s, a), weight, g)
    assert len(of_state.items()) == len(pi)
    for s, g in of_state.items():
        assert g == pytest.approx(v[s], abs=1e-13)
    for key, g in of_action.items():
        assert g == pytest.approx(q[key], abs=1e-13)


@ALL
@GAMMA
@LAMBDA
def test_gae_with_exact_values_has_the_advantage_as_its_mean(p, gamma, lam):
    """E[A_k | s, a] = Q(s, a) - V(s) for every lambda; and its target's mean is Q."""
    _, pi = policy(p, 1)
    v, q = solved(p, pi, gamma)
    mean, target = Mean(), Mean()
    for weight, states, actions, rewards in walks(p, pi):
        for s, a, x, y in zip(states, actions, *gae(rewards, v[states], gamma, lam)):
            mean.add((s, a), weight, x)
            target.add((s, a), weight, y)
    for (s, a), x in mean.items():
        assert x == pytest.approx(q[s, a] - v[s], abs=1e-13)
    for key, y in target.items():
        assert y == pytest.approx(q[key], abs=1e-13)


@ALL
@GAMMA
@LAMBDA
def test_gae_with_wrong_values_has_the_bias_it_should(p, gamma, lam):
    """With any other V the mean is X(s, a) = d(s, a) + gamma lam sum_b pi(b|s') X(s', b), where
    d(s, a) = r + gamma V(s') - V(s), swept from the last state; at lambda 1 that is Q(s, a) - V(s) with the true Q."""
    _, pi = policy(p, 1)
    wrong = np.random.default_rng(9).normal(size=len(pi))
    x = np.zeros(pi.shape)
    for s in range(len(pi) - 1, -1, -1):
        ends, t = p.next[s] == END, p.next[s]
        x[s] = p.reward[s] + np.where(ends, 0.0, gamma * wrong[t] + gamma * lam * (pi[t] * x[t]).sum(1)) - wrong[s]
    mean = Mean()
    for weight, states, actions, rewards in walks(p, pi):
        for s, a, y in zip(states, actions, gae(rewards, wrong[states], gamma, lam)[0]):
            mean.add((s, a), weight, y)
    for key, y in mean.items():
        assert y == pytest.approx(x[key], abs=1e-13)
    if lam == 1:
        np.testing.assert_allclose(x, solved(p, pi, gamma)[1] - wrong[:, None], atol=1e-13)


@ALL
def test_gae_of_a_play_that_was_cut_needs_the_value_it_stopped_at(p):
    """Plays cut after two letters: with the value of the state reached as bootstrap the mean is still exact."""
    _, pi = policy(p, 1)
    v, q = solved(p, pi, 0.9)
    mean = Mean()
    for weight, states, actions, rewards in walks(p, pi):
        rest = v[states[2]] if len(states) > 2 else 0.0
        for s, a, x in zip(states, actions, gae(rewards[:2], v[states[:2]], 0.9, 0.8, rest)[0]):
            mean.add((s, a), weight, x)
    for (s, a), x in mean.items():
        assert x == pytest.approx(q[s, a] - v[s], abs=1e-13)


# --- gradients of expected return -----------------------------------------------------------------------------------


def exact_gradient(p, z, h=1e-6):
    """d V(0) / d logits, by central differences through the solver."""

    def value(logits):
        e = np.exp(logits)
        return evaluate(p.next, p.reward, e / e.sum(1, keepdims=True))[0][0]

    out = np.zeros_like(z)
    for at in np.ndindex(*z.shape):
        step = np.zeros_like(z)
        step[at] = h
        out[at] = (value(z + step) - value(z - step)) / (2 * h)
    return out


def table_of(p, z, seen):
    """A table whose row for the tokens seen before a letter holds that state's logits. Ids: letters, observations."""
    letters = p.next.shape[1]
    lm = TabularLM([seen[s] for s in range(len(z))], letters + 2)
    with torch.no_grad():
        for s in range(len(z)):
            lm.model.logits[lm.row[seen[s]], :letters] = torch.as_tensor(z[s])
            lm.model.logits[lm.row[seen[s]], letters:] = 3.0  # not allowed, so it must not matter
    return lm


def as_turns(p, actions):
    """One letter a turn: the first sees a start token, later ones an observation more."""
    letters = p.next.shape[1]
    law = SamplingLaw(allowed=tuple(range(letters)))
    turns, s = [], 0
    for k, a in enumerate(actions):
        prompt = (letters,) if k == 0 else (letters + 1,) * (1 + k % 2)
        turns.append(
            Turn("policy", prompt, (a,), law=law, continues=k - 1 if k else None, reward=float(p.reward[s, a]))
        )
        s = int(p.next[s, a])
    return tuple(turns)


def as_episode(p, name, actions):
    turns = as_turns(p, actions)
    return Episode(name, Task(name), "g", turns, {"self": Scored(sum(t.reward for t in turns))})


def prefixes(p):
    """What is seen before a letter is chosen, by state."""
    seen = {}
    for _, states, actions, _ in walks(p, p.uniform):
        e = as_episode(p, "x", actions)
        seen |= {s: e.context(k) for k, s in enumerate(states)}
    return seen


def gradient_of(p, z, episodes, weights, advantages):
    """The gradient of sum_e weight_e sum_t A_t log pi(a_t), which is minus that of the loss."""
    lm = table_of(p, z, prefixes(p))
    learner = Learner({"policy": lm}, LearnerConfig(layout="tree"))
    scaled = {e.id: [w * x for x in a] for e, w, a in zip(episodes, weights, advantages)}
    samples = build_samples(episodes, "policy", {"advantage": scaled}, mean="constant")
    learner.gradient(samples, WeightedLogp())
    g = -lm.model.logits.grad.numpy() * len(episodes)  # the mass of a batch is its number of episodes
    letters = p.next.shape[1]
    assert not g[:, letters:].any() and not g[-1].any()
    return np.array([g[lm.row[seen], :letters] for _, seen in sorted(prefixes(p).items())])


@ALL
@pytest.mark.parametrize("credit", ["to go", "whole", "advantage"])
def test_reinforce_has_the_gradient_of_expected_return(p, credit):
    """Over all plays: with the return to go, with the whole return, and with GAE on exact values the expectation is one
    and the same, the gradient of V(0)."""
    z, pi = policy(p, 4)
    v, _ = evaluate(p.next, p.reward, pi)
    episodes, weights, credits = [], [], []
    for k, (weight, states, actions, rewards) in enumerate(walks(p, pi)):
        e = as_episode(p, f"e{k}", actions)
        assert [t.reward for t in e.turns] == rewards
        episodes.append(e)
        weights.append(weight)
        whole = [e.outcome.reward] * len(actions)
        credits.append(
            {"to go": discounted(rewards, 1.0), "whole": whole, "advantage": gae(rewards, v[states], 1.0, 0.7)[0]}[
                credit
            ]
        )
    got = gradient_of(p, z, episodes, weights, credits)
    want = exact_gradient(p, z)
    np.testing.assert_allclose(got, want, atol=1e-9)
    assert np.abs(want).max() > 0.01


def test_discounted_turn_returns_are_another_gradient():
    """A check on the check: with a discount of 0.5 the numbers above must differ."""
    p = PROBLEMS["early"]
    z, pi = policy(p, 4)
    found = list(walks(p, pi))
    episodes = [as_episode(p, f"e{k}", w[2]) for k, w in enumerate(found)]
    got = gradient_of(p, z, episodes, [w[0] for w in found], [discounted(w[3], 0.5) for w in found])
    assert np.abs(got - exact_gradient(p, z)).max() > 0.01


GROUPS = {
    "bandit, 3": (bandit(4, seed=6), 3),
    "bandit, 2": (bandit(5, seed=7), 2),
    "tree, 2": (tree(2, 3, seed=1, inner=True), 2),
    "early, 2": (tree(3, 2, seed=4, inner=True, early=True), 2),
}


@pytest.mark.parametrize("credit", ["leave_one_out", "group_relative"])
@pytest.mark.parametrize("name", GROUPS)
def test_every_group_of_n(name, credit):
    """All groups of n independent plays, each with its probability; a group's estimate is the mean of A_i grad log p_i.
    Leave-one-out gives the exact gradient; the group's own mean as baseline gives (n - 1) / n of it."""
    p, n = GROUPS[name]
    z, pi = policy(p, 5)
    plays = list(walks(p, pi))
    episodes, weights, rewards, groups = [], [], [], []
    for g, members in enumerate(itertools.product(range(len(plays)), repeat=n)):
        chance = float(np.prod([plays[m][0] for m in members]))
        for i, m in enumerate(members):
            episodes.append(as_episode(p, f"g{g}/{i}", plays[m][2]))
            weights.append(chance / n)
            rewards.append(episodes[-1].outcome.reward)
            groups.append(g)
    assert sum(weights) == pytest.approx(1, abs=1e-12)
    if credit == "leave_one_out":
        a, factor = leave_one_out(rewards, groups), 1.0
    else:
        a, factor = group_relative(rewards, groups, scale="none"), (n - 1) / n
    got = gradient_of(p, z, episodes, weights, [[x] * len(e.turns) for x, e in zip(a, episodes)])
    want = exact_gradient(p, z)
    np.testing.assert_allclose(got, factor * want, atol=1e-9)
    assert np.abs(want).max() > 0.01
