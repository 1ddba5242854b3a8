"""The soft Bellman losses against loops, their gradients against the formulas, and a run through
the learner."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tabular import TabularLM

from trailmark.config import LearnerConfig, OptimConfig
from trailmark.errors import LearnError
from trailmark.learn.learner import Learner, Update
from trailmark.methods.oreo.data import advantages, trajectory_samples
from trailmark.methods.oreo.soft_bellman import SoftBellman
from trailmark.models.layout import lay_out
from trailmark.models.readout import Readout, View
from trailmark.objectives.base import Note, Term
from trailmark.tasks.solved import paths, solve_soft, tree
from trailmark.types import Episode, Sample, Scored, Task, Turn

LEVELS = ["token", "step", "response", "one_step", "undetached"]
BETA = 0.3


def ragged(seed=0, lengths=(5, 2, 9, 1, 6), size=1):
    """Rows of a prompt, actions and observations, with a state at every `size`-th action from the first."""
    draw = np.random.default_rng(seed)
    samples = []
    for k, n in enumerate(lengths):
        acts = np.r_[0, 0, 1, draw.random(n) < 0.7].astype(bool)
        states = np.zeros(len(acts), bool)
        states[np.nonzero(acts)[0][::size]] = True
        first = np.zeros(len(acts))
        first[2] = 1.0
        good = k % 2
        streams = {
            "action": acts / acts.sum(), "weight": states / states.sum(), "first": first, "won": first * good,
            "reward": np.full(len(acts), float(good)), "ref": draw.normal(size=len(acts)),
        }  # fmt: skip
        samples.append(Sample(draw.integers(0, 9, len(acts)), streams))
    return samples


def look(samples, seed=1):
    packed = lay_out(samples, "rows")
    draw = np.random.default_rng(seed)
    size = len(packed.row)
    read = {k: torch.tensor(draw.normal(size=size), requires_grad=True) for k in ("logp", "value")}
    data = {k: torch.as_tensor(v) for k, v in packed.streams.items()}
    data["policy_logp"] = torch.tensor(draw.normal(size=size))
    return View(packed, data, dict(read), torch.as_tensor(packed.row)), read


def found(objective, view):
    return {t.name: t for t in objective.terms(view) if isinstance(t, Term)}


def by_loops(samples, level, logp, value, clip=None, weigh=False):
    """(value loss, policy loss, d policy / d logp) written out row by row, state by state."""
    lv = lp = 0.0
    gradient, at = [], 0
    for s in samples:
        n, st = len(s.tokens), s.streams
        acts, states = np.nonzero(st["action"])[0], np.nonzero(st["weight"])[0]
        l = {i: logp[at + i] - st["ref"][i] for i in acts}
        again = math.exp(min(sum(l.values()), 1.0)) if weigh else 1.0
        own = again if level in ("token", "step") else 1.0
        g = np.zeros(n)
        for k, t in enumerate(states):
            v, R = value[at + t], st["reward"][t]
            tail = sum(l[i] for i in acts if i >= t)
            cut = tail if clip is None else max(-clip, min(clip, tail))
            lv += again * st["weight"][t] * (v - R + BETA * cut) ** 2
            after = states[k + 1] if k + 1 < len(states) else n
            step = [i for i in acts if t <= i < after]
            w = own * st["weight"][t]
            if level == "one_step":
                last = k + 1 == len(states)
                e = v - (R if last else 0.0) - (0.0 if last else value[at + after]) + BETA * sum(l[i] for i in step)
            else:
                e = v - R + BETA * tail
            moved = step
            if level in ("undetached", "response"):
                moved = [i for i in acts if i >= t]
            if level == "response":
                w = st["first"][t]
            lp += w * e**2
            g[moved] += 2 * w * e * BETA
        gradient.append(g)
        at += n
    return lv, lp, np.concatenate(gradient)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("clip", "weigh"), [(None, False), (0.5, False), (None, True)])
def test_against_loops(level, size, clip, weigh):
    samples = ragged(size=size)
    view, read = look(samples)
    objective = SoftBellman(part="both", level=level, beta=BETA, actions="action", clip_log=clip, importance=weigh)
    terms = found(objective, view)
    logp, value = (read[k].detach().numpy() for k in ("logp", "value"))
    lv, lp, g = by_loops(samples, level, logp, value, clip, weigh)
    assert terms["value"].sum.item() == pytest.approx(lv, abs=1e-12)
    assert terms["policy"].sum.item() == pytest.approx(lp, abs=1e-12)
    (mine,) = torch.autograd.grad(terms["policy"].sum, read["logp"], retain_graph=True)
    np.testing.assert_allclose(mine.numpy(), g, atol=1e-12)
    assert torch.autograd.grad(terms["policy"].sum, read["value"], allow_unused=True, retain_graph=True)[0] is None
    assert torch.autograd.grad(terms["value"].sum, read["logp"], allow_unused=True)[0] is None


def test_steps_of_one_token_are_the_token_loss():
    view, read = look(ragged(size=1))
    grads = []
    for level in ("token", "step"):
        term = found(SoftBellman(part="both", level=level, beta=BETA, actions="action"), view)["policy"]
        grads.append((term.sum.item(), torch.autograd.grad(term.sum, read["logp"])[0]))
    assert grads[0][0] == grads[1][0] and torch.equal(grads[0][1], grads[1][1])


def test_undetached_last_token_hears_every_residual():
    """Its gradient is the sum over all states before it; with detaching it is only its own."""
    samples = ragged(lengths=(6,))
    view, read = look(samples)
    last = int(np.nonzero(samples[0].streams["action"])[0][-1])
    w = samples[0].streams["weight"]
    states = np.nonzero(w)[0]
    l = np.where(w > 0, read["logp"].detach().numpy() - samples[0].streams["ref"], 0.0)
    e = read["value"].detach().numpy() - samples[0].streams["reward"] + BETA * np.cumsum(l[::-1])[::-1]
    for level, want in (("undetached", (w * e)[states].sum()), ("token", w[last] * e[last])):
        term = found(SoftBellman(part="both", level=level, beta=BETA, actions="action"), view)["policy"]
        (g,) = torch.autograd.grad(term.sum, read["logp"])
        assert g[last].item() == pytest.approx(2 * BETA * want, abs=1e-12)


def test_response_knows_the_first_value_only():
    samples = ragged()
    view, read = look(samples)
    objective = SoftBellman(part="both", level="response", beta=BETA, actions="action")
    before = found(objective, view)
    later = torch.as_tensor(np.concatenate([(s.streams["weight"] > 0) & (s.streams["first"] == 0) for s in samples]))
    view.read["value"] = read["value"] + later
    after = found(objective, view)
    assert before["policy"].sum.item() == after["policy"].sum.item() and before["policy"].weight == "first"
    assert before["value"].sum.item() != after["value"].sum.item()  # the value loss still looks at every state


@pytest.mark.parametrize("level", LEVELS)
def test_observations_are_no_actions(level):
    """The log-probs of observation tokens change nothing."""
    samples = ragged(size=2)
    view, read = look(samples)
    objective = SoftBellman(part="both", level=level, beta=BETA, actions="action", alpha=1.0, kl="k3")
    before = {n: t.sum.item() for n, t in found(objective, view).items()}
    seen = torch.as_tensor(np.concatenate([s.streams["action"] == 0 for s in samples]))
    view.read["logp"] = read["logp"] + 7.0 * seen
    view.streams["ref"] = view.streams["ref"] - 3.0 * seen
    assert {n: t.sum.item() for n, t in found(objective, view).items()} == before


def test_hinge():
    """coef * relu(ref - logp) of whole successes, over the number of successes; of a batch without one, nothing."""
    samples = ragged()
    view, read = look(samples)
    objective = SoftBellman(part="both", level="response", beta=BETA, actions="action", hinge=0.7)
    term = found(objective, view)["hinge"]
    gap, at = [], 0
    for s in samples:
        acts = s.streams["action"] > 0
        gap.append(float((s.streams["ref"] - read["logp"].detach().numpy()[at : at + len(acts)])[acts].sum()))
        at += len(acts)
    want = sum(max(0.0, g) for g, s in zip(gap, samples) if s.streams["won"].any())
    assert term.sum.item() == pytest.approx(want, abs=1e-12) and want > 0
    assert (term.weight, term.coef, term.optional) == ("won", 0.7, True)
    with pytest.raises(ValueError, match="hinge"):
        SoftBellman(level="token", hinge=0.1)


def test_a_lagged_target():
    """With `lagged` the value's target is the stream's, the policy's residual its own."""
    view, _ = look(ragged())
    plain = found(SoftBellman(part="both", beta=BETA, actions="action"), view)
    late = found(SoftBellman(part="both", beta=BETA, actions="action", lagged=True), view)
    alone = found(SoftBellman(part="value", beta=BETA, actions="action"), view)
    assert late["value"].sum.item() == alone["value"].sum.item() != plain["value"].sum.item()
    assert late["policy"].sum.item() == plain["policy"].sum.item()


