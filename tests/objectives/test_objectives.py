"""Objectives by hand: small tensors with every branch in them, loops for the means, and the sentences of the errors."""

import math

import numpy as np
import pytest
import torch
from tabular import TabularLM

from trailmark.config import LearnerConfig
from trailmark.errors import LearnError
from trailmark.learn.learner import Learner
from trailmark.methods.oreo.soft_bellman import SoftBellman, tail_sums
from trailmark.models.layout import lay_out
from trailmark.models.readout import Readout, View
from trailmark.objectives.classify import Classify
from trailmark.objectives.clipped import Clipped
from trailmark.objectives.pairwise import Pairwise
from trailmark.objectives.value import Value
from trailmark.objectives.weighted_logp import WeightedLogp
from trailmark.samples import build_samples, pair, scored
from trailmark.types import Episode, Failed, Invalid, Sample, SamplingLaw, Scored, Task, Turn


def look(lengths, read, units=(), **streams):
    """A view over rows of these lengths: `read` are leaves with a gradient, `streams` are data, flat over tokens."""
    at = np.concatenate([[0], np.cumsum(lengths)])
    arrays = {k: np.asarray(v, float if np.asarray(v).dtype.kind == "f" else int) for k, v in streams.items()}
    samples = [
        Sample(np.zeros(n, int), {k: v[a : a + n] for k, v in arrays.items()}, unit=units[i][0] if units else "",
               role=units[i][1] if units else "")
        for i, (n, a) in enumerate(zip(lengths, at))
    ]  # fmt: skip
    packed = lay_out(samples, "rows")
    leaves = {k: torch.tensor(v, dtype=torch.float64, requires_grad=True) for k, v in read.items()}
    data = {k: torch.as_tensor(v) for k, v in packed.streams.items()}
    return View(packed, data, leaves, torch.as_tensor(packed.row)), leaves


def terms(objective, view):
    return {t.name: t for t in objective.terms(view)}


# --- clipped ------------------------------------------------------------------------------------------------------

RATIOS = np.array([0.5, 1.1, 1.5, 0.5, 0.9, 1.5])
A = np.array([2.0, 2.0, 2.0, -1.0, -1.0, -1.0])


def test_clipped_on_both_sides_for_both_signs():
    """Clip to [0.8, 1.3]. A = 2: min(1, 1.6), min(2.2, 2.2), min(3, 2.6*) = 5.8; A = -1: min(-.5, -.8*), -.9,
    min(-1.5, -1.3) = -3.2. Starred ones are clipped and have no gradient; elsewhere dL/dlogp = -r A."""
    old = np.array([-1.0, -2.0, -0.5, -3.0, -1.0, -0.1])
    view, leaves = look([3, 3], {"logp": old + np.log(RATIOS)}, weight=np.ones(6), advantage=A, old=old)
    out = terms(Clipped(low=0.2, high=0.3), view)
    assert out["policy"].sum.item() == pytest.approx(-(5.8 - 3.2), abs=1e-14)
    assert out["clip_fraction"].sum.item() == 2 and out["clip_fraction"].coef == 0
    assert out["ratio"].sum.item() == pytest.approx(6.0, abs=1e-14)
    assert out["kl_old"].sum.item() == pytest.approx(float((RATIOS - 1 - np.log(RATIOS)).sum()), abs=1e-14)
    (g,) = torch.autograd.grad(out["policy"].sum, leaves["logp"])
    assert g.tolist() == pytest.approx([-1.0, -2.2, 0.0, 0.0, 0.9, 1.5], abs=1e-14)
    assert g[2] == 0 and g[3] == 0


