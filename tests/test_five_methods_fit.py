"""Hand-made episodes of all five methods -> samples -> one objective call -> the numbers of the papers' definitions,
each the same whatever the micro-batch and the layout. Two of the methods are skeletons in fit/."""

import ast
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tabular import TabularLM

from trailmark.config import LearnerConfig
from trailmark.credit.groups import group_relative
from trailmark.credit.returns import discounted, max_abs_normalise
from trailmark.errors import LearnError
from trailmark.learn.learner import Learner
from trailmark.methods.oreo.soft_bellman import SoftBellman
from trailmark.models.readout import Readout
from trailmark.objectives.classify import Classify
from trailmark.objectives.clipped import Clipped
from trailmark.objectives.pairwise import Pairwise
from trailmark.objectives.weighted_logp import WeightedLogp
from trailmark.samples import annotate_turns, build_samples, class_sample, pair
from trailmark.types import Episode, Player, Sample, SamplingLaw, Scored, Task, Turn

VOCAB = 8
SPLITS = [
    (1, "rows"),
    (12, "rows"),
    (10_000, "rows"),
    (10_000, "left"),
    (1, "tree"),
    (10_000, "tree"),
    (14, "flat"),
    (10_000, "flat"),
]


def learner(lm, budget, layout, **models):
    config = LearnerConfig(micro_tokens=budget).model_copy(update={"layout": layout})
    return Learner({"policy": lm, **models}, config)


def gradient(lm, samples, objective, budget, layout, **models):
    made = learner(lm, budget, layout, **models)
    for _, p in lm.parameters():
        p.grad = None
    terms = made.gradient(samples, objective)
    return terms, {n: p.grad.clone() for n, p in lm.parameters() if p.grad is not None}


def episode(name, turns, reward=1.0, group="g"):
    return Episode(
        name, Task(name), group, tuple(turns), {"self": Scored(reward)}, True, False, {"policy": Player("trained")}
    )


def every_split(lm, samples, objective, term, want, tol=1e-12, **models):
    first = None
    for budget, layout in SPLITS:
        terms, grads = gradient(lm, samples, objective, budget, layout, **models)
        assert terms[term] == pytest.approx(want, abs=tol), (budget, layout)
        first = first or grads
        for name, g in grads.items():
            assert torch.allclose(g, first[name], rtol=0, atol=1e-13), (name, budget, layout)
    return first


def test_epo_turn_weights():
    """Two strategist turns of 2 and 3 tokens, weights .5 and 1, uniform over 8 tokens: L = (1/2)(.5 + 1) ln 8 = 1.5596.
    Between them stand an observation and the words of the frozen agent, which train nothing."""
    turns = [
        Turn("strategist", prompt=(1, 2, 3), tokens=(4, 5)),
        Turn("agent", prompt=(6, 6), tokens=(7, 7, 7)),
        Turn("strategist", prompt=(1, 1), tokens=(3, 2, 1), continues=0),
    ]
    e = episode("epo", turns)
    again = Episode("epo2", e.task, "g", e.turns, e.outcomes)
    weights = {"epo": [0.5, 1.0], "epo2": [0.5, 1.0]}
    samples = build_samples([e, again], "strategist", {"advantage": weights}, mean="turn")
    assert samples[0].tokens.tolist() == [1, 2, 3, 4, 5, 1, 1, 3, 2, 1]
    notes = annotate_turns(samples, [e, again], "strategist", "advantage", "by hand")
    assert [(a.episode, a.turn, a.level, a.values) for a in notes] == [
        (x, i, "turn", (w,)) for x in ("epo", "epo2") for i, w in ((0, 0.5), (2, 1.0))
    ]
    assert np.nonzero(samples[0].streams["weight"])[0].tolist() == [3, 4, 7, 8, 9]
    every_split(TabularLM([], VOCAB), samples, WeightedLogp(), "policy", 0.5 * 1.5 * math.log(8))
    assert 0.5 * 1.5 * math.log(8) == pytest.approx(1.5596, abs=1e-4)
    assert max_abs_normalise(discounted([0, 1, 0.7], 0.99)) == pytest.approx([0.99, 1, 0.4135], abs=1e-4)


