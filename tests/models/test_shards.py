"""`trailmark convert --to transformers`: checkpoints in pieces become one folder. The ZeRO checkpoints in deepspeed/
were written by DeepSpeed itself (write.py there says how), and truth.safetensors holds the weights in memory then."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hub_stand_in import FILES, MADE, hub_at
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.config import ModelConfig
from trailmark.models.load import load_model
from trailmark.models.pickled import read_pickled
from trailmark.models.tiny import tiny_config, tiny_tokenizer

ZERO = Path(__file__).parent / "zero_shards"
IDS = torch.tensor([[5, 9, 300, 2]])


def convert(*words):
    return CliRunner().invoke(app, ["convert", *map(str, words), "--to", "transformers"])


def refused(*words):
    """The one sentence of a refusal."""
    done = convert(*words)
    assert done.exit_code == 2 and "Traceback" not in done.output, done.output
    return " ".join(done.output.split())


@pytest.fixture
def model(tmp_path):
    """A small model in a folder, tied as SmolLM2 is."""
    torch.manual_seed(1)
    shape = tiny_config("llama", vocab=320, layers=2, width=16, heads=2, context=64)
    shape.tie_word_embeddings = True
    made = LlamaForCausalLM(shape)
    made.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return made, tmp_path / "model"


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_zero_is_what_was_in_memory(tmp_path, name):
    done = convert(ZERO / name, tmp_path / "out", "--like", "tiny")
    assert done.exit_code == 0, done.output
    assert f"DeepSpeed ZeRO {name[-1]}, 2 files" in done.output
    truth, mine = load_file(ZERO / name / "truth.safetensors"), load_file(tmp_path / "out/model.safetensors")
    assert mine.keys() == truth.keys() - {"model.scale"} and "lm_head.weight" not in mine
    assert all(torch.equal(mine[n], truth[n]) and mine[n].dtype == torch.float32 for n in mine)
    assert ("such as 'model.scale'" in done.output) == (name == "zero2")  # a buffer that no Llama has, left out
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    by_hand = LlamaForCausalLM(again.config)
    by_hand.load_state_dict({**{n: t for n, t in truth.items() if n != "model.scale"},
                             "lm_head.weight": truth["model.embed_tokens.weight"]})  # fmt: skip
    assert torch.equal(again(IDS).logits, by_hand(IDS).logits)
    assert load_model(ModelConfig(name=str(tmp_path / "out"))).tokenizer.eos_token == "<|im_end|>"


def test_the_stages_hold_the_same_run():
    """All three trained the same model on the same data, so their weights are the same (bfloat16 apart)."""
    one, two, three = (load_file(ZERO / f"zero{k}/truth.safetensors") for k in (1, 2, 3))
    assert all(torch.allclose(one[n], x[n], atol=0.02) for x in (two, three) for n in one)
    assert not torch.equal(one["model.norm.weight"], torch.ones(4))  # it was trained


def test_a_step_is_chosen_by_its_tag(tmp_path):
    shutil.copytree(ZERO / "zero1", tmp_path / "ds")
    (tmp_path / "ds/latest").write_text("global_step9")
    said = refused(tmp_path / "ds", tmp_path / "o")
    assert "'latest' names 'global_step9', and there is no such folder. Found: global_step2." in said
    said = refused(tmp_path / "ds", tmp_path / "o", "--tag", "global_step3")
    assert "--tag global_step3, and there is no such folder" in said
    assert convert(tmp_path / "ds", tmp_path / "o", "--tag", "global_step2").exit_code == 0
    shutil.copytree(ZERO / "zero1", tmp_path / "ckpt/_actor")
    assert "There are checkpoints in _actor" in refused(tmp_path / "ckpt", tmp_path / "p")


@pytest.mark.parametrize(
    ("stage", "file"),
    [
        ("zero1", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        ("zero2", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("zero2", "mp_rank_00_model_states.pt"),
        ("zero3", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("zero3", "zero_pp_rank_1_mp_rank_00_model_states.pt"),
    ],
)
def test_a_part_of_zero_is_missing(tmp_path, stage, file):
    shutil.copytree(ZERO / stage, tmp_path / "ds")
    (tmp_path / "ds/global_step2" / file).unlink()
    said = refused(tmp_path / "ds", tmp_path / "out")
    assert f"{tmp_path / 'ds/global_step2'} is not complete: {file} is missing" in said
    assert [p.name for p in tmp_path.iterdir()] == ["ds"]  # nothing was written
    (tmp_path / "ds/global_step2" / file).write_bytes((ZERO / stage / "global_step2" / file).read_bytes()[:4000])
    assert f"{file} is damaged" in refused(tmp_path / "ds", tmp_path / "out")


def test_parts_of_more_processes_than_the_last_run_had(tmp_path):
    shutil.copytree(ZERO / "zero2", tmp_path / "ds")
    step = tmp_path / "ds/global_step2"
    name = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
    shutil.copy(step / name.format(1), step / name.format(2))
    assert "holds the parts of 3 processes, and was last written by 2" in refused(tmp_path / "ds", tmp_path / "out")
    (step / name.format(2)).rename(step / "zero_pp_rank_0_mp_rank_01_optim_states.pt")
    assert "split the layers (mp_rank above 0)" in refused(tmp_path / "ds", tmp_path / "out")


def test_parts_that_do_not_belong_together(tmp_path):
    shutil.copytree(ZERO / "zero3", tmp_path / "ds")
    file = tmp_path / "ds/global_step2/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    held = read_pickled(file)
    held["optimizer_state_dict"] = {k: v for k, v in held["optimizer_state_dict"].items() if k != "loss_scaler"}
    held["optimizer_state_dict"]["fp32_flat_groups"] = [torch.zeros(640), torch.zeros(60)]
    torch.save(held, file)
    assert "they do not belong together" in refused(tmp_path / "ds", tmp_path / "out")


class Evil:
    def __reduce__(self):
        return print, ("this must not be said",)


def test_a_pickle_that_runs_code_is_not_read(tmp_path, model, capsys):
    _, folder = model
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Evil()}, folder / "pytorch_model.bin")
    said = refused(folder, tmp_path / "out")
    assert "pytorch_model.bin holds an object of kind" in said and "it is not read" in said and "print" in said
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": Evil()}))
    assert "pytorch_model.bin" in refused(folder, tmp_path / "out")
    assert "this must not be said" not in capsys.readouterr().out and not (tmp_path / "out").exists()


def in_pieces(model, folder, kind, pieces=3, index=True):
    """The folder with its weights in several files."""
    state = model.state_dict()
    del state["lm_head.weight"]
    (folder / "model.safetensors").unlink(missing_ok=True)
    stem, end = ("model", "safetensors") if kind == "safetensors" else ("pytorch_model", "bin")
    where = {}
    for k in range(pieces):
        part = {n: t.clone() for i, (n, t) in enumerate(state.items()) if i % pieces == k}
        name = f"{stem}-{k + 1:05d}-of-{pieces:05d}.{end}"
        where |= dict.fromkeys(part, name)
        save_file(part, folder / name, {"format": "pt"}) if end == "safetensors" else torch.save(part, folder / name)
    if index:
        (folder / f"{stem}.{end}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return where


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_pieces_become_one_folder(tmp_path, model, kind, index):
    made, folder = model
    in_pieces(made, folder, kind, index=index)
    done = convert(folder, tmp_path / "out")
    assert done.exit_code == 0 and f"{kind}, 3 files" in done.output, done.output
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json"]  # fmt: skip
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(again(IDS).logits, made(IDS).logits)
    lm = load_model(ModelConfig(name=str(tmp_path / "out")))
    assert lm.tokenizer.chat_template == tiny_tokenizer().chat_template
    assert "exists: choose another folder" in refused(folder, tmp_path / "out")


def test_one_bin_file_and_another_type_of_numbers(tmp_path, model):
    made, folder = model
    (folder / "model.safetensors").unlink()
    state = {f"module.{n}": t for n, t in made.state_dict().items()}  # as a wrapper names them, both ends of the tie
    row = torch.cat([state["module.model.norm.weight"].detach(), torch.zeros(9)])
    state["module.model.norm.weight"] = row[:16]  # a part of something longer
    torch.save(state, folder / "pytorch_model.bin")
    assert convert(folder, tmp_path / "out", "--dtype", "bfloat16").exit_code == 0
    mine = load_file(tmp_path / "out/model.safetensors")
    want = {n: t.bfloat16() for n, t in made.state_dict().items()}
    assert all(torch.equal(t, want[n]) for n, t in mine.items()) and want.keys() - mine.keys() == {"lm_head.weight"}
    assert load_model(ModelConfig(name=str(tmp_path / "out"), dtype="bfloat16")).context == 64


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("index", [True, False])
def test_a_missing_piece_is_named(tmp_path, model, kind, index):
    made, folder = model
    where = in_pieces(made, folder, kind, index=index)
    name = sorted(set(where.values()))[1]
    (folder / name).unlink()
    assert f"{folder} is not complete: {name} is missing, one of its 3 files." in refused(folder, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_what_does_not_fit(tmp_path, model):
    made, folder = model
    where = in_pieces(made, folder, "safetensors")
    name = where["model.norm.weight"]
    held = load_file(folder / name)
    norm = held.pop("model.norm.weight")
    save_file(held, folder / name, {"format": "pt"})
    assert "has no weight 'model.norm.weight', which the index says" in refused(folder, tmp_path / "out")
    (folder / "model.safetensors.index.json").unlink()
    said = refused(folder, tmp_path / "out")
    assert "has no weight 'model.norm.weight', which its config.json asks for (1 are missing)" in said
    save_file({**held, "model.norm.weight": norm[:3].clone()}, folder / name, {"format": "pt"})
    assert "do not fit its config.json" in refused(folder, tmp_path / "out")
    save_file({**held, "model.norm.weight": norm}, folder / name, {"format": "pt"})
    (folder / "config.json").unlink()
    assert "has no config.json: name the model" in refused(folder, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    (tmp_path / "empty").mkdir()
    assert "holds no checkpoint" in refused(tmp_path / "empty", tmp_path / "out")
    assert "is no folder" in refused(tmp_path / "nowhere", tmp_path / "out")
    assert "--dtype 'int3' is not known" in refused(folder, tmp_path / "out", "--dtype", "int3")
    assert "takes --like, --tag" in refused(folder, tmp_path / "out", "--tokenizer", "tiny")


# --- the hub ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub():
    with hub_at() as url:
        yield url


def test_the_folder_is_uploaded(tmp_path, model, hub):
    """As a user does it: the address of the hub comes from HF_ENDPOINT."""
    made, folder = model
    in_pieces(made, folder, "safetensors")
    words = ["convert", str(folder), str(tmp_path / "out"), "--to", "transformers", "--push", "me/stories"]
    env = {**os.environ, "HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_standin"}
    done = subprocess.run([sys.executable, "-m", "trailmark", *words], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and f"uploaded to {hub}/me/stories" in done.stdout, done.stdout + done.stderr
    assert "private" in (MADE["me/stories"].get("visibility"), *MADE["me/stories"])
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == FILES and len(FILES) == 6


def test_an_upload_without_a_network_leaves_the_folder(tmp_path, model, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "--push me/stories:" in refused(model[1], tmp_path / "out", "--push", "me/stories")
    assert (tmp_path / "out/model.safetensors").is_file()


def test_an_upload_that_is_refused_leaves_the_folder(tmp_path, model, hub):
    said = refused(model[1], tmp_path / "out", "--push", "me/closed")
    assert "--push me/closed:" in said and "403" in said and f"`hf upload me/closed {tmp_path / 'out'}`" in said
    assert (tmp_path / "out/model.safetensors").is_file()
    assert "--public belongs to --push" in refused(model[1], tmp_path / "p", "--public")


def test_a_run_and_an_adapter(tmp_path, model):
    """A run means the policy of its newest checkpoint. An adapter has no weights of a model."""
    _, folder = model
    policy = tmp_path / "run/checkpoints/000003/policy"
    shutil.copytree(folder, policy)
    (tmp_path / "run/recipe.yaml").write_text("method: sft\ndata: x.jsonl\n")
    (policy.parent / "state.json").write_text("{}")
    done = convert(tmp_path / "run", tmp_path / "out")
    assert done.exit_code == 0 and str(policy) in done.output.replace("\n", ""), done.output
    assert load_file(tmp_path / "out/model.safetensors").keys() == load_file(folder / "model.safetensors").keys()
    (policy / "adapter_config.json").write_text("{}")
    assert "holds an adapter and no model" in refused(policy, tmp_path / "again")