def test_clipped_weights_multiply_and_zero_weight_is_out():
    weight = np.array([0.5, 0.0, 3.0, 1.0, 0.25, 0.0])
    view, leaves = look([3, 3], {"logp": np.log(RATIOS)}, weight=weight, advantage=A, old=np.zeros(6))
    out = terms(Clipped(low=0.2, high=0.3), view)
    assert out["policy"].sum.item() == pytest.approx(-(0.5 * 1 + 3 * 2.6 - 0.8 - 0.25 * 0.9), abs=1e-14)
    assert out["clip_fraction"].sum.item() == 4
    (g,) = torch.autograd.grad(out["policy"].sum, leaves["logp"])
    assert g.tolist() == pytest.approx([-0.5, 0, 0, 0, 0.225, 0], abs=1e-14)


def test_sequence_ratio():
    """One ratio a row: the geometric mean over trained tokens. Row 0: (.5 * 1.1 * 1.5)^(1/3) = 0.9379, inside. Row 1
    has an untrained token: (.5 * .9)^(1/2) = 0.6708, clipped at 0.8 for A = -1."""
    weight = np.array([1.0, 1, 1, 1, 1, 0])
    view, leaves = look([3, 3], {"logp": np.log(RATIOS)}, weight=weight, advantage=A, old=np.zeros(6))
    out = terms(Clipped(low=0.2, high=0.3, ratio="sequence"), view)
    s = 0.825 ** (1 / 3)
    assert s == pytest.approx(0.9379, abs=1e-4)
    assert out["policy"].sum.item() == pytest.approx(-(3 * 2 * s - 2 * 0.8), abs=1e-14)
    assert out["ratio"].sum.item() == pytest.approx(3 * s + 2 * math.sqrt(0.45), abs=1e-14)
    (g,) = torch.autograd.grad(out["policy"].sum, leaves["logp"])  # d/dlogp_t of -3 * 2 * s = -6 s / 3
    assert g.tolist() == pytest.approx([-2 * s] * 3 + [0, 0, 0], abs=1e-14)


def test_clipped_entropy_and_penalty_are_terms_of_their_own():
    read = {"logp": np.log(RATIOS), "entropy": np.arange(6.0)}
    view, _ = look([3, 3], read, weight=np.full(6, 0.5), advantage=A, old=np.zeros(6), ref=np.zeros(6))
    out = terms(Clipped(entropy=0.01, beta=0.3, kl="k1"), view)
    assert (out["entropy"].sum.item(), out["entropy"].coef) == (7.5, -0.01)
    assert out["kl"].sum.item() == pytest.approx(0.5 * float(np.log(RATIOS).sum()), abs=1e-14) and out["kl"].coef == 0.3
    assert [r.name for r in Clipped(entropy=0.01, beta=0.3, kl="exact").readouts()] == ["logp", "entropy", "exact_kl"]


def test_reports_are_means_and_losses_are_divided_by_the_mass():
    """Four tokens of weight 1/10, mass 1 a row: the reported ratio is the mean ratio, the loss is the sum / 2."""
    logp = math.log(1 / 4)  # uniform over four
    old = np.array([0, logp, logp - math.log(2)])
    streams = {"weight": np.array([0, 0.1, 0.1]), "advantage": np.ones(3), "old": old}
    samples = [Sample(np.zeros(3, int), streams, {"weight": 1.0}) for _ in range(2)]
    got = Learner({"policy": TabularLM([], 4)}, LearnerConfig()).gradient(samples, Clipped(high=0.5))
    assert got["ratio"] == pytest.approx(1.5, abs=1e-14) and got["clip_fraction"] == pytest.approx(0.5, abs=1e-15)
    assert got["kl_old"] == pytest.approx((1 - math.log(2)) / 2, abs=1e-14)
    assert got["policy"] == pytest.approx(-0.1 * (1 + 1.5), abs=1e-14)


# --- weighted_logp ------------------------------------------------------------------------------------------------

VOCAB = 5
LAWS = (SamplingLaw(), SamplingLaw(temperature=0.7, allowed=(0, 1, 3)))


