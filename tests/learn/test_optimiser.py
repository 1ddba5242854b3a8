"""The optimiser against AdamW in a plain loop: groups, clipping, schedule, average, and a state that is loaded."""

import math

import pytest
import torch
from tabular import TabularLM

from trailmark.config import GroupConfig, OptimConfig
from trailmark.errors import LearnError
from trailmark.learn.optim import Optimiser, rate

STEPS = 6


def table():
    lm = TabularLM([(0,), (1,)], 3)
    lm.add_head("value")
    with torch.no_grad():
        lm.model.logits.copy_(torch.arange(9.0).view(3, 3) / 10)
        lm.heads["value"].weight.copy_(torch.tensor([[0.5, -0.5, 1.0]]))
    return lm


def gradients(step):
    """Made up, the same for every optimiser; the last parameter has none in step 2."""
    g = torch.Generator().manual_seed(step)
    made = [torch.randn(3, 3, generator=g, dtype=torch.float64), torch.randn(1, 3, generator=g, dtype=torch.float64)]
    return [made[0], None if step == 2 else made[1]]


def stepped(optimiser, steps):
    out = []
    for step in steps:
        for p, g in zip(optimiser.named.values(), gradients(step), strict=True):
            p.grad = None if g is None else g.clone()
        out.append(optimiser.step())
    return out


def weights(optimiser):
    return [p.detach().clone() for p in optimiser.named.values()]


def looped(config, settings):
    """AdamW number by number. `settings`: (lr, weight decay) of each parameter. Returns weights and gradient norms."""
    x = [p.detach().flatten().tolist() for _, p in table().parameters()]
    m, v, t = [[[0.0] * len(w) for w in x] for _ in range(2)] + [[0] * len(x)]
    (b1, b2), norms = config.betas, []
    for step in range(STEPS):
        grads = [None if g is None else g.flatten().tolist() for g in gradients(step)]
        norms.append(math.sqrt(sum(g * g for one in grads if one for g in one)))
        cut = 1.0 if config.clip is None else min(1.0, config.clip / (norms[-1] + 1e-6))
        for k, one in enumerate(grads):
            if one is None:
                continue
            t[k] += 1
            lr, decay = settings[k][0] * rate(config, step, STEPS), settings[k][1]
            for i, g in enumerate(one):
                x[k][i] *= 1 - lr * decay
                m[k][i] = b1 * m[k][i] + (1 - b1) * g * cut
                v[k][i] = b2 * v[k][i] + (1 - b2) * (g * cut) ** 2
                root = math.sqrt(v[k][i] / (1 - b2 ** t[k])) + config.eps
                x[k][i] -= lr * m[k][i] / (1 - b1 ** t[k]) / root
    return x, norms


@pytest.mark.parametrize("clip", [None, 0.5, 2.5])
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("grouped", [False, True])
def test_against_a_loop(clip, schedule, grouped):
    groups = {"heads.*": GroupConfig(lr=0.2, weight_decay=0.0)} if grouped else {}
    config = OptimConfig(lr=0.05, weight_decay=0.1, clip=clip, schedule=schedule, warmup=2, final=0.1, groups=groups)
    optimiser = Optimiser(table(), config, STEPS)
    reports = stepped(optimiser, range(STEPS))
    want, norms = looped(config, [(0.05, 0.1), (0.2, 0.0) if grouped else (0.05, 0.1)])
    for p, numbers in zip(optimiser.named.values(), want, strict=True):
        assert p.detach().flatten().tolist() == pytest.approx(numbers, abs=1e-12)
        assert p.grad is None
    assert [r["grad_norm"] for r in reports] == pytest.approx(norms)  # before clipping
    assert [r["lr"] for r in reports] == pytest.approx([0.05 * rate(config, k, STEPS) for k in range(STEPS)])


def test_the_moving_average_by_hand_and_for_a_while():
    optimiser = Optimiser(table(), OptimConfig(lr=0.1), STEPS, ema=0.75)
    mean = weights(optimiser)
    for step in range(3):
        stepped(optimiser, [step])
        mean = [0.75 * a + 0.25 * b for a, b in zip(mean, weights(optimiser))]
    own = weights(optimiser)
    with pytest.raises(KeyError), optimiser.averaged():
        assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(weights(optimiser), mean, strict=True))
        raise KeyError
    assert all(torch.equal(a, b) for a, b in zip(weights(optimiser), own, strict=True))  # after an error too
    assert not torch.allclose(own[0], mean[0])