def test_clip_ratio_and_notes():
    samples = ragged()
    view, read = look(samples)
    objective = SoftBellman(part="both", beta=BETA, actions="action", clip_log=0.5)
    out = objective.terms(view)
    notes = {n.name: n.values for n in out if isinstance(n, Note)}
    states = torch.as_tensor(np.concatenate([s.streams["weight"] > 0 for s in samples]))
    assert torch.equal(notes["v"], read["value"].detach()[states])
    assert len(notes["v_first"]) == 5 and len(notes["log_weight_won"]) == 2 and len(notes["log_weight_lost"]) == 3
    assert {t.name for t in out if isinstance(t, Term)} == {"value", "clip_ratio", "policy", "kl_estimate"}


# --- through the learner ------------------------------------------------------------------------------------------


def tabular(problem, seed=0):
    """A policy, a critic and a reference as tables that stand where transformers stand, and all plays as episodes."""
    draw = np.random.default_rng(seed)
    plays = paths(problem.next, problem.reward, problem.uniform)
    at = {(): 0}
    for p in plays:
        s = 0
        for k, a in enumerate(p.actions):
            at[p.actions[:k]] = s
            s = int(problem.next[s, a])
    prefixes = [(9, *x) for x in at]

    class Table(TabularLM):
        def hidden(self, ids, layout, pos):  # the one batch of these tests is laid out once
            key = ids.numpy().tobytes()
            if key not in self.kept:
                self.kept[key] = super().hidden(ids, layout, pos)
            return self.kept[key]

    models = {}
    actions = problem.next.shape[1]
    ref = draw.dirichlet(np.full(actions, 2.0), size=len(problem.next))
    for name in ("policy", "critic", "ref"):
        models[name] = Table(prefixes, 10)
        models[name].kept = {}
        models[name].set_policy({(9, *x): [*ref[s], *[0] * (10 - actions)] for x, s in at.items()})
    models["critic"].add_head("value")
    for p in models["ref"].model.parameters():
        p.requires_grad_(False)
    episodes = [
        Episode(f"e{k}", Task("t"), "g", (Turn("policy", (9,), p.actions),), {"self": Scored(p.total)})
        for k, p in enumerate(plays)
    ]
    return models, episodes, ref, at