def random_samples(seed=4):
    draw = np.random.default_rng(seed)
    out = []
    for n in (3, 4, 5):
        law = draw.integers(-1, 2, n)
        tokens = np.where(law == 1, draw.choice([0, 1, 3], n), draw.integers(0, VOCAB, n))
        weight = draw.random(n) * (draw.random(n) < 0.8) * (np.arange(n) > 0)
        streams = {"weight": weight, "advantage": draw.normal(size=n), "law": law}
        out.append(Sample(tokens, streams, {"weight": float(n)}, LAWS))
    return out


def loss_by_loop(table, rows, samples, coef, use_law):
    total, bonus = 0.0, 0.0
    for s in samples:
        for t in range(1, len(s.tokens)):
            z = table[rows.get(tuple(s.tokens[:t].tolist()), len(table) - 1)]
            if use_law and s.streams["law"][t] == 1:
                z = np.where(np.isin(np.arange(VOCAB), LAWS[1].allowed), z / 0.7, -np.inf)
            p = np.exp(z - z.max())
            p /= p.sum()
            w = s.streams["weight"][t]
            total -= w * s.streams["advantage"][t] * math.log(p[s.tokens[t]]) if w else 0.0
            bonus -= w * float((p[p > 0] * np.log(p[p > 0])).sum())
    mass = sum(s.mass["weight"] for s in samples)
    return total / mass, bonus / mass, (total - coef * bonus) / mass


@pytest.mark.parametrize("use_law", [True, False])
@pytest.mark.parametrize("coef", [0.0, 0.3])
def test_weighted_logp_with_entropy(coef, use_law):
    samples = random_samples()
    prefixes = sorted({tuple(s.tokens[:t].tolist()) for s in samples for t in range(1, len(s.tokens))})[:-1]
    lm = TabularLM(prefixes, VOCAB)
    table = np.random.default_rng(5).normal(size=(lm.width, VOCAB))
    with torch.no_grad():
        lm.model.logits.copy_(torch.as_tensor(table))
    got = Learner({"policy": lm}, LearnerConfig()).gradient(samples, WeightedLogp(entropy=coef, law=use_law))
    policy, bonus, loss = loss_by_loop(table, lm.row, samples, coef, use_law)
    assert got["policy"] == pytest.approx(policy, abs=1e-14) and got["loss"] == pytest.approx(loss, abs=1e-14)
    assert ("entropy" in got) == bool(coef) and got.get("entropy", bonus) == pytest.approx(bonus, abs=1e-14)
    want, h = np.zeros_like(table), 1e-5
    for at in np.ndindex(*table.shape):
        up, down = table.copy(), table.copy()
        up[at] += h
        down[at] -= h
        ends = [loss_by_loop(x, lm.row, samples, coef, use_law)[2] for x in (up, down)]
        want[at] = (ends[0] - ends[1]) / (2 * h)
    np.testing.assert_allclose(lm.model.logits.grad.numpy(), want, atol=1e-9)
    assert np.abs(want).max() > 0.01


# --- value, classify ----------------------------------------------------------------------------------------------


def test_value_with_and_without_clip():
    """V = 1, 2, .5, 1.4 against G = .5, .5, .5, 2 with old .8, 1, .9, 1 and clip .3: clipped V = 1, 1.3, .6, 1.3.
    Squares .25, 2.25, 0, .36 and clipped .25, .64, .01*, .49*; where the clipped one (*) counts, no gradient."""
    v, goal, old = [1.0, 2.0, 0.5, 1.4], np.array([0.5, 0.5, 0.5, 2.0]), np.array([0.8, 1.0, 0.9, 1.0])
    w = np.array([1.0, 2.0, 10.0, 0.5])
    view, leaves = look([2, 2], {"value": v}, value_weight=w, returns=goal, old_value=old)
    (plain,) = Value(scale=0.5).terms(view)
    assert plain.sum.item() == pytest.approx(0.25 + 4.5 + 0 + 0.18, abs=1e-14)
    assert (plain.coef, plain.weight) == (0.5, "value_weight")
    (g,) = torch.autograd.grad(plain.sum, leaves["value"])
    assert g.tolist() == pytest.approx([1.0, 6.0, 0.0, -0.6], abs=1e-14)  # 2 w (V - G)
    (clipped,) = Value(clip=0.3).terms(view)
    assert clipped.sum.item() == pytest.approx(0.25 + 4.5 + 0.1 + 0.245, abs=1e-14)
    (g,) = torch.autograd.grad(clipped.sum, leaves["value"])
    assert g.tolist() == pytest.approx([1.0, 6.0, 0.0, 0.0], abs=1e-14)


