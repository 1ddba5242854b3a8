"""A sequence that is not computed as transformers computes it alone is refused: a model's context ends before it."""

import numpy as np
import pytest
import torch
import transformers as hf

from trailmark.config import ModelConfig, ModelShape
from trailmark.engines import local
from trailmark.engines.base import EngineError, Request, run
from trailmark.engines.local import LocalEngine
from trailmark.engines.weights import engine_copy
from trailmark.errors import LearnError, ModelError
from trailmark.models.forward import fill, pack
from trailmark.models.load import load_model
from trailmark.models.readout import Readout
from trailmark.models.tiny import tiny_tokenizer
from trailmark.types import Sample, SamplingLaw

SIZES = {"vocab_size": 260, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
HEADS = {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 28, "patch_size": 14}  # fmt: skip
ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}


def rope(kind, **more):
    return {"rope_parameters": {"rope_theta": 10000.0, "rope_type": kind, **more}}


LONG = rope("longrope", short_factor=[1.0] * 4, long_factor=[4.0, 3.0, 2.0, 5.0], original_max_position_embeddings=16)


@pytest.fixture
def saved(tmp_path):
    """A folder with a random model of a config, large enough that attention matters, and a tokenizer."""

    def save(config):
        torch.manual_seed(0)
        model = hf.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for p in model.parameters():
                if p.ndim > 1:
                    p.normal_(std=0.15)
        model.save_pretrained(tmp_path)
        tiny_tokenizer().save_pretrained(tmp_path)
        return str(tmp_path)

    return save


def opened(folder):
    own = hf.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    return load_model(ModelConfig(name=folder, dtype="float32", device="cpu")), own


def alone(own, row):
    """Log-probs of the tokens of one row after its first, from transformers."""
    ids = torch.as_tensor(row)[None]
    with torch.no_grad():
        logp = own(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
    return logp.gather(1, ids[0, 1:, None])[:, 0].numpy()


def sample(n, start=3):
    return Sample(np.arange(start, start + n), {"weight": np.r_[0.0, np.ones(n - 1)]}, {"weight": 1.0})


def scored(lm, samples, shape="auto"):
    return fill({"policy": lm}, samples, pack({"policy": lm}, samples, shape), [Readout("logp", law=False)])


def test_longrope_ends_where_its_frequencies_change(saved, capsys):
    lm, own = opened(saved(hf.Phi3Config(**SIZES, **HEADS, **ENDS, original_max_position_embeddings=16, **LONG)))
    assert lm.context == engine_copy(lm, torch.float32).context == 16
    assert "longrope" in capsys.readouterr().err
    rows = [sample(16), sample(9, 40)]
    for one in scored(lm, rows):
        assert np.abs(one.streams["logp"][1:] - alone(own, one.tokens)).max() < 2e-5
    with pytest.raises(LearnError, match="17 tokens does not fit the model's context of 16"):
        scored(lm, [sample(17), sample(9, 40)])
    # that sample would have changed the shorter one: in one batch transformers takes other frequencies for both
    batch, pos = torch.zeros(2, 17, dtype=torch.int64), torch.arange(17).expand(2, -1)
    batch[0], batch[1, :9] = torch.arange(3, 20), torch.arange(40, 49)
    with torch.no_grad():
        beside = own(input_ids=batch, position_ids=pos, use_cache=False).logits[1, :8].log_softmax(-1)
    assert np.abs(beside.gather(1, batch[1, 1:9, None])[:, 0].numpy() - alone(own, batch[1, :9])).max() > 0.1


def test_the_engine_keeps_to_it(saved):
    lm, own = opened(saved(hf.Phi3Config(**SIZES, **HEADS, **ENDS, original_max_position_embeddings=16, **LONG)))
    engine = LocalEngine(lm, slots=2, max_len=64)
    prompts = [tuple(range(3, 3 + n)) for n in (5, 9)]
    for prompt, (done,) in zip(prompts, run(engine, [Request(p, max_tokens=30) for p in prompts]), strict=True):
        assert len(done.tokens) == 16 - len(prompt) and done.stop == "context_full"
        assert np.abs(np.array(done.logp) - alone(own, [*prompt, *done.tokens])[len(prompt) - 1 :]).max() < 2e-5
    with pytest.raises(EngineError, match="use a model with a longer context"):
        run(engine, [Request(tuple(range(16)))])


def test_a_free_slot_does_not_change_dynamic_positions(saved, monkeypatch):
    """On a GPU free slots decode too. Their positions stay inside the context: past it, the frequencies of all slots
    would change."""
    monkeypatch.setattr(local, "AHEAD", True)
    sizes = {**SIZES, **HEADS, "max_position_embeddings": 16}
    lm, own = opened(saved(hf.LlamaConfig(**sizes, **ENDS, **rope("dynamic", factor=4.0))))
    engine = LocalEngine(lm, slots=2)
    run(engine, [Request(tuple(range(3, 13)), n=2, max_tokens=6)])  # leaves both slots at the end of the context
    ((done,),) = run(engine, [Request((7, 8, 9), max_tokens=13, law=SamplingLaw(temperature=0.0))])
    assert np.abs(np.array(done.logp) - alone(own, [7, 8, 9, *done.tokens])[2:]).max() < 2e-5


def test_a_window_that_only_a_mask_has_ends_the_context(saved, capsys):
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    lm, own = opened(saved(hf.PhimoeConfig(**SIZES, **HEADS, **ENDS, **experts, sliding_window=40)))
    assert lm.context == 40 and "a window of 40 tokens" in capsys.readouterr().err
    (one,) = scored(lm, [sample(40)])
    assert np.abs(one.streams["logp"][1:] - alone(own, one.tokens)).max() < 2e-5


def test_a_window_that_attention_is_told_about_is_no_limit(saved):
    lm, own = opened(saved(hf.MistralConfig(**SIZES, **HEADS, **ENDS, sliding_window=40)))
    assert lm.context == 64
    (one,) = scored(lm, [sample(64)])
    assert np.abs(one.streams["logp"][1:] - alone(own, one.tokens)).max() < 2e-5


def test_the_text_part_of_a_model_with_images_says_its_context(saved):
    text = hf.Gemma3TextConfig(**SIZES, **HEADS, **ENDS, head_dim=8, sliding_window=40)
    config = hf.Gemma3Config(text_config=text, vision_config=VISION, image_token_id=259, mm_tokens_per_image=4)
    lm, own = opened(saved(config))
    assert lm.context == 64
    (one,) = scored(lm, [sample(64)])
    assert np.abs(one.streams["logp"][1:] - alone(own, one.tokens)).max() < 2e-5


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (hf.BloomConfig(vocab_size=260, hidden_size=32, n_layer=2, n_head=4), "cannot be computed with Trailmark's"),
        (hf.MambaConfig(vocab_size=260, hidden_size=32, num_hidden_layers=2, state_size=8), "cannot be computed with"),
        (hf.FalconConfig(**SIZES), "transformers has no way to replace the attention of this family"),
    ],
    ids=["bloom", "mamba", "falcon"],
)
def test_a_family_that_cannot_run_here_is_refused_with_a_sentence(saved, config, said):
    folder = saved(config)
    with pytest.raises(ModelError, match=said) as problem:
        load_model(ModelConfig(name=folder, dtype="float32", device="cpu"))
    assert folder in str(problem.value) and str(problem.value).count("\n") == 0


