"""Products through oneDNN are those of torch, in forward pass and gradients; they keep what the engine promises; and
where they cannot be used, one line says so."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from trailmark.config import LearnerConfig, LoraConfig, ModelConfig
from trailmark.engines.base import Request, publish, run
from trailmark.engines.local import LocalEngine
from trailmark.engines.weights import Weights, engine_copy
from trailmark.errors import ModelError
from trailmark.learn.learner import Learner
from trailmark.models import hardware, products
from trailmark.models.adapters import add_lora
from trailmark.models.hardware import check_bf16
from trailmark.models.lm import LM
from trailmark.models.products import FastConv1D, FastLinear, linear, rounded
from trailmark.objectives.sft import Sft
from trailmark.types import Sample, SamplingLaw

WIDE = {"width": 256, "ffn": 512, "layers": 2}
FAST = FastLinear | FastConv1D


@pytest.fixture(params=["plain", "onednn"])
def way(request, monkeypatch):
    """Both ways, if this CPU can; every layer of a model counts as large."""
    if request.param == "onednn" and products.missing():
        pytest.skip(products.missing())
    monkeypatch.setenv(products.SWITCH, request.param)
    products.onednn.cache_clear()
    monkeypatch.setattr(products, "LEAST_WORK", 1)
    monkeypatch.setattr(products, "LEAST_PACKED", 1)
    monkeypatch.setattr(products, "LEAST_WEIGHTS", 1 << 12)
    yield request.param
    products.onednn.cache_clear()


def numbers(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def fast(lm):
    return [m for m in lm.model.modules() if isinstance(m, FAST)]


# --- one product ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 9, 64, 511, 512, 1030, 4700])
@pytest.mark.parametrize("bias", [False, True])
def test_product_and_gradients_are_those_of_float64(way, rows, bias):
    """A frozen weight gets no gradient; an input that needs none costs none."""
    x, w, b, up = numbers(rows, 96), numbers(130, 96, seed=1), numbers(130, seed=2), numbers(rows, 130, seed=3)

    def all_of(f, dtype, frozen):
        a, c, d = (t.to(dtype, copy=True).requires_grad_() for t in (x, w, b))
        if frozen is not None:
            (a, c)[frozen].requires_grad_(False)
        out = f(a.view(1, rows, 96), c, d if bias else None)
        out.backward(up.to(dtype)[None])
        return [out.detach(), a.grad, c.grad, d.grad]

    for frozen in (None, 0, 1):
        want = all_of(F.linear, torch.float64, frozen)
        for f in (linear, F.linear):
            for got, right in zip(all_of(f, torch.float32, frozen), want):
                assert (got is None) == (right is None)
                assert got is None or (got - right).abs().max() <= 2e-5 * max(1.0, float(right.abs().max()))


def test_other_inputs_of_a_product(way):
    """Sums (a gradient without strides), transposed and sliced inputs, a second derivative, other dtypes, autocast."""
    w = numbers(130, 96, seed=1).requires_grad_()
    x = numbers(96, 3, 20).permute(2, 1, 0)[::2].detach().requires_grad_()
    linear(x, w).sum().backward()
    want = torch.autograd.grad(F.linear(x.double(), w.double()).sum(), (x, w))
    assert all(torch.allclose(t.grad, right, rtol=1e-4, atol=1e-4) for t, right in zip((x, w), want))
    first = [torch.autograd.grad((f(x, w) ** 2).sum(), x, create_graph=True)[0] for f in (linear, F.linear)]
    twice = [torch.autograd.grad((g**2).sum(), w)[0] for g in first]
    assert torch.allclose(*twice, rtol=1e-3, atol=1e-2 * float(twice[1].abs().mean()))
    for dtype in (torch.float64, torch.bfloat16):
        assert torch.equal(linear(x.to(dtype), w.to(dtype)), F.linear(x.to(dtype), w.to(dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear(x, w), F.linear(x, w)) and linear(x, w).dtype == torch.bfloat16
    assert linear(x[:0], w).shape == (0, 3, 130) and linear(x[0, 0], w).shape == (130,)
    out = linear(x, w)
    out.mul_(2)  # what a layer may do with it
    assert torch.allclose(out, 2 * F.linear(x, w), atol=1e-4)


@pytest.mark.parametrize("rows", [4, 12, 30, 64, 128, 640])
@pytest.mark.parametrize("packed", [False, True])
def test_a_row_depends_on_no_other_row(way, rows, packed):
    layer = torch.nn.Linear(640, 320)
    layer.__class__, layer.pack = FastLinear, products.Pack()
    layer.pack.used = packed
    x, order = numbers(rows, 640), torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        want = layer(x)
        assert torch.equal(layer(x[order]), want[order])
        other = numbers(rows, 640, seed=7)
        for at in (0, rows // 2, rows - 1):
            other[at] = x[at]
            assert torch.equal(layer(other)[at], want[at])


def test_few_sizes_are_computed():
    sizes = [rounded(n) for n in range(1, 513)]
    assert all(n <= size <= 1.25 * n for n, size in enumerate(sizes, 1)) and len(set(sizes)) == 32
    assert all(rounded(n) == n for n in (*range(1, 9), 16, 32, 48, 64, 96, *range(128, 8193, 128)))


# --- models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2"])
def test_layers_of_a_model_and_what_stays(make_lm, way, family, tmp_path):
    lm = make_lm(family, **WIDE)
    assert bool(fast(lm)) == (way == "onednn")
    state = lm.model.state_dict()
    assert not any("pack" in name for name in state)
    if family == "llama":
        engine = LocalEngine(lm, 4, 64)
        run(engine, [Request((1, 2, 3), max_tokens=4)])
    twin = copy.deepcopy(lm.model)
    assert [n for n, _ in twin.named_parameters()] == [n for n, _ in lm.model.named_parameters()]
    assert all(m.pack._weight is None and not m.pack.used for m in twin.modules() if isinstance(m, FAST))
    lm.model.save_pretrained(tmp_path)
    again = type(lm.base).from_pretrained(tmp_path)
    assert all(torch.equal(t, state[n]) for n, t in again.state_dict().items())


def test_small_other_and_absent_layers_are_left_alone(make_lm, monkeypatch):
    """64 wide: the plain path. Other dtypes and devices: not touched."""
    monkeypatch.setattr(products, "onednn", lambda: True)
    assert not fast(make_lm("llama")) and not fast(make_lm("llama", dtype=torch.float64, **WIDE))
    assert fast(make_lm("llama", **WIDE))
    for device, dtype in (("meta", torch.float32), ("cpu", torch.bfloat16)):
        layer = torch.nn.Sequential(torch.nn.Linear(600, 600, device=device, dtype=dtype))
        products.adopt(layer)
        assert type(layer[0]) is torch.nn.Linear
    frozen = type("Linear4bit", (torch.nn.Linear,), {})(600, 600)
    products.adopt(frozen)
    assert type(frozen).__name__ == "Linear4bit"


@pytest.mark.parametrize(("family", "lora"), [("llama", False), ("llama", True), ("gpt2", False), ("gpt2", True)])
def test_gradient_of_a_model_is_the_plain_one(make_lm, way, family, lora):
    """Tied and untied output layers, adapters over frozen weights, chunks over the vocabulary."""
    plain = make_lm(family, **WIDE)
    base, names = copy.deepcopy(plain.base), ["c_attn", "c_fc"] if family == "gpt2" else ["q_proj", "down_proj"]
    if lora:
        base = add_lora(base, ModelConfig(lora=LoraConfig(rank=8, targets=names)))
        for n, p in base.named_parameters():
            if "lora_B" in n:
                p.data.copy_(numbers(*p.shape) / 50)
    exact = LM(copy.deepcopy(base).double(), plain.tokenizer, "exact")
    lm = LM(base, plain.tokenizer, "policy")
    draw = np.random.default_rng(0)
    samples = [Sample(draw.integers(0, 250, 90), {"weight": np.ones(90) * (np.arange(90) > 0)}, mass={"weight": 89.0})
               for _ in range(14)]  # fmt: skip
    losses, grads = [], []
    for model in (exact, lm):
        losses.append(Learner({"policy": model}, LearnerConfig()).gradient(samples, Sft())["loss"])
        grads.append({n: p.grad for n, p in model.parameters()})
    assert losses[1] == pytest.approx(losses[0], rel=1e-6) and grads[0].keys() == grads[1].keys()
    for name, want in grads[0].items():
        assert (grads[1][name] - want).abs().max() <= 2e-5 * float(want.abs().max()) + 1e-9, name


# --- the engine ----------------------------------------------------------------------------------------------------


def asked(n=2):
    draw = np.random.default_rng(0)
    return [Request(tuple(draw.integers(0, 250, k).tolist()), n=n, max_tokens=20 - i, key=f"r{i}")
            for i, k in enumerate((3, 17, 33, 40, 5, 64))]  # fmt: skip


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("slots", [4, 9])
def test_bitwise_over_slot_neighbours_and_arrival(make_lm, way, family, slots):
    lm = make_lm(family, **WIDE)
    new = lambda: LocalEngine(lm, slots=slots, max_len=128)
    together = run(new(), asked())
    assert together == run(new(), asked()[::-1])[::-1] == [run(new(), [r])[0] for r in asked()]
    assert not any(m.pack._weight is None for m in fast(lm))


def test_changed_weights_are_packed_again(make_lm, way):
    """By publish, by an optimiser without publish, through `.data`, by a new parameter, and by loading a state."""
    lm = make_lm("llama", **WIDE)
    engine = LocalEngine(lm, slots=4, max_len=128)
    greedy = [Request(r.prompt, SamplingLaw(temperature=0), 1, 12) for r in asked()]

    def right():
        fresh = LM(copy.deepcopy(lm.model), lm.tokenizer, "fresh")
        return [c.logp for (c,) in run(LocalEngine(fresh, slots=4, max_len=128), greedy)]

    def drawn():
        return [c.logp for (c,) in run(engine, greedy)]

    seen = [drawn()]
    layers = [m for m in lm.model.modules() if hasattr(m, "weight") and m.weight.ndim == 2]
    adam = torch.optim.AdamW(lm.model.parameters(), lr=0.02)

    def by_optimiser():
        for k, p in enumerate(lm.model.parameters()):
            p.grad = numbers(*p.shape, seed=k)
        adam.step()

    def by_data():
        for m in layers:
            m.weight.data.mul_(1.1)

    def by_new_parameter():
        for k, m in enumerate(layers):
            m.weight = torch.nn.Parameter(numbers(*m.weight.shape, seed=100 + k) / 10)

    def by_data_of_another():
        for k, m in enumerate(layers):
            m.weight.data = numbers(*m.weight.shape, seed=200 + k) / 10

    def by_state():
        lm.model.load_state_dict({n: t * 0.9 for n, t in lm.model.state_dict().items()})

    for change in (by_optimiser, by_data, by_new_parameter, by_data_of_another, by_state):
        change()
        seen.append(drawn())
        assert seen[-1] == right() and seen[-1] != seen[-2], change.__name__
    publish(engine, 1, Weights(lm))
    assert all(m.pack._weight is None for m in fast(lm)) and drawn() == seen[-1]


def test_a_copy_takes_new_weights(make_lm, way):
    lm = make_lm("llama", **WIDE)
    engine = LocalEngine(engine_copy(lm, torch.float32), slots=4, max_len=128)
    before = run(engine, asked())
    with torch.no_grad():
        for p in lm.model.parameters():
            p.mul_(1.05)
    publish(engine, 1, Weights(lm))
    after = run(engine, asked())
    assert after != before and after == run(LocalEngine(lm, slots=4, max_len=128), asked())


def test_samples_are_those_that_scoring_sees(make_lm, way):
    lm = make_lm("llama", **WIDE)
    engine = LocalEngine(lm, slots=4, max_len=128)
    for request, (c,) in zip(asked(1), run(engine, asked(1))):
        scored = engine.score_rows([request.prompt + c.tokens], [len(request.prompt)])[0]
        assert scored == pytest.approx(list(c.logp), abs=2e-5)


def test_packed_weights_count_as_memory(make_lm, monkeypatch):
    monkeypatch.setattr(products, "onednn", lambda: True)
    lm = make_lm("llama", **WIDE)
    large = [m for m in fast(lm) if m.weight.numel() >= products.LEAST_WEIGHTS]
    counted = []
    monkeypatch.setattr("trailmark.engines.local.need", lambda amount, *_: counted.append(amount))
    LocalEngine(lm, 4, 64)
    for m in large:
        m.__class__ = torch.nn.Linear
    LocalEngine(lm, 4, 64)
    assert counted[0] - counted[1] == sum(4 * m.weight.numel() for m in large) > 0


# --- which CPU -----------------------------------------------------------------------------------------------------


@pytest.fixture
def cpu(monkeypatch):
    """A CPU and a torch of our choice."""

    def set_up(vendor="AuthenticAMD", said="", wrong=""):
        monkeypatch.setenv(products.SWITCH, said)
        monkeypatch.setattr(products, "vendor", lambda: vendor)
        monkeypatch.setattr(products, "missing", lambda: wrong)
        products.onednn.cache_clear()

    yield set_up
    products.onednn.cache_clear()


@pytest.mark.parametrize(
    ("vendor", "said", "wrong", "used"),
    [("AuthenticAMD", "", "", True), ("HygonGenuine", "", "", True), ("GenuineIntel", "", "", False),
     ("", "", "", False), ("AuthenticAMD", "plain", "", False), ("GenuineIntel", "onednn", "", True),
     ("AuthenticAMD", "", "this CPU has no AVX2", False), ("GenuineIntel", "", "this CPU has no AVX2", False)],
)  # fmt: skip
def test_vendor_and_switch_decide(cpu, capsys, vendor, said, wrong, used):
    cpu(vendor, said, wrong)
    assert products.onednn() is used and products.onednn() is used
    assert (products.path() == "plain") is not used
    told = capsys.readouterr().err
    assert told.count("\n") == (bool(wrong) and vendor != "GenuineIntel") and told.startswith(wrong if told else "")


def test_an_unknown_switch_is_refused(cpu):
    cpu(said="fast")
    with pytest.raises(ModelError, match="TRAILMARK_PRODUCTS is 'fast': set it to plain or onednn, or leave it out"):
        products.onednn()


def test_what_is_missing_is_said(monkeypatch):
    def gone(*_):
        raise AttributeError("no such operator")

    for capability, product, says in (
        ("DEFAULT", products._product, "this CPU has no AVX2"),
        ("AVX2", gone, "this torch has other oneDNN operators (AttributeError)"),
        ("AVX2", lambda x, w: x @ w.t() + 1, "the oneDNN of this torch multiplies wrongly"),
    ):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda found=capability: found)
        monkeypatch.setattr(products, "_product", product)
        monkeypatch.setattr(products, "_pack", lambda w: w)
        assert products.missing() == says
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert products.missing() == "this torch was built without oneDNN"


def test_a_cpu_without_bfloat16_is_told_once(monkeypatch, capsys):
    for found, lines in (("avx2 avx512f", 1), ("avx512_bf16", 0), ("amx_bf16", 0), ("", 0)):
        monkeypatch.setattr(hardware, "flags", lambda found=found: frozenset(found.split()))
        hardware.tell_bf16.cache_clear()
        check_bf16("cpu", "model.dtype", "float32")
        check_bf16(torch.device("cpu"), "engine.dtype", "float32")
        assert capsys.readouterr().err.count("no instructions for bfloat16") == lines
    hardware.tell_bf16.cache_clear()


def test_an_engine_in_bfloat16(make_lm):
    """Bitwise over neighbours and arrival; log-probs near those of float32 (0.02 on average)."""
    lm = make_lm("llama", **WIDE)
    held = engine_copy(lm, torch.bfloat16)
    assert LocalEngine(held, slots=4, max_len=128).packed.bytes == 0
    new = lambda: LocalEngine(held, slots=4, max_len=128)
    together = run(new(), asked())
    assert together == run(new(), asked()[::-1])[::-1]
    exact = LocalEngine(lm, slots=4, max_len=128)
    for request, (c, _) in zip(asked(), together):
        scored = exact.score_rows([request.prompt + c.tokens], [len(request.prompt)])[0]
        assert np.abs(np.subtract(scored, c.logp)).mean() <= 0.02