def test_value_is_read_before_the_token():
    """V(s_t) belongs to the state in which token t was chosen: row 0 of the head is prefix (7,), row 1 is (7, 1)."""
    lm = TabularLM([(7,), (7, 1)], 8)
    with torch.no_grad():
        lm.add_head("value").weight.copy_(torch.tensor([[0.25, 2.0, -5.0]]))
    streams = {"value_weight": np.array([0.0, 1.0, 1.0]), "returns": np.array([0, 1.0, 1.0])}
    sample = Sample(np.array([7, 1, 3]), streams, {"value_weight": 2.0})
    got = Learner({"critic": lm}, LearnerConfig(), trains={}).gradient([sample], Value())
    assert got["value"] == pytest.approx((0.75**2 + 1) / 2, abs=1e-15)
    assert lm.heads["value"].weight.grad.tolist() == [[-0.75, 1.0, 0.0]]


def test_classify():
    logits = np.array([[0.0, 1.0, 2.0], [1.0, 1.5, -1.0], [3.0, 0.0, 0.0], [0.5, 0.5, 0.4]])
    w, label = np.array([1.0, 2.0, 0.0, 0.5]), np.array([2, 0, 1, 1])
    view, leaves = look([1, 3], {"classes": logits}, class_weight=w, label=label)
    out = terms(Classify(), view)
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    want = float(-(w * np.log(p[np.arange(4), label])).sum())
    assert out["cross_entropy"].sum.item() == pytest.approx(want, abs=1e-14)
    assert out["accuracy"].sum.item() == 1.0  # 1 and 3 (a tie goes to the first class) are wrong, 2 has no weight
    (g,) = torch.autograd.grad(out["cross_entropy"].sum, leaves["classes"])
    np.testing.assert_allclose(g.numpy(), w[:, None] * (p - np.eye(3)[label]), atol=1e-15)


# --- pairwise -----------------------------------------------------------------------------------------------------

PAIRS = [("x", "chosen"), ("y", "rejected"), ("x", "rejected"), ("y", "chosen")]


def pairs_view():
    """Pair x: chosen -1 - (-2) = 1 (an untrained token aside), rejected -.5 - 3 * .25 = -1.25: h = 2.25.
    Pair y: chosen -2, rejected .5: h = -2.5."""
    logp = [-1.0, -9.0, -0.5, -1.0, -0.25, -3.0]
    ref = np.array([-2.0, 5.0, -1.0, -0.5, 0.0, -1.0])
    weight = np.array([1.0, 0.0, 1.0, 1.0, 3.0, 1.0])
    return look([2, 1, 2, 1], {"logp": logp}, PAIRS, weight=weight, ref=ref)


def sigma(x):
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("smooth", [0.0, 0.2])
def test_pairwise_sigmoid(smooth):
    view, leaves = pairs_view()
    b = 0.4
    out = terms(Pairwise(beta=b, smooth=smooth), view)
    each = [-(1 - smooth) * math.log(sigma(b * h)) - smooth * math.log(sigma(-b * h)) for h in (2.25, -2.5)]
    assert out["pair"].sum.item() == pytest.approx(sum(each), abs=1e-14)
    assert out["accuracy"].sum.item() == 1
    assert out["chosen_reward"].sum.item() == pytest.approx(b * (1 - 2), abs=1e-14)
    assert out["rejected_reward"].sum.item() == pytest.approx(b * (-1.25 + 0.5), abs=1e-14)
    (g,) = torch.autograd.grad(out["pair"].sum, leaves["logp"])
    x, y = (b * (smooth * sigma(b * h) - (1 - smooth) * sigma(-b * h)) for h in (2.25, -2.5))  # dL/dh
    assert g.tolist() == pytest.approx([x, 0, -y, -x, -3 * x, y], abs=1e-14)