def test_vrcli_group_and_k3():
    """One prompt, four plans, rewards 0 .5 .9 1; at the first step the ratio is 1, and KL(k3) at d = -1/2 is
    0.10653."""
    law = SamplingLaw(temperature=0.7)
    plans = [(1,), (2, 3), (4, 5, 6), (7, 7)]
    episodes = [
        episode(
            f"e{k}", [Turn("policy", prompt=(5, 5, 5), tokens=p, logq=(-math.log(VOCAB),) * len(p), law=law)], reward=r
        )
        for k, (p, r) in enumerate(zip(plans, [0, 0.5, 0.9, 1.0]))
    ]
    advantages = group_relative([e.outcome.reward for e in episodes], [e.group for e in episodes])
    assert advantages == pytest.approx([-1.3198, -0.2200, 0.6599, 0.8799], abs=1e-4)
    lm = TabularLM([(5, 5, 5)], VOCAB)
    samples = build_samples(
        episodes, "policy", {"advantage": {e.id: [a] for e, a in zip(episodes, advantages)}}, mean="sequence"
    )
    with_ref = [Sample(s.tokens, {**s.streams, "ref": s.streams["old"] - 0.5}, s.mass, s.laws) for s in samples]
    grads = every_split(lm, with_ref, Clipped(beta=1.0), "kl", 0.10653, tol=1e-5)
    terms, _ = gradient(lm, with_ref, Clipped(beta=1e-6), 10_000, "tree")
    assert terms["ratio"] == 1.0 and terms["kl_old"] == 0.0
    # The gradient in the shared state: each plan's first token, -A/(4 |o|) (1[token] - 1/8) / T, and KL's (1 - e^d)
    # part.
    want = np.zeros(VOCAB)
    for p, a in zip(plans, advantages):
        each = (np.arange(VOCAB) == p[0]) - 1 / VOCAB
        want += (-a + (1 - math.exp(-0.5))) / (4 * len(p)) * each / 0.7
    assert grads["logits"][0].numpy() == pytest.approx(want, abs=1e-12)


def test_lpr_dpo_and_prm():
    """DPO is ln 2 at zero margin; a process reward model is read at step ends, after the step's last token."""
    good = episode("good", [Turn("policy", prompt=(1, 2), tokens=(3, 4, 5, 6), steps=((0, 2), (2, 4)))])
    bad = episode("bad", [Turn("policy", prompt=(1, 2), tokens=(3, 7), steps=((0, 2),))], 0.0)
    lm = TabularLM([(1, 2, 3, 4), (1, 2, 3, 4, 5, 6), (1, 2, 3, 7)], VOCAB)
    rows = learner(lm, 100, "tree").fill(build_samples([good, bad], "policy"), ref=Readout("", law=False))
    pairs = pair(*rows, "p1") + pair(*rows, "p2")
    every_split(lm, pairs, Pairwise(beta=0.1), "pair", math.log(2))
    head = lm.add_head("classes", 4)
    with torch.no_grad():
        head.weight[2, 0] = 1.5
        head.weight[3, 1] = -2.0
    marked = [class_sample(s.tokens, labels, s.episode) for s, labels in zip(rows, [{3: 2, 5: 3}, {3: 0}])]
    assert [s.mass for s in marked] == [{"class_weight": 2.0}, {"class_weight": 1.0}]
    with pytest.raises(LearnError, match=r"episode 'x': a label at place 4 of 4 tokens"):
        class_sample((1, 2, 3, 7), {4: 1}, "x")
    first = math.log(3 + math.exp(1.5)) - 1.5
    second = math.log(3 + math.exp(-2.0)) + 2.0
    every_split(lm, marked, Classify(), "cross_entropy", (first + second + math.log(4)) / 3)


def test_oreo_residual_zero_at_the_optimum():
    """V*(s) = beta log sum ref exp((r + V*(s'))/beta), pi* = ref exp((r + V*(s') - V*(s))/beta): both losses are 0
    there."""
    beta, ref = 0.3, np.array([0.2, 0.3, 0.5])
    leaves = {(a, b): float((a * 3 + b) % 4 == 1) for a in range(3) for b in range(3)}
    v = {(a,): beta * math.log(sum(ref[b] * math.exp(leaves[a, b] / beta) for b in range(3))) for a in range(3)}
    v[()] = beta * math.log(sum(ref[a] * math.exp(v[a,] / beta) for a in range(3)))
    best = {(): [ref[a] * math.exp((v[a,] - v[()]) / beta) for a in range(3)]}
    best |= {(a,): [ref[b] * math.exp((leaves[a, b] - v[a,]) / beta) for b in range(3)] for a in range(3)}
    states = [(9, *s) for s in v]
    policy, critic = TabularLM(states, 10), TabularLM(states, 10)
    policy.set_policy({(9, *s): [*p, *[0] * 7] for s, p in best.items()})
    head = critic.add_head("value")
    with torch.no_grad():
        for s in v:
            head.weight[0, critic.row[(9, *s)]] = v[s]
    episodes = [episode(f"{a}{b}", [Turn("policy", (9,), (a, b))], r) for (a, b), r in leaves.items()]
    values = {
        "ref": {e.id: [np.log(ref[list(e.turns[0].tokens)])] for e in episodes},
        "reward": {e.id: [e.outcome.reward] for e in episodes},
    }
    samples = build_samples(episodes, "policy", values, mean="sequence")
    for budget, layout in SPLITS:
        both = learner(policy, budget, layout, critic=critic)
        full = both.fill(samples, policy_logp=Readout("", law=False), value=Readout("", "head", model="critic"))
        _, g = gradient(policy, full, SoftBellman(beta=beta), budget, layout)
        assert both.gradient(full, SoftBellman(beta=beta))["policy"] == pytest.approx(0, abs=1e-25)
        assert both.gradient(
            [Sample(s.tokens, {k: x for k, x in s.streams.items() if k != "value"}, s.mass) for s in full],
            SoftBellman(part="value", beta=beta),
        )["value"] == pytest.approx(0, abs=1e-25)
        assert g["logits"].abs().max() < 1e-13
    # Away from the optimum the loss is the hand-computed square: V raised by 0.1 in every state.
    off = [
        Sample(s.tokens, {**s.streams, "value": s.streams["value"] + 0.1 * (s.streams["weight"] != 0)}, s.mass)
        for s in full
    ]
    every_split(policy, off, SoftBellman(beta=beta), "policy", 0.01, tol=1e-12)


