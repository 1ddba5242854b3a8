"""Which choice gets the credit: a chain in which one choice decides, learnt from few plays at token and response
level."""

from types import SimpleNamespace

import numpy as np
from bellman_tables import Tables, every_path

from trailmark.methods.oreo.soft_bellman import SoftBellman

LENGTH, DECISIVE, PLAYS = 10, 4, 24


def chain():
    """Two choices at each of ten places. At place 4 the second one loses, and the states after it are separate. All
    other choices change nothing."""
    lost = lambda place: LENGTH + place - DECISIVE - 1
    after = np.full((lost(LENGTH), 2), -1)
    for place in range(LENGTH - 1):
        after[place] = place + 1
        if place > DECISIVE:
            after[lost(place)] = lost(place + 1)
    after[DECISIVE, 1] = lost(DECISIVE + 1)
    reward = np.zeros(after.shape)
    reward[LENGTH - 1] = 1.0
    return SimpleNamespace(next=after, reward=reward)


def learnt(level, seed):
    """(probability of the right choice, mean drift of the choices that do not matter) after 100 steps on 24 plays of
    1,024."""
    problem = chain()
    mu = np.zeros(2**LENGTH)
    mu[np.random.default_rng(seed).choice(len(mu), PLAYS, replace=False)] = 1 / PLAYS
    assert len(every_path(problem)) == len(mu)
    tables = Tables(problem, np.full(problem.next.shape, 0.5), mu=mu)
    tables.fit(SoftBellman(part="both", level=level, beta=0.3, alpha=1e-3, actions="action"), steps=100, lr=0.05)
    others = np.delete(tables.pi[:LENGTH, 0], DECISIVE)
    return tables.pi[DECISIVE, 0], np.abs(others - 0.5).mean()


def test_token_level_credits_the_decisive_choice_and_leaves_the_others_alone():
    token, response = (np.array([learnt(level, seed) for seed in range(6)]) for level in ("token", "response"))
    assert (token[:, 0] > response[:, 0]).all() and token[:, 0].min() > 0.96
    assert token[:, 1].mean() < response[:, 1].mean() / 3 and token[:, 1].max() < 0.02