def test_pairwise_hinge_and_ipo():
    view, leaves = pairs_view()
    hinge = terms(Pairwise(loss="hinge", beta=0.8), view)["pair"].sum  # 1 - 1.8 < 0 is 0; 1 + 2 = 3
    assert hinge.item() == pytest.approx(3.0, abs=1e-14)
    (g,) = torch.autograd.grad(hinge, leaves["logp"])
    assert g.tolist() == pytest.approx([0, 0, 0.8, 0, 0, -0.8], abs=1e-14)
    ipo = terms(Pairwise(loss="ipo", beta=0.25), view)["pair"].sum  # (2.25 - 2)^2 + (-2.5 - 2)^2
    assert ipo.item() == pytest.approx(0.0625 + 20.25, abs=1e-14)
    (g,) = torch.autograd.grad(ipo, leaves["logp"])
    assert g.tolist() == pytest.approx([0.5, 0, 9.0, -0.5, -1.5, -9.0], abs=1e-14)


def test_pairwise_without_reference():
    view, _ = pairs_view()  # h_x = -1 - (-1.75) = .75, h_y = -3 + .5 = -2.5
    out = terms(Pairwise(loss="ipo", beta=0.5, reference_free=True), view)
    assert out["pair"].sum.item() == pytest.approx(0.25**2 + 3.5**2, abs=1e-14)


# --- soft_bellman -------------------------------------------------------------------------------------------------


def test_tail_sums_against_a_loop():
    draw = np.random.default_rng(6)
    for lengths in ([1], [4], [1, 1, 1], [3, 1, 7, 2], draw.integers(1, 30, 40).tolist()):
        x = draw.normal(size=sum(lengths))
        row = np.repeat(np.arange(len(lengths)), lengths)
        want = [x[(row == row[t]) & (np.arange(len(x)) >= t)].sum() for t in range(len(x))]
        np.testing.assert_allclose(tail_sums(torch.tensor(x), torch.tensor(row)).numpy(), want, atol=1e-12)


def bellman_view(seed=7):
    draw = np.random.default_rng(seed)
    lengths = [4, 2, 6]
    n = sum(lengths)
    weight = np.where(draw.random(n) < 0.7, draw.random(n) + 0.1, 0.0)
    data = {"ref": draw.normal(size=n), "value": draw.normal(size=n), "reward": np.repeat(draw.normal(size=3), lengths)}
    return lengths, draw.normal(size=n), weight, data


def test_soft_bellman_gradient_of_a_token_is_its_own_residual():
    """dL/dlogp_i = 2 w_i beta e_i, and nothing of the residuals before it; observation tokens are no actions."""
    beta = 0.3
    lengths, logp, w, data = bellman_view()
    view, leaves = look(lengths, {"logp": logp}, weight=w, **data)
    term = terms(SoftBellman(beta=beta), view)["policy"]
    row, at = np.repeat(np.arange(3), lengths), np.arange(len(w))
    ratio = np.where(w > 0, logp - data["ref"], 0.0)
    tail = np.array([ratio[(row == row[t]) & (at >= t)].sum() for t in at])
    e = np.where(w > 0, data["value"] - data["reward"] + beta * tail, 0.0)
    assert term.sum.item() == pytest.approx(float((w * e**2).sum()), abs=1e-13)
    (g,) = torch.autograd.grad(term.sum, leaves["logp"])
    np.testing.assert_allclose(g.numpy(), 2 * w * beta * e, atol=1e-13)
    through = np.array([2 * beta * (w * e)[(row == row[t]) & (at <= t)].sum() for t in at])  # if later l carried it too
    assert np.abs(g.numpy() - through)[w > 0].max() > 0.1


