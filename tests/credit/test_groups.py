import numpy as np
import pytest

from trailmark.credit.groups import group_relative, leave_one_out

NAN = float("nan")


def test_golden_group():
    a = group_relative([0, 0.5, 0.9, 1.0], ["g"] * 4)
    np.testing.assert_allclose(a, [-1.3198, -0.2200, 0.6599, 0.8799], atol=5e-5)


def test_two_plays():
    # mean 1/2, unbiased std sqrt(1/2): A = +-(1/2)/sqrt(1/2) = +-sqrt(1/2)
    np.testing.assert_allclose(group_relative([0, 1], [7, 7], eps=0.0), [-np.sqrt(0.5), np.sqrt(0.5)], rtol=1e-15)


def test_groups_do_not_mix_and_may_be_interleaved():
    r, g = np.array([0, 10, 0.5, 10, 0.9, 13, 1.0]), np.array(list("abababa"))
    a = group_relative(r, g)
    np.testing.assert_array_equal(a[g == "a"], group_relative(r[g == "a"], list("aaaa")))
    np.testing.assert_array_equal(a[g == "b"], group_relative(r[g == "b"], list("bbb")))


def test_without_scale_it_is_the_distance_to_the_mean():
    assert group_relative([1, 3, 5, 0], [0, 0, 0, 1], scale="none").tolist() == [-2, 0, 2, 0]


@pytest.mark.parametrize("n", [2, 3, 6, 8, 12, 16])
@pytest.mark.parametrize("reward", [0.9, 0.1, -1e3, 1 / 3])
def test_equal_rewards_give_exactly_zero(n, reward):
    assert group_relative([reward] * n, [0] * n).tolist() == [0.0] * n
    assert group_relative([reward] * n, [0] * n, eps=0.0).tolist() == [0.0] * n
    assert leave_one_out([reward] * n, [0] * n).tolist() == [0.0] * n


def test_guard_is_on_the_range():
    near = [0.5, 0.5 + 9e-7]
    assert group_relative(near, [0, 0]).tolist() == [0, 0]
    assert group_relative(near, [0, 0], guard=1e-8)[1] == pytest.approx(np.sqrt(0.5), rel=2e-3)


def test_a_group_of_one_gives_zero():
    assert group_relative([5.0], ["only"]).tolist() == [0.0]
    assert leave_one_out([5.0], ["only"]).tolist() == [0.0]
    assert leave_one_out([5.0, NAN], ["only", "only"])[0] == 0.0


def test_clip():
    r = [0.0] * 200 + [1.0]
    assert group_relative(r, [0] * 201).max() > 14
    assert group_relative(r, [0] * 201, clip=10).max() == 10


def test_unscored_plays_stay_nan_and_are_in_no_mean():
    r, g = [0, NAN, 0.5, 0.9, 1.0, NAN, NAN, 3], [0, 0, 0, 0, 0, 1, 1, 2]
    for a in (group_relative(r, g), group_relative(r, g, clip=10.0)):
        np.testing.assert_allclose(a[[0, 2, 3, 4]], [-1.3198, -0.2200, 0.6599, 0.8799], atol=5e-5)
        assert np.isnan(a[[1, 5, 6]]).all() and a[7] == 0
    np.testing.assert_allclose(leave_one_out([1, NAN, 3], [0] * 3), [-2, NAN, 2])
    assert group_relative([NAN, 4], [0, 0])[1] == 0


def test_leave_one_out_by_hand():
    # others of 1: (2+6)/2 = 4; of 2: 7/2; of 6: 3/2
    np.testing.assert_allclose(leave_one_out([1, 2, 6], [0] * 3), [-3, -1.5, 4.5], rtol=1e-15)


def test_leave_one_out_against_the_definition():
    rng = np.random.default_rng(0)
    r, g = rng.normal(size=40), rng.integers(0, 5, 40)
    want = [r[i] - np.mean([r[j] for j in range(40) if g[j] == g[i] and j != i]) for i in range(40)]
    np.testing.assert_allclose(leave_one_out(r, g), want, atol=1e-13)


def test_leave_one_out_is_unbiased_and_the_group_mean_is_not():
    # Two draws of a Bernoulli(p) with reward = action: the gradient of p in the logit is p(1-p), and
    # d logp / d logit = action - p. Enumerated, RLOO gives it exactly; the shared mean gives half of it.
    p, total, shared = 0.3, 0.0, 0.0
    for x in (0, 1):
        for y in (0, 1):
            w = (p if x else 1 - p) * (p if y else 1 - p)
            score = np.array([x - p, y - p])
            total += w * (leave_one_out([x, y], [0, 0]) * score).mean()
            shared += w * (group_relative([x, y], [0, 0], scale="none") * score).mean()
    assert total == pytest.approx(p * (1 - p), rel=1e-12)
    assert shared == pytest.approx(p * (1 - p) / 2, rel=1e-12)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="groups has shape"):
        group_relative([1, 2], [0])
    with pytest.raises(ValueError, match="reward 1 is infinite"):
        group_relative([1, np.inf], [0, 0])
    with pytest.raises(ValueError, match="scale must be"):
        group_relative([1, 2], [0, 0], scale="var")
