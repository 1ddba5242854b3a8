from itertools import combinations

import numpy as np
import pytest

from trailmark.evaluate.votes import majority_at_k, pass_at_k, powers_of_two


def test_pass_at_k_by_hand_and_by_enumeration():
    assert (
        pass_at_k(4, 1, 1) == 0.25 and pass_at_k(4, 1, 2) == 0.5 and pass_at_k(4, 0, 4) == 0 and pass_at_k(4, 3, 2) == 1
    )
    for n, c, k in ((6, 2, 3), (7, 3, 2), (5, 5, 1)):
        tries = [i < c for i in range(n)]
        assert pass_at_k(n, c, k) == pytest.approx(np.mean([any(s) for s in combinations(tries, k)]))
    with pytest.raises(ValueError, match="is not defined"):
        pass_at_k(3, 1, 4)


def enumerated(answers, right, k):
    """Every choice of k tries, every winner of the vote with equal chance."""
    total = []
    for chosen in combinations(answers, k):
        said = [a for a in chosen if a is not None]
        most = max((said.count(a) for a in said), default=0)
        best = sorted({a for a in said if said.count(a) == most})
        total.append(np.mean([right.get(a, False) for a in best]) if best else 0.0)
    return float(np.mean(total))


@pytest.mark.parametrize("text", ["aab", "aabbc", "abc--", "aaabbbcc", "------a", "---", "aabbccdd", "abbbb-"])
def test_majority_equals_enumeration(text):
    answers = [None if c == "-" else c for c in text]
    for right in ({"a": True}, {"b": True}, {"a": True, "c": True}, {}):
        for k in range(1, len(answers) + 1):
            assert majority_at_k(answers, right, k) == pytest.approx(enumerated(answers, right, k), abs=1e-12)


def test_majority_by_hand():
    # two of three: ab (by lot), ab (by lot), aa
    assert majority_at_k(["a", "a", "b"], {"a": True}, 2) == pytest.approx((0.5 + 0.5 + 1) / 3)
    assert majority_at_k(["a", None, None], {"a": True}, 3) == 1.0  # blanks do not vote
    assert majority_at_k([str(i % 7) for i in range(64)], {"0": True}, 32) > 1 / 7  # and 64 tries are no trouble
    with pytest.raises(ValueError, match="maj@0"):
        majority_at_k(["a"], {}, 0)


def test_powers_of_two():
    assert powers_of_two(1) == [1] and powers_of_two(8) == [1, 2, 4, 8] and powers_of_two(10) == [1, 2, 4, 8, 10]