def test_soft_bellman_value_carries_the_gradient():
    lengths, logp, w, data = bellman_view()
    value = data.pop("value")
    view, leaves = look(lengths, {"value": value}, weight=w, policy_logp=logp, **data)
    term = terms(SoftBellman(part="value", beta=0.3), view)["value"]
    (g,) = torch.autograd.grad(term.sum, leaves["value"])
    row, at = np.repeat(np.arange(3), lengths), np.arange(len(w))
    ratio = np.where(w > 0, logp - data["ref"], 0.0)
    tail = np.array([ratio[(row == row[t]) & (at >= t)].sum() for t in at])
    np.testing.assert_allclose(g.numpy(), 2 * w * (value - data["reward"] + 0.3 * tail), atol=1e-13)


def play(name, tokens, reward):
    return Episode(name, Task(name), "g", (Turn("policy", (9,), tokens),), {"self": Scored(reward)})


@pytest.mark.parametrize("shift", [0.0, 0.4])
def test_soft_bellman_value_regresses_on_the_return(shift):
    """With pi = ref every l is 0, and the best table is the mean R of the plays that pass a prefix; if every l is
    `shift` it is the mean of R - beta * shift * (tokens to come). Found by gradient descent."""
    draw = np.random.default_rng(8)
    beta = 0.5
    plays = [play(f"e{k}", tuple(draw.integers(0, 2, draw.integers(1, 4)).tolist()), draw.normal()) for k in range(12)]
    values = {"reward": {e.id: [e.outcome.reward] for e in plays}, "ref": {e.id: [-1.0] for e in plays}}
    values["policy_logp"] = {e.id: [-1.0 + shift] for e in plays}
    samples = build_samples(plays, "policy", values)
    goals: dict[tuple[int, ...], list[float]] = {}
    for e in plays:
        tokens = e.turns[0].tokens
        for t in range(len(tokens)):
            goals.setdefault((9, *tokens[:t]), []).append(e.outcome.reward - beta * shift * (len(tokens) - t))
    critic = TabularLM(list(goals), 10)
    head = critic.add_head("value")
    learner = Learner({"critic": critic}, LearnerConfig(layout="tree"), trains={})
    total = sum(len(x) for x in goals.values())
    for _ in range(60):
        head.weight.grad = None
        learner.gradient(samples, SoftBellman(part="value", beta=beta))
        with torch.no_grad():  # the Hessian is diagonal, 2 * visits / mass; half a Newton step halves the error
            for prefix, x in goals.items():
                r = critic.row[prefix]
                head.weight[0, r] -= 0.5 * head.weight.grad[0, r] * total / (2 * len(x))
    for prefix, x in goals.items():
        assert head.weight[0, critic.row[prefix]].item() == pytest.approx(np.mean(x), abs=1e-12)
    assert len(goals) > 5 and max(map(len, goals.values())) == 12


# --- means are data -----------------------------------------------------------------------------------------------


def random_episode(draw, name):
    """A few turns of two seats in one or two chains, with observations, forced tokens and a turn that wrote nothing."""
    turns, last = [], {}
    for _ in range(draw.integers(2, 8)):
        seat = str(draw.choice(["policy", "policy", "other"]))
        size = int(draw.integers(0, 5)) if draw.random() < 0.3 else int(draw.integers(1, 6))
        old = last.get(seat)
        begins = old is None or draw.random() < 0.3
        prompt = tuple(draw.integers(0, 9, draw.integers(1, 4)).tolist())
        forced = tuple(draw.integers(0, 9, draw.integers(0, 3)).tolist())
        tokens = tuple(draw.integers(0, 9, size).tolist())
        logq = tuple(draw.normal(size=size).tolist())
        turns.append(Turn(seat, prompt, tokens, logq=logq, forced=forced, continues=None if begins else old))
        last[seat] = len(turns) - 1
    turns.append(Turn("policy", (1,), (2, 3), logq=(-0.5, -0.25)))
    return Episode(name, Task(name), "g", tuple(turns), {"self": Scored(0.0)})