def test_reflect_bandit_gradient():
    """L = (1/N) sum log pi(a_n) C_n over label-restricted one-token turns: dL/dz = (1/N) sum C_n (1[a_n] - pi)."""
    allowed = (2, 3, 4, 5, 6, 7)
    law = SamplingLaw(allowed=allowed)
    draw = np.random.default_rng(3)
    actions, costs = draw.choice(allowed, 12), draw.normal(size=12)
    lm = TabularLM([(0, 1)], VOCAB)
    logits = draw.normal(size=VOCAB)
    with torch.no_grad():
        lm.model.logits[0] = torch.as_tensor(logits)
    episodes = [
        episode(
            f"e{n}",
            [Turn("reflector", (0,), (1, 1)), Turn("policy", (0, 1), (int(a),), law=law, action=str(a), reward=-c)],
            -c,
        )
        for n, (a, c) in enumerate(zip(actions, costs))
    ]
    samples = build_samples(episodes, "policy", {"advantage": {e.id: [e.outcome.reward] for e in episodes}})
    restricted = np.where(np.isin(np.arange(VOCAB), allowed), logits, -np.inf)
    pi = np.exp(restricted) / np.exp(restricted).sum()
    value = float(np.mean(np.log(pi[actions]) * costs))
    grads = every_split(lm, samples, WeightedLogp(), "policy", value)
    want = np.mean([c * ((np.arange(VOCAB) == a) - pi) for a, c in zip(actions, costs)], axis=0)
    assert grads["logits"][0].numpy() == pytest.approx(want, abs=1e-12)
    assert want[[0, 1]] == pytest.approx([0, 0])  # labels that are not listed get no gradient


def test_a_sixth_method_touches_no_core_file():
    """A new objective is a class in a user's file: here, imitation that pushes confident tokens less (focal loss)."""
    from trailmark.objectives.base import Objective, Term

    class Focal(Objective):
        kind: str = "focal"
        gamma: float = 2.0

        def readouts(self):
            return [Readout("logp")]

        def terms(self, view):
            p = view["logp"].exp()
            return [Term("focal", -(view["weight"] * (1 - p) ** self.gamma * view["logp"]).sum())]

    lm = TabularLM([], VOCAB)
    samples = build_samples(
        [episode("x", [Turn("policy", (1,), (2, 3))]), episode("y", [Turn("policy", (1,), (4,))])], "policy"
    )
    every_split(lm, samples, Focal(), "focal", (7 / 8) ** 2 * math.log(8))


SKELETONS = [Path(__file__), *sorted((Path(__file__).parent / "fit").glob("*.py"))]


def private_names(text):
    """Names that begin with an underscore and are imported, or read off something."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [getattr(node, "module", "") or "", *(a.name for a in node.names)]
            found += [part for name in names for part in name.split(".")]
        elif isinstance(node, ast.Attribute):
            found.append(node.attr)
    return [n for n in found if n.startswith("_") and not n.startswith("__")]


def test_methods_use_public_names_only():
    assert len(SKELETONS) == 3
    assert {p.name: private_names(p.read_text()) for p in SKELETONS} == {p.name: [] for p in SKELETONS}
    bad = "from a._b import c\nimport _d\nfrom e import _f\ng._h(i.__class__)"
    assert private_names(bad) == ["_b", "_d", "_f", "_h"]
