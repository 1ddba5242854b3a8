"""Settings of the likelihood reward that could only pay nothing are refused."""

import pytest

from trailmark.config import resolve
from trailmark.errors import RecipeError
from trailmark.methods.vrcli.config import LikelihoodJudgeConfig


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"steps": []}, "steps is empty, so every answer would earn 0"),
        ({"markers": [""]}, "markers has an empty one"),
        ({"markers": ["In summary:", " "]}, "markers has an empty one"),
    ],
)
def test_rewards_that_pay_nothing_are_refused(given, why):
    with pytest.raises(RecipeError, match=why):
        resolve({"kind": "likelihood", **given}, LikelihoodJudgeConfig)
    resolve({"kind": "likelihood", "reward": "linear", "steps": []}, LikelihoodJudgeConfig)  # not used there