def test_a_model_with_a_state_is_never_padded_on_the_left(saved, capsys):
    sizes = {**SIZES, **HEADS}
    folder = saved(hf.Lfm2Config(**sizes, **ENDS, layer_types=["conv", "full_attention"]))
    lm, own = opened(folder)
    assert capsys.readouterr().err.count("packing is not exact") == 2  # tree and flat
    opened(folder)
    assert capsys.readouterr().err == ""  # told once
    for one in scored(lm, [sample(16), sample(9, 40)], "left"):
        assert np.abs(one.streams["logp"][1:] - alone(own, one.tokens)).max() < 2e-5


def test_a_plan_reads_the_text_part_too(saved, tmp_path):
    """Of a model with images, and of one without attention."""
    from trailmark import plan

    text = hf.Gemma3TextConfig(**SIZES, **HEADS, **ENDS, head_dim=8, sliding_window=40)
    folder = saved(hf.Gemma3Config(text_config=text, vision_config=VISION, image_token_id=259, mm_tokens_per_image=4))
    assert plan._widths(plan._shape(ModelConfig(name=folder))) == (32, 48, 32, 16)
    hf.MambaConfig(vocab_size=260, hidden_size=32, num_hidden_layers=2).save_pretrained(tmp_path / "mamba")
    with pytest.raises(ModelError, match="no attention heads"):
        plan._shape(ModelConfig(name=str(tmp_path / "mamba")))


@pytest.mark.parametrize("context", [2, 5, 9, 16])
def test_a_model_with_a_short_context_is_checked_within_it(context):
    shape = ModelShape(family="gpt2", layers=1, width=16, heads=2, context=context)
    lm = load_model(ModelConfig(name="tiny", shape=shape, device="cpu"))
    assert lm.sharing == "tree" and LocalEngine(lm).max_len == context