def test_the_learner_reaches_the_optimum_and_both_advantages_agree():
    """Two optimisers, warm-up and cosine, one pass of each model a step; then V = V*, pi = pi*, and the value's and
    the policy's advantages of a step are equal."""
    problem = tree(3, 3, seed=4)
    models, episodes, ref, at = tabular(problem)
    optim = OptimConfig(lr=0.1, schedule="cosine", warmup=0.03, clip=None)
    learner = Learner(models, LearnerConfig(layout="tree"), {"policy": optim, "critic": optim}, total=350)
    packed = learner.pack(samples := trajectory_samples(episodes))
    learner.pack = lambda s: packed
    objective = SoftBellman(part="both", beta=BETA, ref="ref", actions="action")
    for _ in range(350):
        report = learner.update(Update(samples, objective, ("critic", "policy")))
    v, _, pi = solve_soft(problem.next, problem.reward, ref, BETA)
    for x, s in at.items():
        row = models["policy"].row[(9, *x)]
        assert models["policy"].model.logits[row].softmax(-1)[:3].tolist() == pytest.approx(pi[s], abs=1e-4)
        assert models["critic"].heads["value"].weight[0, row].item() == pytest.approx(v[s], abs=1e-4)
    assert {"policy/lr", "critic/lr", "v_min", "v_max", "v_first_max", "kl_estimate", "value_mean"} <= report.keys()
    own, theirs = Readout("", law=False, where="action"), Readout("", model="ref", law=False, where="action")
    for s in learner.fill(samples, policy_logp=own, ref=theirs, value=Readout("", "head", model="critic")):
        explicit, implicit = advantages(s, BETA)
        assert explicit == pytest.approx(implicit, abs=1e-5) and len(explicit) == 3