@pytest.mark.parametrize("ema", [None, 0.9])
def test_a_state_that_is_loaded_goes_on_as_if_nothing_had_happened(ema):
    config = OptimConfig(lr=0.1, schedule="linear")
    whole = Optimiser(table(), config, STEPS, ema)
    stepped(whole, range(3))
    state = {name: t.clone() for name, t in whole.tensors().items()}
    kinds = {"step", "exp_avg", "exp_avg_sq"} | ({"ema"} if ema else set())
    assert set(state) == {f"{kind}/{name}" for kind in kinds for name in ("logits", "heads.value.weight")}
    assert [int(state[f"step/{n}"]) for n in ("logits", "heads.value.weight")] == [3, 2]
    lm = table()
    with torch.no_grad():
        for (_, p), w in zip(lm.parameters(), weights(whole), strict=True):
            p.copy_(w)
    again = Optimiser(lm, config, STEPS, ema)
    held = {name: t.clone() for name, t in state.items()}
    again.load(state, 3)
    assert stepped(again, range(3, STEPS)) == stepped(whole, range(3, STEPS))
    assert all(torch.equal(a, b) for a, b in zip(weights(again), weights(whole), strict=True))
    for name, t in again.tensors().items():
        assert torch.equal(t, whole.tensors()[name])
        assert torch.equal(state[name], held[name])  # what was loaded is not written to


def test_a_state_from_before_the_first_step_is_empty():
    optimiser = Optimiser(table(), OptimConfig(), STEPS)
    assert optimiser.tensors() == {}
    stepped(optimiser, [0])
    optimiser.load({}, 0)
    assert optimiser.tensors() == {} and optimiser.steps == 0


def test_moments_that_lie_elsewhere_change_no_number():
    plain, asked, moved = (Optimiser(table(), OptimConfig(lr=0.1), STEPS, offload=k > 0) for k in range(3))
    assert not asked.offload  # on a CPU they are there already
    moved.offload = True
    reports = [stepped(o, range(STEPS)) for o in (plain, asked, moved)]
    assert reports[0] == reports[1] == reports[2]
    for other in (asked, moved):
        assert all(torch.equal(a, b) for a, b in zip(weights(plain), weights(other), strict=True))
        assert all(torch.equal(t, plain.tensors()[n]) for n, t in other.tensors().items())


def test_moments_of_eight_bits_are_stored_and_loaded_as_they_are():
    """bitsandbytes keeps its step as a plain number, and bytes with their scales."""
    optimiser = Optimiser(table(), OptimConfig(), STEPS, ema=0.5)
    optimiser.config = OptimConfig(bits=8)
    stored = {"step/logits": torch.tensor(7), "state1/logits": torch.arange(9, dtype=torch.uint8),
              "absmax1/logits": torch.tensor([0.5]), "ema/logits": torch.ones(3, 3, dtype=torch.float64),
              "ema/heads.value.weight": torch.zeros(1, 3, dtype=torch.float64)}  # fmt: skip
    optimiser.load(stored, 7)
    (state,) = optimiser.adam.state.values()
    assert state["step"] == 7 and type(state["step"]) is int and set(state) == {"step", "state1", "absmax1"}
    assert state["state1"].dtype == torch.uint8 and state["state1"] is not stored["state1/logits"]
    back = optimiser.tensors()
    assert set(back) == set(stored) and all(torch.equal(back[n], t) for n, t in stored.items())


def test_mistakes_are_sentences_and_move_nothing():
    with pytest.raises(LearnError) as found:
        Optimiser(table(), OptimConfig(groups={"value_head.*": GroupConfig(lr=1)}), STEPS)
    assert str(found.value) == "learner.optim.groups: 'value_head.*' matches no trained parameter of 'table'"
    none = table()
    none.parameters = lambda: iter(())
    with pytest.raises(LearnError) as found:
        Optimiser(none, OptimConfig(), STEPS)
    assert str(found.value) == "model 'table' has nothing to train: every weight is frozen"
    optimiser = Optimiser(table(), OptimConfig(), STEPS)
    before = weights(optimiser)
    for p in optimiser.named.values():
        p.grad = torch.full_like(p, torch.inf)
    with pytest.raises(LearnError) as found:
        optimiser.step()
    assert str(found.value) == (
        "the gradient is not finite (norm inf) at optimiser step 0: lower the learning rate or look at the data; the "
        "last checkpoint is intact"
    )
    assert all(torch.equal(a, b) for a, b in zip(weights(optimiser), before, strict=True)) and optimiser.steps == 0
    assert all(p.grad is None for p in optimiser.named.values())
