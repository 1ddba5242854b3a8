"""The pairwise loss of a reward model, and a value that is read behind a step, by their formulas."""

import math

import numpy as np
import pytest
import torch
from tabular import TabularLM

from trailmark.config import LearnerConfig
from trailmark.errors import LearnError
from trailmark.learn.learner import Learner
from trailmark.objectives.ranking import Ranking
from trailmark.objectives.value import Value
from trailmark.types import Sample


def table():
    """State k (after 1, 2), (1, 3), ... has a head whose output is what the test writes into its row."""
    lm = TabularLM([(1,), (1, 2), (1, 3)], 8)
    head = lm.add_head("step")
    with torch.no_grad():
        head.weight[0, :3] = torch.tensor([0.5, 2.0, -1.0])
    return lm


def row(tokens, at, role, unit="p"):
    weight = np.zeros(len(tokens))
    weight[at] = 1.0
    return Sample(np.array(tokens), {"weight": weight}, {"weight": float(role == "chosen")}, unit=unit, role=role)


def test_bradley_terry():
    learner = Learner({"policy": table()}, LearnerConfig())
    got = learner.gradient([row((1, 2), 1, "chosen"), row((1, 3), 1, "rejected")], Ranking())
    assert got["ranking"] == pytest.approx(math.log(1 + math.exp(-3.0)), abs=1e-12)
    assert got["gap"] == pytest.approx(3.0) and got["accuracy"] == 1.0
    first = [row((1, 3), 1, "chosen"), row((1, 2), 1, "rejected")]
    both = [*first, row((1, 2), 0, "chosen", "q"), row((1, 3), 0, "rejected", "q")]
    got = learner.gradient(both, Ranking())  # the second pair is read at the same place: ln 2
    assert got["ranking"] == pytest.approx((math.log(1 + math.exp(3.0)) + math.log(2)) / 2, abs=1e-12)
    grad = learner.models["policy"].heads["step"].weight.grad[0]
    wanted = 1 / (1 + math.exp(-3.0)) / 2  # of half the loss: sigma(-gap), with gap -3
    assert grad[:3].tolist() == pytest.approx([0.0, wanted, -wanted], abs=1e-12)
    with pytest.raises(LearnError, match="one 'chosen' and one 'rejected'"):
        learner.gradient([row((1, 2), 1, "chosen")], Ranking())


@pytest.mark.parametrize(("at", "wanted"), [("before", (0.5 - 0.25) ** 2), ("after", (2.0 - 0.25) ** 2)])
def test_a_value_before_and_after_a_token(at, wanted):
    streams = {"value_weight": np.array([0.0, 1.0]), "returns": np.array([0.0, 0.25])}
    sample = Sample(np.array([1, 2]), streams, {"value_weight": 1.0})
    got = Learner({"critic": table()}, LearnerConfig(), {}).gradient([sample], Value(head="step", at=at))
    assert got["value"] == pytest.approx(wanted, abs=1e-12)