def critic_and_policy(make_lm, seed=0):
    models = {n: make_lm("gpt2", dtype=torch.float64, seed=seed + k) for k, n in enumerate(("policy", "critic", "ref"))}
    draw = torch.Generator().manual_seed(9)
    head = models["critic"].add_head("value")
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=draw, dtype=torch.float64) * 0.1)
    models["ref"].freeze()
    return models


def talks(seed=0, n=7, states="token"):
    """Two turns with an observation between them, of ragged lengths, in groups that share a prompt."""
    draw = np.random.default_rng(seed)
    token = lambda k: tuple(int(t) for t in draw.integers(0, 250, k))
    prompts = [token(6), token(3)]
    out = []
    for k in range(n):
        a, b = token(int(draw.integers(1, 9))), token(int(draw.integers(2, 9)))
        turns = (
            Turn("policy", prompts[k % 2], a),
            Turn("policy", token(4), b, continues=0, steps=((0, 1), (1, len(b)))),
        )
        out.append(Episode(f"e{k}", Task("t"), f"g{k % 2}", turns, {"self": Scored(float(k % 3 == 0))}))
    return trajectory_samples(out, states=states)


def grads(models):
    return {f"{m}.{n}": p.grad.clone() for m, lm in models.items() for n, p in lm.parameters() if p.grad is not None}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kl", ["reverse", "forward", "k3"])
def test_one_gradient_whatever_the_layout(make_lm, level, kl):
    """Padded on either side, packed, as a tree; in one micro-batch or many (so also accumulation 4 x 1 and 1 x 4)."""
    models = critic_and_policy(make_lm)
    samples = talks(states="step" if level == "step" else "token")
    objective = SoftBellman(part="both", level=level, beta=BETA, ref="ref", actions="action", alpha=0.5, kl=kl)
    seen = []
    for budget, layout in [(10_000, "rows"), (1, "rows"), (10_000, "left"), (10_000, "flat"), (40, "tree")]:
        config = LearnerConfig(micro_tokens=budget).model_copy(update={"layout": layout})
        learner = Learner(models, config, {"policy": OptimConfig(), "critic": OptimConfig()})
        report = learner.gradient(samples, objective, ("policy", "critic"))
        seen.append((report, grads(models)))
    assert max(float(g.abs().max()) for g in seen[0][1].values()) > 1e-3
    for report, g in seen[1:]:
        assert report == pytest.approx(seen[0][0], abs=1e-10)
        assert g.keys() == seen[0][1].keys()
        assert max(float((g[n] - seen[0][1][n]).abs().max()) for n in g) < 1e-10


