import numpy as np
import pytest

from trailmark.credit.returns import discounted, max_abs_normalise

GOLDEN = [  # rewards, returns and weights at gamma 0.99
    ([0, 0, 0.7], [0.68607, 0.693, 0.7], [0.9801, 0.99, 1]),
    ([0, 1, 0.7], [1.67607, 1.693, 0.7], [0.99, 1, 0.413467]),
    ([1, 0, 0.1], [1.09801, 0.099, 0.1], [1, 0.090163, 0.091074]),
    ([0, 0, 0.1], [0.09801, 0.099, 0.1], [0.9801, 0.99, 1]),
    ([1, 1, 1, 1], [3.940399, 2.9701, 1.99, 1], [1, 0.753756, 0.505025, 0.253781]),
    ([0, 0, 0], [0, 0, 0], [0, 0, 0]),
]


@pytest.mark.parametrize(("rewards", "returns", "weights"), GOLDEN)
def test_epo_rows(rewards, returns, weights):
    g = discounted(rewards, 0.99)
    np.testing.assert_allclose(g, returns, atol=1e-9)
    np.testing.assert_allclose(max_abs_normalise(g), weights, atol=1e-6)


def test_discount_of_one_and_zero():
    assert discounted([1, 2, 3], 1.0).tolist() == [6, 5, 3]
    assert discounted([1, 2, 3], 0.0).tolist() == [1, 2, 3]
    assert discounted([], 0.9).shape == (0,)


def test_negative_returns_keep_their_sign():
    assert max_abs_normalise([-4, 2, 0]).tolist() == [-1, 0.5, 0]
    assert max_abs_normalise([]).shape == (0,)


def test_a_matrix_is_refused():
    with pytest.raises(ValueError, match=r"rewards must be one vector, but has shape \(2, 2\)"):
        discounted(np.zeros((2, 2)), 1.0)
