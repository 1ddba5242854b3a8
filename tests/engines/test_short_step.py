"""A decoding step without the modules of transformers: the numbers of the model's own code, bit for bit."""

import numpy as np
import pytest
import torch

from trailmark.config import ModelConfig
from trailmark.engines.base import Request, run
from trailmark.engines.local import LocalEngine
from trailmark.models.decode_step import short_step
from trailmark.models.load import load_model
from trailmark.types import SamplingLaw

KNOWN = ["llama", "mistral", "qwen2", "qwen3"]


def shaken(lm, seed=1):
    """Biases and norms that are neither 0 nor 1, as in a trained model."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in lm.model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=draw).to(p.dtype)
    return lm


def asked(seed=0):
    draw = np.random.default_rng(seed)
    laws = [SamplingLaw(), SamplingLaw(temperature=0.7, top_p=0.9), SamplingLaw(top_k=5), SamplingLaw(temperature=0)]
    lengths = (3, 17, 33, 40, 5)
    return [
        Request(tuple(draw.integers(0, 250, k).tolist()), laws[i % 4], 2, 24 - 2 * i, key=f"r{i}")
        for i, k in enumerate(lengths)
    ]


def both(lm, **how):
    """The same requests by the short step, and by the model's own code."""
    short, own = (LocalEngine(lm, slots=8, max_len=128, **how) for _ in range(2))
    assert short.decoder.short is not None
    own.decoder.short = None
    return run(short, asked()), run(own, asked())


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("family", KNOWN)
def test_bit_for_bit_what_the_model_computes(make_lm, family, fixed):
    lm = shaken(make_lm(family, window=16 if family == "mistral" else None, heads=8))
    short, own = both(lm, fixed=fixed)
    assert short == own


def test_published_weights_and_adapters_are_seen(make_lm):
    """The step reads weights where the model has them: a change in place is the next step's."""
    shape = {"family": "llama", "layers": 2, "width": 32, "heads": 4, "context": 128}
    lm = load_model(ModelConfig.model_validate({"name": "tiny", "shape": shape, "lora": {"rank": 2}}))
    engine = LocalEngine(lm, slots=8, max_len=128)
    assert engine.decoder.short is not None
    before = run(engine, asked())
    shaken(lm)
    after = run(engine, asked())
    assert before != after
    engine.decoder.short = None
    assert run(engine, asked()) == after


def test_models_that_have_no_short_step(make_lm):
    assert all(short_step(make_lm(family)) is None for family in ("gpt2", "gemma", "gemma2"))
    assert short_step(make_lm("llama", dtype=torch.float64)) is None
    assert short_step(make_lm("llama", dtype=torch.bfloat16)) is None
    assert short_step(make_lm("llama", context=1)) is None


def test_a_model_that_computes_something_else_keeps_its_own_code(make_lm):
    scaled = make_lm("llama")
    norm = scaled.base.base_model.layers[1].input_layernorm
    plain = norm.forward
    norm.forward = lambda x: plain(x) * (1 + 1e-6)
    assert short_step(scaled) is None
    heard = make_lm("llama")
    heard.base.base_model.layers[0].register_forward_hook(lambda *_: None)
    assert short_step(heard) is None


def test_rotary_angles_that_depend_on_the_length(make_lm):
    """`dynamic` angles grow with the longest sequence of a batch: they are asked for in every step."""
    lm = make_lm("llama", context=64)
    rotary = lm.base.base_model.rotary_emb
    rotary.rope_type = "dynamic"
    step = short_step(lm)
    assert step is not None and not step._static
    short, own = both(lm)
    assert short == own
