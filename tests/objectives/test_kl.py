"""KL: the table of `objectives/kl.py` by enumeration over six tokens, and the exact readout against closed forms."""

import numpy as np
import pytest
import torch
from tabular import TabularLM

from trailmark.config import LearnerConfig
from trailmark.errors import LearnError, RecipeError
from trailmark.learn.learner import Learner
from trailmark.models import forward
from trailmark.models.readout import Readout
from trailmark.objectives.base import Objective, Term
from trailmark.objectives.clipped import Clipped
from trailmark.objectives.kl import kl
from trailmark.types import Sample, SamplingLaw

VOCAB = 6
rng = np.random.default_rng(11)
Z, U, OLD = (rng.normal(size=VOCAB) for _ in range(3))  # logits of the policy p, the reference q, an older policy
NAMES = ["k1", "k2", "k3", "k3_weighted"]


def softmax(z):
    e = np.exp(z - z.max())
    return e / e.sum()


def exact(p, q):
    """KL(p || q); a token without mass under p counts 0."""
    on = p > 0
    return float((p[on] * (np.log(p[on]) - np.log(q[on]))).sum())


def gradients(z, u):
    """d KL(p||q) / dz_i = p_i (log(p_i / q_i) - KL(p||q));   d KL(q||p) / dz_i = p_i - q_i."""
    p, q = softmax(z), softmax(u)
    return p * (np.log(p / q) - exact(p, q)), p - q


def differences(f, z, h=1e-6):
    return np.array([(f(z + h * e) - f(z - h * e)) / (2 * h) for e in np.eye(len(z))])


def expected(name, z=Z, u=U, drawn=None, old=False):
    """E[value] and E[gradient in the policy's logits] over tokens drawn from `drawn` (the policy itself when None)."""
    logits = torch.tensor(z, requires_grad=True)
    logp = logits.log_softmax(-1)
    d = torch.tensor(softmax(z if drawn is None else drawn))
    value = (d * kl(name, logp, torch.tensor(u).log_softmax(-1), d.log() if old else None)).sum()
    (g,) = torch.autograd.grad(value, logits)
    return float(value.detach()), g.numpy()


def test_closed_forms_are_the_derivatives():
    forward_kl, backward_kl = gradients(Z, U)
    q = softmax(U)
    np.testing.assert_allclose(differences(lambda z: exact(softmax(z), q), Z), forward_kl, atol=1e-9)
    np.testing.assert_allclose(differences(lambda z: exact(q, softmax(z)), Z), backward_kl, atol=1e-9)
    assert np.abs(forward_kl - backward_kl).max() > 0.05  # the two directions can be told apart here


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_table_on_policy(name, old):
    """Every row of the docstring; giving the policy itself as `old` changes nothing."""
    p, q = softmax(Z), softmax(U)
    true = exact(p, q)
    same, other = gradients(Z, U)
    value, g = expected(name, old=old)
    want = {"k1": np.zeros(VOCAB), "k2": same, "k3": other, "k3_weighted": same}[name]
    np.testing.assert_allclose(g, want, atol=1e-14)
    if name == "k2":
        assert value == pytest.approx(0.5 * float((p * np.log(q / p) ** 2).sum()), abs=1e-14)
        assert abs(value - true) > 0.03
    else:
        assert value == pytest.approx(true, abs=1e-14)


def test_off_policy_only_the_weighted_one_is_right():
    """Tokens from p_old: r = p / p_old turns the mean into one under p, in value and in gradient."""
    p, q, o = softmax(Z), softmax(U), softmax(OLD)
    value, g = expected("k3_weighted", drawn=OLD, old=True)
    assert value == pytest.approx(exact(p, q), abs=1e-14)
    np.testing.assert_allclose(g, gradients(Z, U)[0], atol=1e-14)
    plain = {
        "k1": float((o * np.log(p / q)).sum()),
        "k2": float((o * np.log(p / q) ** 2).sum() / 2),
        "k3": float((o * (q / p - 1 - np.log(q / p))).sum()),
    }
    for name, want in plain.items():
        value, _ = expected(name, drawn=OLD, old=True)
        assert value == pytest.approx(want, abs=1e-14) and abs(value - exact(p, q)) > 0.02, name
    # A gradient that is not there on average off policy either way: k1's mean gradient is o - p, not 0.
    np.testing.assert_allclose(expected("k1", drawn=OLD)[1], o - p, atol=1e-14)


@pytest.mark.parametrize("name", NAMES)
def test_zero_at_the_reference(name):
    value, g = expected(name, z=U)
    assert value == 0 and np.abs(g).max() < 1e-16


