"""A saved model stops in other programs where it stops here."""

import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.config import LoraConfig, ModelConfig, ModelShape
from trailmark.engines.base import Request, run
from trailmark.engines.local import LocalEngine
from trailmark.learn.checkpoint import save_model
from trailmark.models.load import load_model
from trailmark.rollout.play import stop_ids
from trailmark.types import SamplingLaw


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("lora", [False, True])
def test_a_trained_model_stops_in_a_transformers_pipeline_where_it_stops_here(tmp_path, monkeypatch, family, lora):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Say it: ", "response": "yes"}\n')
    (tmp_path / "r.yaml").write_text(
        f"method: sft\ndata: rows.jsonl\nchat: false\nsteps: 40\nbatch: 4\nout: run\nlearner: {{optim: {{lr: 1e-2}}}}\n"
        f"model: {{shape: {{family: {family}, layers: 1, width: 32, heads: 2, context: 64}}"
        + (", lora: {rank: 8}}" if lora else "}")
    )
    said = CliRunner().invoke(app, ["train", "r.yaml"])
    assert said.exit_code == 0, said.output
    (folder,) = (tmp_path / "run" / "checkpoints").glob("*/policy")
    lm = load_model(ModelConfig(name=str(folder)))
    prompt = tuple(lm.tokenizer.encode("Say it: ", add_special_tokens=False))
    request = Request(prompt, SamplingLaw(temperature=0.0), 1, 20, stop_ids(lm.tokenizer), (), 0, "x")
    ((here,),) = run(LocalEngine(lm, slots=2), [request])
    assert here.text == "yes" and here.stop == "stopped"
    there = pipeline("text-generation", model=str(folder))
    (answer,) = there("Say it: ", max_new_tokens=20, do_sample=False, return_full_text=False)
    assert answer["generated_text"] == "yes"
    if not lora:
        settings = json.loads((folder / "generation_config.json").read_text())
        assert settings["eos_token_id"] == json.loads((folder / "config.json").read_text())["eos_token_id"]
        assert settings["eos_token_id"] == lm.tokenizer.eos_token_id


def test_ends_that_a_model_names_itself_are_kept_and_the_end_of_a_turn_is_added(tmp_path):
    lm = load_model(ModelConfig(shape=ModelShape(layers=1, width=32, heads=2, context=64)))
    ids = {w: lm.tokenizer.convert_tokens_to_ids(w) for w in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")}
    lm.tokenizer.eos_token = "<|endoftext|>"  # the template ends a turn with <|im_end|>
    lm.base.generation_config.eos_token_id = [ids["<|im_start|>"], 65]  # 65 is of another tokenizer
    lm.base.generation_config.temperature = 0.7  # without do_sample: transformers would refuse to save this
    folder, again = tmp_path / "own", tmp_path / "again"
    lm.base.generation_config.do_sample = True
    save_model(lm, folder, tmp_path / "base")
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "do_sample": False}))
    save_model(load_model(ModelConfig(name=str(folder))), again, tmp_path / "base")
    saved = AutoModelForCausalLM.from_pretrained(again).generation_config
    assert set(saved.eos_token_id) == {ids["<|endoftext|>"], ids["<|im_end|>"], ids["<|im_start|>"]}
    assert saved.pad_token_id == AutoTokenizer.from_pretrained(again).pad_token_id and saved.do_sample


def test_a_saved_reflector_ends_too(tmp_path):
    lm = load_model(ModelConfig(shape=ModelShape(layers=1, width=32, heads=2, context=64), lora=LoraConfig(rank=2)))
    save_model(lm, tmp_path / "checkpoints" / "000001" / "reflector", tmp_path / "base-reflector")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base-reflector")
    assert base.generation_config.eos_token_id == base.config.eos_token_id == lm.tokenizer.eos_token_id
