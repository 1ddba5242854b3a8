"""The relatives of the clipped surrogate against a loop over tokens: each surrogate, each ratio, and the gradient."""

import math

import numpy as np
import pytest
import torch

from trailmark.models.layout import lay_out
from trailmark.models.readout import View
from trailmark.objectives.clipped import Clipped
from trailmark.types import Sample

LENGTHS = [4, 1, 3]  # rows; a row of one token, and one with untrained tokens
GAP = np.array([0.5, -0.7, 0.1, 0.05, -0.4, 0.3, 0.0, -0.2])
WEIGHT = np.array([1.0, 0.5, 2.0, 1.0, 1.0, 0.0, 1.0, 3.0])
ADVANTAGE = np.array([2.0, 2.0, -1.0, 1.0, -1.5, 9.0, 0.5, 1.0])
OLD = np.array([-1.0, -2.0, -0.5, -3.0, -1.0, -0.1, -4.0, -0.3])
ROWS = np.repeat(np.arange(3), LENGTHS)


def seen(gap=GAP, advantage=ADVANTAGE, weight=WEIGHT, **more):
    """A view in which the log-probs are a leaf."""
    data = {"weight": weight, "advantage": advantage, "old": OLD, **more}
    samples = [Sample(np.zeros(n, int), {k: v[r == ROWS] for k, v in data.items()}) for r, n in enumerate(LENGTHS)]
    packed = lay_out(samples, "rows")
    logp = torch.tensor(OLD + gap, dtype=torch.float64, requires_grad=True)
    streams = {k: torch.as_tensor(v) for k, v in packed.streams.items()}
    return View(packed, streams, {"logp": logp}, torch.as_tensor(packed.row)), logp


def ratios(kind, gap=GAP):
    if kind == "token":
        return [math.exp(g) for g in gap]
    out = []
    for row in ROWS:  # the geometric mean over the trained tokens of the row
        trained = [gap[t] for t in range(8) if ROWS[t] == row and WEIGHT[t]]
        out.append(math.exp(sum(trained) / max(len(trained), 1)))
    return out


def loss_of(logp, kind, surrogate, low, high):
    """The loss as a function of plain numbers, for differences; cispo's weight is held at OLD + GAP."""
    r, now = ratios(kind, logp - OLD), ratios(kind)
    total = 0.0
    for t in range(8):
        inside = min(max((now if surrogate == "cispo" else r)[t], 1 - low), 1 + high)
        if surrogate == "cispo":
            total -= WEIGHT[t] * inside * ADVANTAGE[t] * logp[t]
        else:
            total -= WEIGHT[t] * min(r[t] * ADVANTAGE[t], inside * ADVANTAGE[t])
    return total


@pytest.mark.parametrize("low, high", [(0.2, 0.3), (1.0, 0.2), (0.01, 0.01), (1.0, 9.0)])
@pytest.mark.parametrize("kind", ["token", "sequence"])
@pytest.mark.parametrize("surrogate", ["clipped", "cispo"])
def test_loss_and_gradient_against_a_loop_and_its_differences(kind, surrogate, low, high):
    view, logp = seen()
    found = {t.name: t for t in Clipped(low=low, high=high, ratio=kind, surrogate=surrogate).terms(view)}
    assert found["policy"].sum.item() == pytest.approx(loss_of(OLD + GAP, kind, surrogate, low, high), abs=1e-12)
    (got,) = torch.autograd.grad(found["policy"].sum, logp)
    for t in range(8):
        ends = []
        for by in (1e-6, -1e-6):
            moved = OLD + GAP
            moved[t] += by
            ends.append(loss_of(moved, kind, surrogate, low, high))
        assert got[t].item() == pytest.approx((ends[0] - ends[1]) / 2e-6, abs=1e-7)
    r = ratios(kind)
    cut = [(r[t] > 1 + high and ADVANTAGE[t] > 0) or (r[t] < 1 - low and ADVANTAGE[t] < 0) for t in range(8)]
    assert found["clip_fraction"].sum.item() == pytest.approx(sum(WEIGHT[t] for t in range(8) if cut[t]))
    assert found["ratio"].sum.item() == pytest.approx(sum(WEIGHT[t] * r[t] for t in range(8)))
    assert all(found[n].coef == 0 and found[n].mean for n in ("clip_fraction", "ratio", "kl_old"))


def test_cispo_keeps_a_gradient_where_the_clipped_one_has_none():
    for surrogate, want in (("clipped", 0.0), ("cispo", -1.2 * 2.0)):
        view, logp = seen()
        (policy, *_) = Clipped(low=0.2, high=0.2, surrogate=surrogate).terms(view)
        (got,) = torch.autograd.grad(policy.sum, logp)
        assert got[0].item() == pytest.approx(want)  # ratio e^0.5, advantage 2
        assert got[5].item() == 0.0  # untrained


def test_at_the_old_policy_all_of_them_are_the_plain_policy_gradient():
    for surrogate in ("clipped", "cispo"):
        view, logp = seen(gap=np.zeros(8))
        (policy, *_) = Clipped(surrogate=surrogate).terms(view)
        (got,) = torch.autograd.grad(policy.sum, logp)
        assert got.tolist() == pytest.approx((-WEIGHT * ADVANTAGE).tolist())
    view, logp = seen(gap=np.zeros(8))  # one ratio a row shares a row's advantages equally
    (policy, *_) = Clipped(ratio="sequence").terms(view)
    (got,) = torch.autograd.grad(policy.sum, logp)
    for row in range(3):
        mine = [t for t in range(8) if ROWS[t] == row and WEIGHT[t]]
        share = -sum(WEIGHT[t] * ADVANTAGE[t] for t in mine) / len(mine)
        assert [got[t].item() for t in mine] == pytest.approx([share] * len(mine))


def test_untrained_tokens_may_hold_anything():
    want = Clipped(ratio="sequence").terms(seen()[0])
    gap, advantage = GAP.copy(), ADVANTAGE.copy()
    gap[5], advantage[5] = 3.0, -100.0
    got = Clipped(ratio="sequence").terms(seen(gap, advantage)[0])
    assert [t.sum.item() for t in got] == [t.sum.item() for t in want]