def test_single_token_values_by_hand():
    """logp = ln .5, ref = ln .25: d = -ln 2, so k3 = .5 - 1 + ln 2; drawn with ln .25, the weighted is twice that."""
    ln2 = np.log(2.0)
    args = [torch.tensor(np.log(x)) for x in (0.5, 0.25, 0.25)]
    want = {"k1": ln2, "k2": ln2**2 / 2, "k3": ln2 - 0.5, "k3_weighted": 2 * (ln2 - 0.5)}
    for name, x in want.items():
        assert float(kl(name, *args)) == pytest.approx(x, abs=1e-15), name


def test_unknown_estimator():
    with pytest.raises(RecipeError, match=r"unknown KL estimator 'k4'\. Did you mean 'k[123]'\?"):
        kl("k4", torch.zeros(1), torch.zeros(1))


# --- through the learner ------------------------------------------------------------------------------------------

LAWS = {
    "plain": SamplingLaw(),
    "allowed": SamplingLaw(allowed=(1, 2, 4, 5)),
    "tempered": SamplingLaw(temperature=0.6, allowed=(0, 2, 3)),
    "late stop": SamplingLaw(min_tokens=1, stop_ids=(5,)),
}
STATES = [(0,), (0, 1), (0, 2), (0, 2, 4), (0, 2, 2)]


class ExactKL(Objective):
    kind: str = "exact_kl"
    reverse: bool = True
    law: bool = True
    to: str = "ref"

    def readouts(self):
        return [Readout("kl", "kl", to=self.to, reverse=self.reverse, law=self.law)]

    def terms(self, view):
        return [Term("kl", (view["weight"] * view["kl"]).sum())]


def under(law, z, written):
    """The law's distribution, by the words of its docstring."""
    keep = np.ones(VOCAB, bool) if law.allowed is None else np.isin(np.arange(VOCAB), law.allowed)
    if written < law.min_tokens:
        keep &= ~np.isin(np.arange(VOCAB), law.stop_ids)
    return softmax(np.where(keep, z / law.temperature, -np.inf))


def tables(seed=2):
    draw = np.random.default_rng(seed)
    out = []
    for _ in range(2):
        lm = TabularLM(STATES, VOCAB)
        with torch.no_grad():
            lm.model.logits.copy_(torch.as_tensor(draw.normal(size=lm.model.logits.shape)))
        out.append(lm)
    return out


def rows(law):
    out = []
    heavy = [((0, 1, 3), (0, 0.5, 2)), ((0, 2, 4, 1), (0, 1, 0, 3)), ((0, 2, 2, 5), (0, 1, 1, 0.25)), ((0, 4), (0, 7))]
    for tokens, weight in heavy:
        n = len(tokens)
        law_at, written = np.array([-1] + [0] * (n - 1)), np.maximum(np.arange(n) - 1, 0)
        streams = {"weight": np.array(weight, float), "law": law_at, "written": written}
        out.append(Sample(np.array(tokens), streams, {"weight": float(n)}, (law,)))
    return out


def by_hand(policy, ref, samples, law, reverse, use_law):
    mass = sum(s.mass["weight"] for s in samples)
    a, b = (lm.model.logits.detach().numpy() for lm in (policy, ref))
    value, g = 0.0, np.zeros_like(a)
    for s in samples:
        for t in range(1, len(s.tokens)):
            row = policy.row.get(tuple(s.tokens[:t].tolist()), policy.width - 1)
            here, written = law if use_law else SamplingLaw(), int(s.streams["written"][t])
            p, q = under(here, a[row], written), under(here, b[row], written)
            w = s.streams["weight"][t] / mass
            value += w * (exact(p, q) if reverse else exact(q, p))
            with np.errstate(divide="ignore", invalid="ignore"):
                each = np.where(p > 0, p * (np.log(p / q) - exact(p, q)), 0.0) if reverse else p - q
            g[row] += w * each / here.temperature
    return value, g


@pytest.mark.parametrize("chunk", [1024, 3])
@pytest.mark.parametrize("use_law", [True, False])
@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("law", LAWS)
def test_exact_readout(law, reverse, use_law, chunk, monkeypatch):
    monkeypatch.setattr(forward, "CHUNK", chunk)
    samples = rows(LAWS[law])
    for layout, budget in [("rows", 1), ("tree", 10_000), ("flat", 8)]:
        policy, ref = tables()
        learner = Learner({"policy": policy, "ref": ref}, LearnerConfig(micro_tokens=budget, layout=layout))
        terms = learner.gradient(samples, ExactKL(reverse=reverse, law=use_law))
        value, g = by_hand(policy, ref, samples, LAWS[law], reverse, use_law)
        assert terms["kl"] == pytest.approx(value, abs=1e-13) and value > 0.1
        np.testing.assert_allclose(policy.model.logits.grad.numpy(), g, atol=1e-13)


