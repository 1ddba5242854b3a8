"""When layers are compiled and when they are not, what happens if torch cannot, and the readout's numbers."""

import math
from types import SimpleNamespace

import pytest
import torch

from trailmark.models import attention, compiled
from trailmark.models.attention import Layout, Prefill
from trailmark.models.compiled import CompiledLayers

FAILURE = compiled.failures()[0]


def prefill(rows, width):
    pos = torch.arange(width)[None].expand(rows, -1)
    return Prefill(torch.full_like(pos, width), pos)


def line(width, rows=1):
    return Layout(torch.full((rows, width), width), torch.arange(width)[None].expand(rows, -1))


@pytest.mark.parametrize("said, weights, want", [
    ("", compiled.LEAST - 1, False), ("", compiled.LEAST, True), ("0", compiled.LEAST, False), ("1", 1, True),
])  # fmt: skip
def test_which_models_are_worth_it(monkeypatch, said, weights, want):
    monkeypatch.setenv("TRAILMARK_COMPILE", said)
    base = SimpleNamespace(parameters=lambda: iter([torch.empty(weights, device="meta")]))
    layers = CompiledLayers()
    assert layers.worth(base) is want and layers.wanted is want
    monkeypatch.setenv("TRAILMARK_COMPILE", "0" if want else "1")
    assert layers.worth(base) is want  # decided once
    assert CompiledLayers(wanted=not want).worth(base) is (not want)


