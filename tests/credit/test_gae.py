from collections import defaultdict

import numpy as np
import pytest

from trailmark.credit.gae import gae
from trailmark.credit.returns import discounted


def double_sum(r, v, gamma, lam, bootstrap):
    """The definition, written as two sums."""
    after = [*v[1:], bootstrap]
    delta = [r[k] + gamma * after[k] - v[k] for k in range(len(r))]
    return [sum((gamma * lam) ** (j - k) * delta[j] for j in range(k, len(r))) for k in range(len(r))]


def test_by_hand():
    # delta_1 = 1 - 0.4 = 0.6; delta_0 = 0 + 0.5*0.4 - 0.2 = 0; A_0 = 0 + 0.5*0.5*0.6 = 0.15
    a, target = gae([0, 1], [0.2, 0.4], gamma=0.5, lam=0.5)
    np.testing.assert_allclose(a, [0.15, 0.6], rtol=1e-15)
    np.testing.assert_allclose(target, [0.35, 1.0], rtol=1e-15)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
def test_equals_the_double_sum(gamma, lam):
    rng = np.random.default_rng(1)
    r, v = rng.normal(size=9), rng.normal(size=9)
    a, target = gae(r, v, gamma, lam, bootstrap=0.7)
    np.testing.assert_allclose(a, double_sum(r, v, gamma, lam, 0.7), atol=1e-13)
    np.testing.assert_allclose(target, a + v, rtol=0)


def test_both_ends_of_lambda():
    rng = np.random.default_rng(2)
    r, v = rng.normal(size=6), rng.normal(size=6)
    np.testing.assert_allclose(gae(r, v, 1.0, 1.0)[0], discounted(r, 1.0) - v, atol=1e-14)
    np.testing.assert_allclose(gae(r, v, 0.9, 1.0, 2.0)[0], discounted([*r, 2.0], 0.9)[:-1] - v, atol=1e-14)
    np.testing.assert_allclose(gae(r, v, 0.9, 0.0, 2.0)[0], r + 0.9 * np.append(v[1:], 2.0) - v, rtol=0)


# --- a world small enough to enumerate: state -> action -> [(probability, reward, next state)], None ends it -------
WORLD = {
    "s": {"a": [(0.25, 1.0, "t"), (0.75, 0.0, "u")], "b": [(1.0, -0.5, "u")], "stop": [(1.0, 0.3, None)]},
    "t": {"a": [(0.5, 2.0, None), (0.5, 0.0, "u")], "b": [(1.0, 0.1, None)]},
    "u": {"a": [(1.0, 0.0, "w")], "b": [(0.4, 3.0, None), (0.6, -1.0, "w")]},
    "w": {"a": [(1.0, 1.5, None)], "b": [(0.9, -2.0, None), (0.1, 8.0, None)]},
}
POLICY = {
    "s": {"a": 0.5, "b": 0.3, "stop": 0.2},
    "t": {"a": 0.6, "b": 0.4},
    "u": {"a": 0.1, "b": 0.9},
    "w": {"a": 0.7, "b": 0.3},
}


def values(gamma):
    v, q = {None: 0.0}, {}
    for s in ("w", "u", "t", "s"):
        for a, outs in WORLD[s].items():
            q[s, a] = sum(p * (r + gamma * v[n]) for p, r, n in outs)
        v[s] = sum(POLICY[s][a] * q[s, a] for a in WORLD[s])
    return v, q


def plays(s="s"):
    """Every trajectory as (probability, [(state, action, reward), ...])."""
    if s is None:
        yield 1.0, []
        return
    for a, outs in WORLD[s].items():
        for p, r, n in outs:
            for w, rest in plays(n):
                yield POLICY[s][a] * p * w, [(s, a, r), *rest]


@pytest.mark.parametrize("gamma", [0.9, 1.0])
@pytest.mark.parametrize("lam", [0.0, 0.3, 0.95, 1.0])
def test_with_the_exact_value_the_mean_advantage_is_the_true_one(gamma, lam):
    v, q = values(gamma)
    assert sum(w for w, _ in plays()) == pytest.approx(1.0, abs=1e-12)
    mass, total = defaultdict(float), defaultdict(float)
    for w, play in plays():
        a, _ = gae([r for *_, r in play], [v[s] for s, *_ in play], gamma, lam)
        for (s, action, _), x in zip(play, a):
            mass[s, action] += w
            total[s, action] += w * x
    assert set(mass) == set(q)
    for key in q:
        assert total[key] / mass[key] == pytest.approx(q[key] - v[key[0]], abs=1e-12), key


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="values has 1 entries, but rewards has 2"):
        gae([1, 2], [1], 1.0, 1.0)