def test_the_reference_gets_no_gradient():
    policy, ref = tables()
    Learner({"policy": policy, "ref": ref}, LearnerConfig()).gradient(rows(LAWS["plain"]), ExactKL())
    assert ref.model.logits.grad is None or not ref.model.logits.grad.any()


def test_filled_and_chunked_are_equal(monkeypatch):
    """`fill` writes the same numbers, one per token with weight and 0 elsewhere, whatever the chunk."""
    policy, ref = tables()
    samples = rows(LAWS["tempered"])
    learner = Learner({"policy": policy, "ref": ref}, LearnerConfig())
    whole = learner.fill(samples, there=Readout("", "kl"), back=Readout("", "kl", reverse=False))
    monkeypatch.setattr(forward, "CHUNK", 3)
    parts = learner.fill(samples, there=Readout("", "kl"), back=Readout("", "kl", reverse=False))
    for s, a, b in zip(samples, whole, parts):
        for name, reverse in (("there", True), ("back", False)):
            np.testing.assert_allclose(a.streams[name], b.streams[name], rtol=0, atol=1e-15)
            for t in range(len(s.tokens)):
                want = 0.0
                if s.streams["weight"][t]:
                    one = np.eye(len(s.tokens))[t]
                    single = Sample(s.tokens, {**s.streams, "weight": one}, {"weight": 1.0}, s.laws)
                    want, _ = by_hand(policy, ref, [single], LAWS["tempered"], reverse, True)
                assert a.streams[name][t] == pytest.approx(want, abs=1e-14)


def test_kl_to_itself_is_exactly_zero():
    policy, _ = tables()
    learner = Learner({"policy": policy, "ref": policy}, LearnerConfig())
    assert all((s.streams["kl"] == 0).all() for s in learner.fill(rows(LAWS["tempered"]), kl=Readout("", "kl")))


def test_a_missing_reference_is_named():
    policy, _ = tables()
    with pytest.raises(LearnError, match="reads model 'teacher', but this run has only: policy"):
        Learner({"policy": policy}, LearnerConfig()).gradient(rows(LAWS["plain"]), ExactKL(to="teacher"))


@pytest.mark.parametrize("law", ["plain", "tempered"])
@pytest.mark.parametrize("name", [*NAMES, "exact"])
def test_the_penalty_of_clipped(name, law):
    """All tokens of one state, each weighted with its probability, advantage 0: the batch is the expectation, and the
    gradient is the table's, under the sampling law."""
    policy, ref = tables()
    row, rule = policy.row[(0,)], LAWS[law]
    z, u = (lm.model.logits[row].detach().numpy().copy() for lm in (policy, ref))
    p, q = under(rule, z, 9), under(rule, u, 9)
    samples = [
        Sample(np.array([0, v]), {
            "weight": np.array([0, p[v]]), "advantage": np.zeros(2), "old": np.array([0, np.log(p[v])]),
            "ref": np.array([0, np.log(q[v])]), "law": np.array([-1, 0]),
        }, {"weight": p[v]}, (rule,))
        for v in range(VOCAB) if p[v] > 0
    ]  # fmt: skip
    terms = Learner({"policy": policy, "ref": ref}, LearnerConfig()).gradient(samples, Clipped(beta=0.7, kl=name))
    on = p > 0
    same = np.zeros(VOCAB)
    same[on] = p[on] * (np.log(p[on] / q[on]) - exact(p, q))
    want = {"k1": 0 * same, "k2": same, "k3": p - q, "k3_weighted": same, "exact": same}[name]
    np.testing.assert_allclose(policy.model.logits.grad[row].numpy(), 0.7 * want / rule.temperature, atol=1e-14)
    value = 0.5 * float((p[on] * np.log(p[on] / q[on]) ** 2).sum()) if name == "k2" else exact(p, q)
    assert terms["kl"] == pytest.approx(value, abs=1e-14) and terms["loss"] == pytest.approx(0.7 * value, abs=1e-14)
    assert terms["ratio"] == pytest.approx(1, abs=1e-14) and terms["clip_fraction"] == 0