@pytest.mark.parametrize("mean", ["token", "sequence", "turn", "constant", "decision"])
def test_means_against_loops(mean):
    draw = np.random.default_rng(9)
    episodes = [random_episode(draw, f"e{k}") for k in range(25)]
    f = {e.id: [draw.normal(size=len(t.tokens)) for t in e.turns if t.seat == "policy" and t.tokens] for e in episodes}
    samples = build_samples(episodes, "policy", {"f": f}, mean=mean, length=17)
    got = sum((s.streams["weight"] * s.streams["f"]).sum() for s in samples) / sum(s.mass["weight"] for s in samples)
    every = [x for turns in f.values() for turn in turns for x in turn]
    want = {
        "token": np.mean(every),
        "sequence": np.mean([np.mean(np.concatenate(turns)) for turns in f.values()]),
        "turn": np.mean([np.mean([np.mean(turn) for turn in turns]) for turns in f.values()]),
        "constant": np.sum(every) / 17 / len(f),
        "decision": np.mean([np.mean(turn) for turns in f.values() for turn in turns]),
    }
    assert got == pytest.approx(want[mean], abs=1e-14)
    assert len({round(x, 6) for x in want.values()}) == 5  # the five means differ here
    assert len(samples) > len(episodes)  # some episodes are several sequences


def test_samples_hold_what_was_written_and_by_whom():
    draw = np.random.default_rng(10)
    for e in [random_episode(draw, f"e{k}") for k in range(25)]:
        seen = []
        for s in build_samples([e], "policy"):
            on = np.nonzero(s.streams["weight"])[0]
            for k in dict.fromkeys(s.streams["turn"][on].tolist()):
                turn = [t for t in e.turns if t.seat == "policy" and t.tokens][k]
                mine = np.nonzero(s.streams["turn"] == k)[0]
                i = e.turns.index(turn)
                start = len(e.context(i)) + len(turn.forced)
                assert mine.tolist() == list(range(start, start + len(turn.tokens)))
                assert tuple(s.tokens[: mine[-1] + 1].tolist()) == e.sequence(i)
                assert s.streams["old"][mine].tolist() == list(turn.logq)
                assert s.streams["written"][mine].tolist() == list(range(len(turn.tokens)))
                seen.append(k)
            off = s.streams["weight"] == 0
            assert (s.streams["turn"][off] == -1).all() and (s.streams["law"][off] == -1).all()
        assert sorted(seen) == list(range(len(seen)))  # every turn once


# --- what does not count, and the sentences -------------------------------------------------------------------------


def test_failed_and_invalid_never_enter():
    turns = (Turn("policy", (1,), (2,)),)
    outcomes = [Scored(1.0), Failed("world: broken"), Scored(0.0), Invalid("unreadable"), Failed("engine: gone")]
    episodes = [Episode(f"e{k}", Task("t"), "g", turns, {"self": o}) for k, o in enumerate(outcomes)]
    kept, dropped = scored(episodes)
    assert [e.id for e in kept] == ["e0", "e2"] and dropped == {"invalid": 1, "failed": 2}
    assert {s.episode for s in build_samples(kept, "policy")} == {"e0", "e2"}
    two = [Episode("x", Task("t"), "g", turns, {"a": Scored(1.0), "b": Failed("judge")})]
    assert scored(two)[0] == two and scored(two, "b") == ([], {"invalid": 0, "failed": 1})


def one(**streams):
    n = 3
    arrays = {"weight": np.array([0.0, 1.0, 1.0]), **{k: np.asarray(v) for k, v in streams.items()}}
    return Sample(np.zeros(n, int), arrays, {"weight": 2.0})


def run(objective, *samples, **models):
    lm = TabularLM([], 4)
    return Learner({"policy": lm, **models}, LearnerConfig()).gradient(samples, objective)


