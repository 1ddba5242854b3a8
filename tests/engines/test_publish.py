"""Weights reach an engine through one call, and a probe proves it."""

import asyncio

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from trailmark.config import LoraConfig, ModelConfig, ModelShape
from trailmark.engines.base import EngineError, Request, publish, run
from trailmark.engines.http import HttpEngine
from trailmark.engines.local import LocalEngine
from trailmark.engines.scripted import ScriptedEngine
from trailmark.engines.weights import Weights, engine_copy, mergeable
from trailmark.models.lm import LM
from trailmark.models.load import load_model
from trailmark.models.tiny import tiny_tokenizer

SHAPE = ModelShape(layers=1, width=32, heads=2, context=64)


HEAD = LoraConfig(rank=2, targets=["q_proj", "lm_head"])


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2), HEAD])
def test_a_copy_takes_the_weights_over(lora):
    lm = load_model(ModelConfig(shape=SHAPE, lora=lora))
    engine = LocalEngine(engine_copy(lm, torch.float32), 4, 64)
    asked = [Request((1, 2, 3), max_tokens=8)]
    before = run(engine, asked)
    with torch.no_grad():
        for _, p in lm.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(0)) * 0.3)
    assert run(engine, asked) == before  # not yet
    publish(engine, 7, Weights(lm))
    (after,), (own,) = run(engine, asked), run(LocalEngine(lm, 4, 64), asked)
    assert [c.tokens for c in after] == [c.tokens for c in own] and [after] != before and engine.version == 7
    for mine, theirs in zip(after, own):  # merged adapters round differently
        assert mine.logp == pytest.approx(theirs.logp, abs=1e-5) and (lora or mine == theirs)
    assert engine.lm.adapted == (lora is HEAD)  # tied to the embeddings, which the adapter leaves alone: not merged


@pytest.mark.parametrize("kind", ["ia3", "lora_bias", "dora", "embeddings", "experts", "quantised"])
def test_what_is_more_than_a_sum_of_weights_is_not_merged(kind):
    """Their changes reach the engine all the same."""
    import peft

    lm = load_model(ModelConfig(shape=ModelShape(family="qwen2", layers=1, width=32, heads=2, context=64)))
    names = ["q_proj", "v_proj"]
    settings = {
        "ia3": lambda: peft.IA3Config(target_modules=names, feedforward_modules=[], task_type="CAUSAL_LM"),
        "lora_bias": lambda: peft.LoraConfig(target_modules=names, lora_bias=True, task_type="CAUSAL_LM"),
        "dora": lambda: peft.LoraConfig(target_modules=names, use_dora=True, task_type="CAUSAL_LM"),
        "embeddings": lambda: peft.LoraConfig(target_modules=[*names, "embed_tokens"], task_type="CAUSAL_LM"),
        "experts": lambda: peft.LoraConfig(target_modules=[], target_parameters=["mlp.experts.down_proj"]),
        "quantised": lambda: peft.LoraConfig(target_modules=names, task_type="CAUSAL_LM"),
    }[kind]()
    if kind == "experts":
        few = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
        shape = MixtralConfig(vocab_size=lm.vocab, hidden_size=32, intermediate_size=64, **few)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            lm = LM(MixtralForCausalLM(shape).eval(), lm.tokenizer, "experts")
    lm.model = peft.get_peft_model(lm.model, settings)
    if kind == "quantised":
        lm.base.quantization_method = "bitsandbytes"
    assert not mergeable(lm)
    engine = LocalEngine(engine_copy(lm, torch.bfloat16), 4, 64)
    before = engine.score_rows([[1, 2, 3, 4, 5]], [1])[0]
    with torch.no_grad():
        for _, p in lm.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
    publish(engine, 1, Weights(lm))
    after, own = (e.score_rows([[1, 2, 3, 4, 5]], [1])[0] for e in (engine, LocalEngine(lm, 4, 64)))
    assert after == pytest.approx(own, rel=0.05) and max(abs(a - b) for a, b in zip(before, after)) > 0.05


def test_weights_that_do_not_arrive_are_noticed(monkeypatch):
    lm = load_model(ModelConfig(shape=SHAPE))
    held = engine_copy(lm, torch.bfloat16)
    engine = LocalEngine(held, 4, 64)
    publish(engine, 1, Weights(lm))
    with torch.no_grad():
        for _, p in lm.parameters():
            p.add_(1.0)
    own = held.model.state_dict
    monkeypatch.setattr(held.model, "state_dict", lambda: dict(list(own().items())[:3]))  # most are not copied
    with pytest.raises(EngineError, match="does not hold the learner's weights"):
        publish(engine, 2, Weights(lm))
    assert engine.version == 1


def test_weights_of_sixteen_bits_on_both_sides_arrive(tmp_path):
    """Weights that a file maps into memory lie at odd addresses. Equal weights of 16 bits at other addresses score a
    probe a little differently, because sums are rounded at other places."""
    torch.manual_seed(0)
    shape = Qwen2Config(
        vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=128, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen2ForCausalLM(shape).to(torch.bfloat16).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    lm = load_model(ModelConfig(name=str(tmp_path), dtype="bfloat16"))
    engine = LocalEngine(engine_copy(lm, torch.bfloat16), 4, 64)
    publish(engine, 1, Weights(lm))
    assert engine.version == 1
    assert all(torch.equal(a, b) for a, b in zip(engine.lm.model.parameters(), lm.model.parameters()))


def test_weights_do_not_change_under_a_sample():
    engine = LocalEngine(load_model(ModelConfig(shape=SHAPE)), 4, 64)

    async def meanwhile():
        asked = asyncio.create_task(engine.sample(Request((1, 2), max_tokens=9)))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="cannot change while"):
            await engine.publish(1)
        return await asked

    assert len(asyncio.run(meanwhile())[0].tokens) == 9
    publish(engine, 1)


def test_an_adapter_alone_makes_an_equal_model():
    """What an engine with the same base needs is the adapter: its trained tensors, without the rest."""
    from peft import set_peft_model_state_dict

    lm, other = (load_model(ModelConfig(shape=SHAPE, lora=LoraConfig(rank=2))) for _ in range(2))
    with torch.no_grad():
        for _, p in lm.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(0)) * 0.3)
    weights, ids = Weights(lm), [1, 2, 3, 4, 5]
    assert weights.probe(ids) != Weights(other).probe(ids)
    given = dict(weights.adapter())
    assert sum(t.numel() for t in given.values()) == sum(p.numel() for _, p in lm.parameters())
    set_peft_model_state_dict(other.model, given)
    assert weights.probe(ids) == Weights(other).probe(ids)
    assert not list(Weights(load_model(ModelConfig(shape=SHAPE))).adapter())


def test_what_is_no_model_of_this_process_takes_no_weights():
    for engine in (ScriptedEngine(lambda *_: "", tiny_tokenizer()), HttpEngine("http://127.0.0.1:9", "far")):
        with pytest.raises(EngineError, match=f"'{engine.name}' takes no weights"):
            publish(engine, 1)
