"""Model families that we cannot compute are refused with their name."""

import pytest
import torch
import transformers as hf

from trailmark.engines.base import EngineError
from trailmark.engines.local import LocalEngine
from trailmark.engines.weights import engine_copy
from trailmark.errors import ModelError
from trailmark.models import layout_check
from trailmark.models.attention import NAME
from trailmark.models.layout_check import decodes, richest_layout
from trailmark.models.lm import LM
from trailmark.models.load import _no_dropout
from trailmark.models.tiny import tiny_tokenizer

SMALL = {
    "vocab_size": 260,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
}


def made(config):
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation=NAME).eval()
    return LM(model, tiny_tokenizer(), config.model_type)


def test_attention_sinks_are_refused():
    config = hf.GptOssConfig(
        **SMALL, num_key_value_heads=2, intermediate_size=32, head_dim=16, num_local_experts=2, num_experts_per_tok=1
    )
    with pytest.raises(ModelError, match="sinks"):
        made(config).check_output_layer()


def test_a_mixer_with_a_state_is_not_sampled_from():
    """A convolution sees its neighbours by index and keeps a state of its own: padded rows train it, slots cannot
    decode it."""
    lm = made(
        hf.Lfm2Config(**SMALL, num_key_value_heads=2, intermediate_size=64, layer_types=["conv", "full_attention"])
    )
    with torch.no_grad():
        for p in lm.model.parameters():
            p.normal_(std=0.3)
    assert richest_layout(lm)[0] == "rows"
    assert "its layers see more than keys and values" in decodes(lm)
    with pytest.raises(EngineError, match="lfm2' cannot be sampled from here"):
        LocalEngine(lm)


def test_a_state_shows_also_where_its_effect_is_small():
    """With the small weights that a new model starts from, a convolution changes the logits by less than rounding may.
    Training would make that large."""
    lm = made(
        hf.Lfm2Config(**SMALL, num_key_value_heads=2, intermediate_size=64, layer_types=["conv", "full_attention"])
    )
    with pytest.raises(EngineError, match="lfm2' cannot be sampled from here"):
        LocalEngine(lm)


def test_two_attentions_in_one_layer_are_not_sampled_from():
    with pytest.raises(ModelError, match="attends twice in one layer"):
        LocalEngine(made(hf.DiffLlamaConfig(**SMALL, num_key_value_heads=2, intermediate_size=64)))


def test_the_memory_of_a_slot_is_what_its_layers_keep():
    """Two layers of two heads that keep 8 + 4 numbers for a key and 6 for a value: 2 * 2 * 18 = 72 a token."""
    sizes = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
    experts = {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "n_shared_experts": 1}
    more = {"num_key_value_heads": 2, "intermediate_size": 64, "n_group": 1, "topk_group": 1}
    lm = made(hf.DeepseekV2Config(**SMALL, **sizes, **experts, **more))
    assert decodes(lm) == "" and lm.kept == 72


def test_dropout_that_is_a_function_is_off_too():
    config = hf.OPTConfig(**SMALL, ffn_dim=64, word_embed_proj_dim=32, dropout=0.5, attention_dropout=0.5)
    lm = made(config)
    _no_dropout(lm.model)
    lm.train(True)
    ids = torch.arange(9)[None]
    assert torch.equal(lm.model(ids).logits, lm.model(ids).logits)


@pytest.mark.parametrize("loaded", [True, False])
def test_a_copy_for_the_engine_is_not_probed_again(monkeypatch, loaded):
    """A probe in another dtype would compile for a minute on a GPU, and could fail by rounding alone."""
    lm = made(hf.LlamaConfig(**SMALL, intermediate_size=64))
    if loaded:
        richest_layout(lm)
    else:
        decodes(lm)
    assert lm.leaks is False and lm.compiled.wanted is None
    copy = engine_copy(lm, torch.bfloat16)
    monkeypatch.setattr(layout_check, "check_layout", lambda *a: pytest.fail("probed again"))
    assert decodes(copy) == "" and copy.kept == 2 * 2 * 32