def test_a_prefill_is_compiled_from_its_second_time_on_if_it_is_large(capsys):
    layers = CompiledLayers(wanted=True)
    small, large = prefill(3, 1000), prefill(4, compiled.WORTH // 4)
    assert [layers._use(None, small) for _ in range(3)] == [False] * 3 and layers.shapes == set()
    assert [layers._use(None, large) for _ in range(3)] == [False, True, True]
    assert layers._use(None, prefill(5, compiled.WORTH // 4)) is False
    assert layers.shapes == {(4, 4096), (5, 4096)} and len(layers.lengths) == 1
    said = "compiling the model's layers for this GPU: a minute the first time, then kept\n"
    assert capsys.readouterr().err == said  # once
    with torch.no_grad():  # without a gradient it is another graph
        assert layers._use(None, large)
    assert len(layers.lengths) == 2


def test_other_layouts_and_too_many_shapes(monkeypatch):
    layers = CompiledLayers(wanted=True)
    assert not layers._use(None, line(128))  # on a CPU
    assert not layers._use(None, object())
    monkeypatch.setattr(Layout, "flexible", property(lambda self: True))
    assert not layers._use(None, line(128, rows=2))
    for k in range(compiled.MOST):
        assert layers._use(None, line(128 * (k + 1)))
    assert not layers._use(None, line(128 * 99))
    assert layers._use(None, line(128))  # a shape that is there already
    assert not CompiledLayers(wanted=False)._use(None, line(128))


def test_a_failure_to_compile_is_one_line_and_the_pass_is_made_again(make_lm, monkeypatch, capsys):
    monkeypatch.setattr(compiled, "WORTH", 8)
    base = make_lm("llama", layers=2).base
    layers, inner = CompiledLayers(wanted=True), compiled._layers(base)
    assert len(inner) == 2
    states = lambda: [x._compiled_call_impl is not None for x in inner]
    seen = []

    def forward():
        seen.append(states())
        if seen[-1] == [True, True]:
            raise FAILURE("no kernel")
        return torch.tensor(3.0)

    assert layers.run(base, prefill(1, 8), forward) == 3 and seen == [[False, False]]
    capsys.readouterr()
    assert layers.run(base, prefill(1, 8), forward) == 3 and seen[1:] == [[True, True], [False, False]]
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == f"this torch cannot compile {type(base).__name__} ({FAILURE.__name__}): it runs uncompiled"
    assert layers.run(base, prefill(1, 8), forward) == 3 and seen[3:] == [[False, False]]
    assert layers.wanted is False and capsys.readouterr().err == ""


def test_an_error_of_the_model_is_not_taken_for_one_of_the_compiler(make_lm, monkeypatch):
    monkeypatch.setattr(compiled, "WORTH", 8)
    base, layers = make_lm("llama", layers=1).base, CompiledLayers(wanted=True)

    def wrong():
        raise IndexError("token 999")

    for _ in range(2):
        with pytest.raises(IndexError, match="token 999"):
            layers.run(base, prefill(1, 8), wrong)
    assert layers.wanted is True
    layers.off(base)
    assert [x._compiled_call_impl for x in compiled._layers(base)] == [None]


def test_a_step_that_cannot_be_compiled_runs_as_it_is(monkeypatch, capsys):
    tries = []

    def refuses(step, dynamic):
        def call(*args):
            tries.append(args)
            raise FAILURE("no kernel")

        return call

    monkeypatch.setattr(torch, "compile", refuses)
    call = compiled.whole(lambda a, b: a - b, "a step")
    assert [call(5, 3), call(1, 2)] == [2, -1] and tries == [(5, 3)]  # tried once
    assert capsys.readouterr().err == f"this torch cannot compile a step ({FAILURE.__name__}): it runs uncompiled\n"
    monkeypatch.setenv("TRAILMARK_COMPILE_ERRORS", "1")
    with pytest.raises(FAILURE, match="no kernel"):
        compiled.whole(lambda a: a, "a step")(1)


@pytest.mark.parametrize("config, want", [
    ({}, [None]), ({"sliding_window": 8}, [8]), ({"sliding_window": None, "layer_types": ["full_attention"]}, [None]),
    ({"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}, [None, 8]),
    ({"sliding_window": 8, "use_sliding_window": False}, [None]),
    ({"sliding_window": 8, "use_sliding_window": True}, [8]),
])  # fmt: skip
def test_windows_of_a_family(config, want):
    assert compiled._windows(SimpleNamespace(**config)) == want


def test_log_probs_and_entropies_against_a_loop():
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    target, heat = torch.tensor([0, 5, 2, 2]), torch.tensor([1.0, 0.5, 2.0, 1.0])
    logp, entropy = compiled._numbers(logits, target, heat, True)
    assert torch.equal(compiled._numbers(logits, target, heat, False)[0], logp)
    for r in range(4):
        raw = [math.exp(float(x) / float(heat[r])) for x in logits[r]]
        p = [x / sum(raw) for x in raw]
        assert float(logp[r]) == pytest.approx(math.log(p[target[r]]), abs=1e-5)
        assert float(entropy[r]) == pytest.approx(-sum(x * math.log(x) for x in p), abs=1e-5)


def test_a_torch_that_cannot_compile_flex_attention_computes_with_a_mask_and_says_so(make_lm, monkeypatch, capsys):
    """As on a GPU: lines of 128 go to FlexAttention, whose compiler fails here, in the mask or in the attention."""
    lm = make_lm("llama", layers=2)
    ids = (torch.arange(128)[None] * 37 + 11) % lm.vocab
    pos = torch.arange(128)[None]
    end = torch.full_like(ids, 128)
    want = lm.hidden(ids, Layout(end, pos), pos)

    def refuses(*args, **kwargs):
        tries.append(1)
        raise FAILURE("no kernel")

    whole = property(lambda self: attention.Flex.works and self.end.shape[1] % attention.FLEX_BLOCK == 0)
    monkeypatch.setattr(Layout, "flexible", whole)
    mask = lambda *args, **kwargs: None
    for flex in ((refuses, mask), (mask, refuses)):
        monkeypatch.setattr(attention.Flex, "works", True)
        monkeypatch.setattr(attention, "_flex", lambda flex=flex: flex)
        tries = []
        for _ in range(2):
            assert torch.equal(lm.hidden(ids, Layout(end, pos), pos), want)
        assert len(tries) == 1 and attention.Flex.works is False
        said = f"this torch cannot compile FlexAttention ({FAILURE.__name__}): attention is computed with a mask, "
        assert capsys.readouterr().err == said + "more slowly\n"


def test_a_mask_that_cannot_be_compiled_is_a_failure_of_the_layers_too(make_lm, monkeypatch, capsys):
    base, layers = make_lm("llama", layers=1).base, CompiledLayers(wanted=True)
    monkeypatch.setattr(Layout, "flexible", property(lambda self: True))

    def refuses(*args, **kwargs):
        raise FAILURE("no kernel")

    monkeypatch.setattr(attention, "_flex", lambda: (refuses, refuses))
    assert layers.run(base, line(128), lambda: torch.tensor(3.0)) == 3
    assert layers.wanted is False and "it runs uncompiled" in capsys.readouterr().err