@pytest.mark.parametrize("level", ["token", "step", "response"])
def test_one_pass_is_the_order_of_two(make_lm, level):
    """Score with the policy as it is; step the value; then the policy with the values from before: the same two
    gradients as in one pass, with one forward of the policy saved."""
    samples = talks(states="step" if level == "step" else "token")
    common = {"level": level, "beta": BETA, "actions": "action", "alpha": 0.1}
    both = critic_and_policy(make_lm)
    learner = Learner(both, LearnerConfig(), {"policy": OptimConfig(), "critic": OptimConfig()})
    learner.gradient(samples, SoftBellman(part="both", ref="ref", **common), ("policy", "critic"))
    together = grads(both)

    apart = critic_and_policy(make_lm)
    learner = Learner(apart, LearnerConfig(), {"policy": OptimConfig(clip=None), "critic": OptimConfig(lr=0.1)})
    full = learner.fill(
        samples,
        policy_logp=Readout("", law=False, where="action"),
        ref=Readout("", model="ref", law=False, where="action"),
        value=Readout("", "head", model="critic"),
    )
    plain = [replace(s, streams={k: x for k, x in s.streams.items() if k != "value"}) for s in full]
    learner.gradient(plain, SoftBellman(part="value", **common), ("critic",))
    values = grads(apart)
    learner.optimisers["critic"].step()
    learner.gradient(full, SoftBellman(part="policy", **common), ("policy",))
    one_by_one = {**values, **grads(apart)}
    assert one_by_one.keys() == together.keys()
    assert max(float((one_by_one[n] - together[n]).abs().max()) for n in together) < 1e-12


def test_a_frozen_policy_does_not_move(make_lm):
    models = critic_and_policy(make_lm)
    learner = Learner(models, LearnerConfig(), {"policy": OptimConfig(lr=0.1), "critic": OptimConfig(lr=0.1)})
    before, critic = models["policy"].fingerprint(), models["critic"].fingerprint()
    report = learner.update(Update(talks(), SoftBellman(part="both", ref="ref", actions="action"), ("critic",)))
    assert models["policy"].fingerprint() == before and models["critic"].fingerprint() != critic
    assert "critic/grad_norm" in report and "policy/grad_norm" not in report


def test_a_batch_without_a_success_has_no_hinge(make_lm):
    models = critic_and_policy(make_lm)
    learner = Learner(models, LearnerConfig(), {"policy": OptimConfig()})
    lost = [
        replace(s, mass={**s.mass, "won": 0.0}, streams={**s.streams, "won": 0 * s.streams["won"]}) for s in talks()
    ]
    objective = SoftBellman(part="both", level="response", ref="ref", actions="action", hinge=1.0)
    report = learner.gradient(lost, objective, ("policy",))
    assert "hinge" not in report and math.isfinite(report["loss"]) and "log_weight_won_median" not in report
    with pytest.raises(LearnError, match="nothing to train on"):
        learner.gradient([replace(s, mass={**s.mass, "first": 0.0}) for s in lost], objective, ("policy",))


def test_two_updates_may_share_a_name(make_lm):
    """First the value, then the policy, both called soft_bellman: each keeps the numbers of the other."""
    models = critic_and_policy(make_lm)
    learner = Learner(models, LearnerConfig(), {"policy": OptimConfig(), "critic": OptimConfig()})
    score = {"policy_logp": Readout("", law=False, where="action"), "value": Readout("", "head", model="critic")}
    full = learner.fill(talks(), **score)
    plain = [replace(s, streams={k: x for k, x in s.streams.items() if k != "value"}) for s in full]
    common = {"ref": "ref", "actions": "action"}
    learner.update(Update(plain, SoftBellman(part="value", **common), "critic"))
    learner.update(Update(full, SoftBellman(part="policy", **common), "policy"))
    assert learner.learned["soft_bellman"].keys() == {"value_mean", "policy_mean"}


def test_learned_numbers_are_kept_between_updates(make_lm):
    models = critic_and_policy(make_lm)
    learner = Learner(models, LearnerConfig(), {"policy": OptimConfig(), "critic": OptimConfig()})
    objective = SoftBellman(part="both", ref="ref", actions="action", kl_target=1e-9, kl_lr=0.1)
    for k in (1, 2, 3):
        report = learner.update(Update(talks(), objective, ("critic", "policy")))
        assert report["log_kl"] == pytest.approx(0.1 * k, abs=0.01)
    assert learner.learned["soft_bellman"]["_steps"] == 3 and "_steps" not in report