def test_missing_streams_are_named():
    with pytest.raises(LearnError, match=r"needs 'advantage', which the samples do not have \(streams: law, weight\)"):
        run(WeightedLogp(), one())
    with pytest.raises(LearnError, match="needs 'old'"):
        run(Clipped(), one(advantage=np.ones(3)))
    with pytest.raises(LearnError, match="needs 'ref'"):
        run(Clipped(beta=0.1), one(advantage=np.ones(3), old=np.zeros(3)))
    with pytest.raises(LearnError, match="'value' is wanted where 'value_weight' is not 0, but the samples have no"):
        run(Value(model="policy"), one())


def test_a_missing_model_is_named():
    with pytest.raises(LearnError, match="reads model 'critic', but this run has only: policy"):
        Learner({"policy": TabularLM([], 4)}, LearnerConfig()).fill([one()], v=Readout("", "head", model="critic"))


def test_mass_zero_and_not_a_number():
    empty = Sample(np.zeros(3, int), {"weight": np.zeros(3), "advantage": np.zeros(3)}, {"weight": 0.0})
    with pytest.raises(LearnError, match="'policy' has nothing to train on: the mass of 'weight' over the batch is 0"):
        run(WeightedLogp(), empty)
    with pytest.raises(LearnError, match="term 'policy' of weighted_logp is nan"):
        run(WeightedLogp(), one(advantage=[0.0, np.nan, 1.0]))


def test_a_first_token_cannot_be_trained():
    with pytest.raises(LearnError, match="'weight' is not 0 on the first token of a sample"):
        run(WeightedLogp(), one(weight=np.ones(3), advantage=np.ones(3)))
    e = Episode("e6", Task("t"), "g", (Turn("policy", (), (2, 3)),), {"self": Scored(1.0)})
    with pytest.raises(LearnError, match="episode 'e6': turn 0 has no prompt"):
        build_samples([e], "policy")


def test_wrong_pairs():
    a, b = pair(one(ref=np.zeros(3)), one(ref=np.zeros(3)), "p7")
    assert run(Pairwise(), a, b)["pair"] == pytest.approx(math.log(2))
    with pytest.raises(LearnError, match=r"pair 'p7' has .*chosen.*: a pair is one 'chosen' and one 'rejected'"):
        run(Pairwise(), a)
    with pytest.raises(LearnError, match="pair 'p7' has"):
        run(Pairwise(), a, a)
    with pytest.raises(LearnError, match="a pair is one 'chosen' and one 'rejected'"):
        run(Pairwise(), one(ref=np.zeros(3)))


def test_a_pair_of_three_is_refused():
    """A third row would be dropped without a word, and its mass would halve the loss of the pair."""
    a, b = pair(one(ref=np.zeros(3)), one(ref=np.zeros(3)), "p7")
    with pytest.raises(LearnError, match="pair 'p7'"):
        run(Pairwise(), a, a, b)


def test_wrong_numbers_per_turn():
    turns = Turn("policy", (1,), (2, 3)), Turn("policy", (1,), (2,))
    e = Episode("e5", Task("t"), "g", turns, {"self": Scored(1.0)})
    with pytest.raises(LearnError, match="episode 'e5': 'advantage' must have one entry for each of the 2 turns"):
        build_samples([e], "policy", {"advantage": {"e5": [1.0]}})
    with pytest.raises(LearnError, match="episode 'e5': 'advantage' must have one entry"):
        build_samples([e], "policy", {"advantage": {}})
    with pytest.raises(LearnError, match="a sequence of 3 tokens is longer than the model's 2"):
        build_samples([e], "policy", max_len=2)
    with pytest.raises(ValueError, match=r"stream 'x' of sample 'e' has shape \(2,\), not \(3,\)"):
        Sample(np.zeros(3, int), {"x": np.zeros(2)}, episode="e")
    assert build_samples([e], "nobody") == []
