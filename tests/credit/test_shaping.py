import numpy as np
import pytest

from trailmark.credit.shaping import kl_shaped, place, whiten

NAN = float("nan")


def test_place_puts_each_value_on_the_last_token_of_its_step():
    assert place([0.5, -1, 2], [(1, 3), (3, 4), (6, 8)], 9).tolist() == [0, 0, 0.5, -1, 0, 0, 0, 2, 0]
    assert place([], [], 2).tolist() == [0, 0]


@pytest.mark.parametrize("spans", [[(1, 1)], [(0, 5)], [(-1, 2)]])
def test_place_refuses_a_span_that_is_none(spans):
    with pytest.raises(ValueError, match="is empty, overlaps"):
        place([1], spans, 4)


def test_place_refuses_overlaps_and_counts():
    with pytest.raises(ValueError, match=r"span \[1, 3\)"):
        place([1, 2], [(0, 2), (1, 3)], 4)
    with pytest.raises(ValueError, match="2 values for 1 spans"):
        place([1, 2], [(0, 2)], 4)


def test_kl_shaped_by_hand():
    r = kl_shaped([0, 0, 0, 1], [NAN, -1.0, -2.0, -0.5], [NAN, -3.0, -1.5, -0.5], [0, 0, 1, 1], coef=0.1)
    np.testing.assert_allclose(r, [0, 0, 0.05, 1.0], rtol=1e-15)  # -0.1 * (-2 + 1.5) = 0.05


def test_kl_shaped_refuses_what_it_would_lose():
    with pytest.raises(ValueError, match="the reward 1 at token 0"):
        kl_shaped([1, 0], [0, 0], [0, 0], [False, True], 0.1)
    with pytest.raises(ValueError, match="ref has 1 entries, but reward has 2"):
        kl_shaped([1, 0], [0, 0], [0], [False, True], 0.1)
    with pytest.raises(ValueError, match=r"written has shape \(1,\), not \(2,\)"):
        kl_shaped([1, 0], [0, 0], [0, 0], [True], 0.1)


def test_whiten_by_hand():
    # over 1, 3: mean 2, std 1
    assert whiten([1, 100, 3], [1, 0, 1]).tolist() == [-1, 0, 1]


def test_whiten_moments_and_ties():
    x, mask = np.random.default_rng(3).normal(2, 5, 50), np.arange(50) % 3 > 0
    w = whiten(x, mask)
    assert w[mask].mean() == pytest.approx(0, abs=1e-14) and w[mask].std() == pytest.approx(1, abs=1e-14)
    assert whiten([0.9] * 3, [1] * 3).tolist() == [0, 0, 0]
    assert whiten([1, 2], [0, 0]).tolist() == [0, 0]
