"""Broken and hostile checkpoints, for `convert` and for opening a model: one sentence that names the file, exit code 2,
no code run, little memory, and nothing left in the output folder."""

import json
import os
import pickle
import resource
import shutil
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.config import LoraConfig, ModelConfig
from trailmark.models.load import load_model
from trailmark.models.pickled import read_pickled
from trailmark.models.tiny import tiny_config, tiny_tokenizer

ZERO = Path(__file__).parent / "zero_shards"
DEEP = "[" * 10_000 + "]" * 10_000
BIN, SAFE, INDEX = "pytorch_model.bin", "model.safetensors", "model.safetensors.index.json"
MOST = 500 << 10  # kilobytes that a refusal may take more than what was used before


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model, an adapter on it, and three checkpoints of ZeRO."""
    place = tmp_path_factory.mktemp("made")
    torch.manual_seed(1)
    LlamaForCausalLM(tiny_config("llama", layers=2, width=16, heads=2, context=64)).save_pretrained(place / "m")
    tiny_tokenizer().save_pretrained(place / "m")
    for k in (1, 2, 3):
        shutil.copytree(ZERO / f"zero{k}", place / f"z{k}")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        load_model(ModelConfig(name="m", lora=LoraConfig(rank=2))).model.save_pretrained("a")
    return place


@pytest.fixture
def here(made, tmp_path, monkeypatch):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refuses(folder, road, *named):
    """The sentence of a refusal, which names one of `named`."""
    words = {
        "convert": [
            "convert",
            folder,
            "new",
            "--to",
            "transformers",
            *(["--like", "tiny"] if folder[0] == "z" else []),
        ],
        "eval": ["eval", folder, "--task", "arith", "--n", "1"],
        "serve": ["serve", folder, "--port", "1"],
    }[road]
    before = {p.name for p in Path().iterdir()}
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    done = CliRunner().invoke(app, words)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used
    said = " ".join(done.stderr.split())
    assert "Traceback" not in done.output + done.stderr and "a bug of" not in said, done.output + done.stderr
    assert done.exit_code == 2 and done.stdout == "", (done.exit_code, done.output)
    assert any(n in said for n in named), said
    assert said.count("rror:") == 1 and len(said) < 700 and "LOAD REPORT" not in said, said
    assert grown < MOST, f"{grown >> 10} MB"
    assert {p.name for p in Path().iterdir()} == before and not Path("RAN").exists()
    return said


class Evil:
    def __reduce__(self):
        return eval, ("open('RAN', 'w').write('x')",)


def weights():
    return load_file("m/model.safetensors")


def store(held):
    Path("m", SAFE).unlink(missing_ok=True)
    torch.save(held, Path("m", BIN))


def one(tensor, name="model.norm.weight"):
    store({**weights(), name: tensor})


def raw(name, data):
    if name == BIN:
        Path("m", SAFE).unlink()
    Path("m", name).write_bytes(data)


def cut_bin():
    store(weights())
    raw_bytes = Path("m", BIN).read_bytes()
    Path("m", BIN).write_bytes(raw_bytes[: len(raw_bytes) // 2])


def compressed():
    store(weights())
    with zipfile.ZipFile(Path("m", BIN)) as old, zipfile.ZipFile("more", "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    os.replace("more", Path("m", BIN))


def doubled_records():
    store(weights())
    with pytest.warns(UserWarning), zipfile.ZipFile(Path("m", BIN), "a") as file:
        name = next(n for n in file.namelist() if n.endswith("data.pkl"))
        file.writestr(name, b"\x80\x02}q\x00.")


def header(**tensors):
    """A safetensors file with this header."""
    text = json.dumps(tensors).encode()
    Path("m", SAFE).write_bytes(struct.pack("<Q", len(text)) + text + bytes(64))


def f32(shape, begin, end):
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


def doubled_name():
    item = json.dumps(f32([2], 0, 8))
    text = f'{{"a": {item}, "a": {item}}}'.encode()
    Path("m", SAFE).write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))


def index(where, pieces=True):
    if pieces:
        Path("m", SAFE).rename("m/model-00001-of-00001.safetensors")
    Path("m", INDEX).write_text(json.dumps(where))


def mapped(to, pieces=True):
    index({"weight_map": dict.fromkeys(weights(), to)}, pieces)


def settings(file, **new):
    path = Path(file)
    path.write_text(json.dumps({**json.loads(path.read_text()), **new}))


# broken weights or config of the model in m: how, and a name that the sentence must hold
FILES = {
    "a .bin of no bytes": (lambda: raw(BIN, b""), BIN),
    "a .bin that is text": (lambda: raw(BIN, b"no weights at all"), BIN),
    "a .bin that was cut": (cut_bin, BIN),
    "a .bin of compressed records": (compressed, BIN),
    "a .bin with a record twice": (doubled_records, BIN),
    "a .bin that runs code": (lambda: store({"model.norm.weight": Evil()}), BIN),
    "an old pickle that runs code": (lambda: raw(BIN, pickle.dumps({"a": Evil()})), BIN),
    "a .bin that is a list": (lambda: store([torch.zeros(2)]), BIN),
    "a .bin that holds a text": (lambda: one("a text"), BIN),
    "a .bin that holds nothing": (lambda: store({}), "m"),
    "a .bin whose names are numbers": (lambda: store({3: torch.zeros(2)}), "m"),
    "a .bin of a number and its names": (lambda: store({"state_dict": 3}), BIN),
    "a .bin that is nested deeply": (lambda: raw(BIN, b"\x80\x02" + b"(" * 100_000 + b"." ), BIN),
    "numbers that repeat": (lambda: one(torch.zeros(1).expand(10**12)), "model.norm.weight"),
    "numbers that overlap": (lambda: one(torch.zeros(100).as_strided((10**6, 10**6), (0, 0))), "model.norm.weight"),
    "numbers without a place": (lambda: one(torch.empty(16, device="meta")), "model.norm.weight"),
    "complex numbers": (lambda: one(torch.zeros(16, dtype=torch.complex64)), "model.norm.weight"),
    "whole numbers": (lambda: one(torch.zeros(16, dtype=torch.int64)), "model.norm.weight"),
    "truth values": (lambda: one(torch.ones(16, dtype=torch.bool)), "model.norm.weight"),
    "sparse numbers": (lambda: one(torch.zeros(16).to_sparse()), "model.norm.weight"),
    "nested numbers": (lambda: one(torch.nested.nested_tensor([torch.zeros(2)])), ("model.norm.weight", BIN)),
    "quantised numbers": (lambda: one(torch.quantize_per_tensor(torch.zeros(16), 1, 0, torch.qint8)), "model.norm"),
    "NaN": (lambda: one(torch.full((16,), float("nan"))), "model.norm.weight"),
    "infinity in bfloat16": (lambda: one(torch.full((16,), float("inf")).bfloat16()), "model.norm.weight"),
    "no dimension": (lambda: one(torch.tensor(1.0)), "model.norm.weight"),
    "a dimension of 0": (lambda: one(torch.zeros(0)), "model.norm.weight"),
    "another name": (lambda: one(torch.zeros(16), "no.such.weight"), "no.such.weight"),
    "a name that leaves the folder": (lambda: one(torch.zeros(16), "../../x"), "../../x"),
    "safetensors of no bytes": (lambda: raw(SAFE, b""), SAFE),
    "safetensors with a header of 2^60 bytes": (lambda: raw(SAFE, struct.pack("<Q", 2**60) + b"{}"), SAFE),
    "safetensors with a nested header": (lambda: raw(SAFE, struct.pack("<Q", len(DEEP)) + DEEP.encode()), SAFE),
    "safetensors that overlap": (lambda: header(a=f32([8], 0, 32), b=f32([12], 16, 64)), SAFE),
    "safetensors with a gap": (lambda: header(a=f32([2], 0, 8), b=f32([2], 56, 64)), SAFE),
    "safetensors past the end": (lambda: header(a=f32([2**40], 0, 2**42)), SAFE),
    "safetensors with a product that overflows": (lambda: header(a=f32([2**33, 2**33], 0, 64)), SAFE),
    "safetensors with negative sizes": (lambda: header(a=f32([-4, -4], 0, 64)), SAFE),
    "safetensors of an unknown type": (lambda: header(a={**f32([16], 0, 64), "dtype": "F31"}), SAFE),
    "safetensors with a name twice": (doubled_name, ("m has",)),
    "safetensors that are a folder": (lambda: (Path("m", SAFE).unlink(), Path("m", SAFE).mkdir()), ("m/", "m:", "m ")),
    "safetensors that are a pipe": (lambda: (Path("m", SAFE).unlink(), os.mkfifo(Path("m", SAFE))), ("m/", "m:", "m ")),
    "safetensors that are a device": (lambda: (Path("m", SAFE).unlink(), Path("m", SAFE).symlink_to("/dev/zero")),
                                      ("m/", "m:", "m ")),
    "an index that is a list": (lambda: index([1]), INDEX),
    "an index without a map": (lambda: index({}), INDEX),
    "an index whose map is a list": (lambda: index({"weight_map": [1]}), INDEX),
    "an index whose map is empty": (lambda: index({"weight_map": {}}), INDEX),
    "an index that names numbers": (lambda: mapped(3), INDEX),
    "an index that leaves the folder": (lambda: mapped("../m/model-00001-of-00001.safetensors"), INDEX),
    "an index with a whole path": (lambda: mapped("/etc/passwd"), INDEX),
    "an index of a missing file": (lambda: mapped("model-00009-of-00009.safetensors"), "model-00009-of-00009"),
    "an index that names another kind": (lambda: mapped("config.json"), "config.json"),
    "an index that names a folder": (lambda: (Path("m/.").joinpath("sub").mkdir(), mapped("sub")), "sub"),
    "an index that is nested": (lambda: (index({}), Path("m", INDEX).write_text('{"weight_map":' + DEEP + "}")), INDEX),
    "an index that is no UTF-8": (lambda: (index({}), Path("m", INDEX).write_bytes(b"\xff\xfe{")), INDEX),
    "an index with its pieces cut off": (lambda: index({"weight_map": {"no.such": "model-00001-of-00001.safetensors"}}),
                                         ("no.such", "model-00001")),
    "pieces of which one is missing": (lambda: Path("m", SAFE).rename("m/model-00001-of-00003.safetensors"), "00002"),
    "pieces that are counted wrongly": (lambda: Path("m", SAFE).rename("m/model-00001-of-99999.safetensors"), "00002"),
    "a piece 2 of 1": (lambda: Path("m", SAFE).rename("m/model-00002-of-00001.safetensors"), "model-0000"),
    "pieces of none": (lambda: Path("m", SAFE).rename("m/model-00001-of-00000.safetensors"), "model-0000"),
}  # fmt: skip

CONFIGS = {
    "that is missing": lambda p: p.unlink(),
    "that is a list": lambda p: p.write_text("[1, 2]"),
    "that is a number": lambda p: p.write_text("7"),
    "that is null": lambda p: p.write_text("null"),
    "that is empty": lambda p: p.write_text(""),
    "that was cut": lambda p: p.write_text(p.read_text()[:60]),
    "that is no UTF-8": lambda p: p.write_bytes(b'{"model_type": "\xff\xfe"}'),
    "that is nested": lambda p: p.write_text('{"model_type": "llama", "a": ' + DEEP + "}"),
    "that is a device": lambda p: (p.unlink(), p.symlink_to("/dev/zero")),
    "that is a pipe": lambda p: (p.unlink(), os.mkfifo(p)),
    "that is a folder": lambda p: (p.unlink(), p.mkdir()),
    "of numbers without end": lambda p: p.write_text('{"model_type": "llama", "vocab_size": ' + "9" * 5000 + "}"),
    "of a negative size": lambda p: settings(p, hidden_size=-16),
    "of no layers": lambda p: settings(p, num_hidden_layers=0),
    "of a million layers": lambda p: settings(p, num_hidden_layers=10**6),
    "of a size that is a list": lambda p: settings(p, hidden_size=[16]),
    "of a size that is NaN": lambda p: settings(p, hidden_size=float("nan")),
    "of sizes whose product overflows": lambda p: settings(p, hidden_size=2**40, vocab_size=2**40),
    "of an unknown family": lambda p: settings(p, model_type="no_such_family"),
    "of a type that is none": lambda p: settings(p, dtype="float31", torch_dtype="float31"),
    "of a quantisation that is text": lambda p: settings(p, quantization_config="int8"),
    "of an activation that is none": lambda p: settings(p, hidden_act="none-such"),
}  # fmt: skip


@pytest.mark.parametrize("what", FILES)
def test_broken_weights_are_refused_in_one_sentence(here, what):
    damage, named = FILES[what]
    damage()
    for road in ("convert", "eval"):
        refuses("m", road, *([named] if isinstance(named, str) else named), *(["m"] if road == "eval" else []))


@pytest.mark.parametrize("kind", [torch.int64, torch.bool, torch.uint8, torch.complex64])
def test_weights_of_another_kind_of_number_are_not_opened(here, kind):
    save_file({**weights(), "model.norm.weight": torch.ones(16, dtype=kind)}, Path("m", SAFE), {"format": "pt"})
    for road in ("eval", "convert"):
        refuses("m", road, "model.norm.weight")


@pytest.mark.parametrize("what", CONFIGS)
def test_a_broken_config_is_refused_in_one_sentence(here, what):
    CONFIGS[what](Path("m/config.json"))
    for road in ("convert", "eval"):
        refuses("m", road, "config.json", "m:", "m ", "'m'", "m/")


OPTIM = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def zero(stage, file, change):
    """Change what a file of a ZeRO checkpoint holds."""
    path = min(Path(f"z{stage}").glob(f"global_step*/{file}"))
    held = read_pickled(path)
    inner = held.get("optimizer_state_dict", held)
    inner.pop("loss_scaler", None)  # an object of DeepSpeed
    change(inner)
    torch.save(held, path)


def count_of(value):
    return lambda stage: zero(stage, OPTIM.format(0), lambda s: s.update(partition_count=value))


def stage_of(value):
    return lambda stage: zero(stage, OPTIM.format(0), lambda s: s.update(zero_stage=value))


def states(**new):
    name = "*mp_rank_00_model_states.pt"
    return lambda stage: zero(stage, name, lambda s: s.update(new))


def latest(data):
    return lambda stage: Path(f"z{stage}/latest").write_bytes(data)


def linked(to):
    return lambda stage: (Path(f"z{stage}/latest").unlink(), Path(f"z{stage}/latest").symlink_to(to))


def without(key):
    return lambda stage: zero(stage, OPTIM.format(1), lambda s: s.pop(key))


def rows(stage, make):
    key = "single_partition_of_fp32_groups" if stage < 3 else "fp32_flat_groups"
    zero(stage, OPTIM.format(0), lambda s: s.update({key: [make(t) for t in s[key]]}))


ZEROS = {
    **{f"{v!r} parts": count_of(v) for v in (0, -1, [], [0], [2, -5, 0], 10**9, 2**70, 1.5, "2", None, True, [[2]])},
    **{f"stage {v!r}": stage_of(v) for v in (0, 4, -1, "2", None, [2], 2.5)},
    "latest of nothing": latest(b""),
    "latest that goes up": latest(b".."),
    "latest that is a dot": latest(b"."),
    "latest with a path": latest(b"../z1/global_step2"),
    "latest that is binary": latest(bytes(range(256)) * 40),
    "latest of many bytes": latest(b"a" * 10**6),
    "latest that names a file": latest(b"latest"),
    "latest that is a folder": lambda k: (Path(f"z{k}/latest").unlink(), Path(f"z{k}/latest").mkdir()),
    "latest that is a device": linked("/dev/zero"),
    "latest that is lost": linked("nowhere"),
    "no shapes of weights": states(param_shapes=None),
    "shapes that are a number": states(param_shapes=7),
    "shapes that are no shapes": states(param_shapes=[{"model.norm.weight": "wide"}]),
    "shapes below 0": states(param_shapes=[{"model.norm.weight": (-4,)}]),
    "shapes whose product overflows": states(param_shapes=[{"model.norm.weight": (2**62, 2**62)}]),
    "weights that are no mapping": states(module=[1]),
    "buffers that are no list": states(buffer_names=7),
    "a second name that is no name": states(shared_params=[1]),
    "frozen weights without numbers": states(frozen_param_shapes={"a": (4,)}, frozen_param_fragments=None),
    "numbers that are not finite": lambda k: rows(k, lambda t: t * float("nan")),
    "numbers that repeat": lambda k: rows(k, lambda t: torch.zeros(1).expand(10**11)),
    "numbers that are text": lambda k: rows(k, lambda t: "0"),
    "fewer numbers": lambda k: rows(k, lambda t: t[:7].clone()),
    "a state that is a list": lambda k: torch.save([1], next(Path(f"z{k}").glob("global*/" + OPTIM.format(0)))),
    "a state that runs code": lambda k: torch.save({"optimizer_state_dict": Evil()},
                                                   next(Path(f"z{k}").glob("global*/" + OPTIM.format(1)))),
    "a state of no bytes": lambda k: next(Path(f"z{k}").glob("global*/" + OPTIM.format(1))).write_bytes(b""),
}  # fmt: skip


@pytest.mark.parametrize("what", ZEROS)
def test_a_broken_checkpoint_of_zero_is_refused_in_one_sentence(here, what):
    for stage in (2, 3) if "latest" not in what else (1,):
        ZEROS[what](stage)
        refuses(f"z{stage}", "convert", f"z{stage}")


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


JSONS = {
    "cut": cut, "empty": lambda p: p.write_text(""), "a list": lambda p: p.write_text("[1]"),
    "a number": lambda p: p.write_text("7"), "nested": lambda p: p.write_text('{"a": ' + DEEP + "}"),
    "no UTF-8": lambda p: p.write_bytes(b'{"a": "\xff\xfe"}'), "a device": CONFIGS["that is a device"],
    "a pipe": CONFIGS["that is a pipe"], "a folder": CONFIGS["that is a folder"],
}  # fmt: skip


@pytest.mark.parametrize("how", JSONS)
@pytest.mark.parametrize("file", ["m/tokenizer.json", "a/adapter_config.json", "a/base.json"])
def test_other_broken_files_of_a_model_are_refused_in_one_sentence(here, file, how):
    if file == "a/base.json":
        Path(file).write_text("{}")
    JSONS[how](Path(file))
    refuses(file[0], "eval", file, file[0] + ":")


@pytest.mark.parametrize("how", ["a device", "a pipe", "a folder"])
def test_a_further_chat_template_that_never_ends_is_refused(here, how):
    file = Path("m/additional_chat_templates/tools.jinja")
    file.parent.mkdir()
    file.write_text("")
    JSONS[how](file)
    for road in ("eval", "convert"):
        refuses("m", road, str(file))


def test_a_special_token_of_a_megabyte_is_refused(here):
    """All its beginnings would be kept: half a terabyte."""
    settings("m/tokenizer_config.json", bos_token="b" * 1_000_000)
    assert "1,000,000 letters" in refuses("m", "eval", "m:")


HEADS = {
    "empty": lambda p: p.write_bytes(b""), "text": lambda p: p.write_text("no tensors"),
    "another width": lambda p: save_file({"value.weight": torch.zeros(1, 9)}, p),
    "no width": lambda p: save_file({"value.weight": torch.zeros(())}, p),
    "no rows": lambda p: save_file({"value.weight": torch.zeros(0, 16)}, p),
    "whole numbers": lambda p: save_file({"value.weight": torch.zeros(1, 16, dtype=torch.int64)}, p),
    "NaN": lambda p: save_file({"value.weight": torch.full((1, 16), float("nan"))}, p),
    "other names": lambda p: save_file({"a.b.c": torch.zeros(1, 16)}, p),
    "the name of a method": lambda p: save_file({"keys.weight": torch.zeros(1, 16)}, p),
    "an empty name": lambda p: save_file({".weight": torch.zeros(1, 16)}, p),
    "a header of 2^60 bytes": lambda p: p.write_bytes(struct.pack("<Q", 2**60) + b"{}"),
    "a device": lambda p: p.symlink_to("/dev/zero"), "a pipe": os.mkfifo, "a folder": lambda p: p.mkdir(),
}  # fmt: skip


@pytest.mark.parametrize("how", HEADS)
def test_broken_heads_are_refused_in_one_sentence(here, how):
    HEADS[how](Path("m/heads.safetensors"))
    refuses("m", "eval", "heads.safetensors")


TARGETS = "(a|a)*" * 30 + "(.*)*b"
ADAPTERS = {
    "no kind": {"peft_type": None}, "another kind": {"peft_type": "IA3"}, "an unknown kind": {"peft_type": "X"},
    "no base": {"base_model_name_or_path": None}, "a base that is a number": {"base_model_name_or_path": 3},
    "a base that is a list": {"base_model_name_or_path": ["m"]},
    "a base that is not here": {"base_model_name_or_path": "/no"},
    "a base that is itself": {"base_model_name_or_path": "a"},
    "rank 0": {"r": 0}, "a negative rank": {"r": -2}, "a huge rank": {"r": 2**70}, "a rank of text": {"r": "2"},
    "a rank that is true": {"r": True}, "a scale of text": {"lora_alpha": "x"},
    "a scale that is NaN": {"lora_alpha": float("nan")}, "a scale without end": {"lora_alpha": float("inf")},
    "no targets": {"target_modules": None}, "other targets": {"target_modules": ["no_such"]},
    "targets that are numbers": {"target_modules": [3]}, "targets that are a mapping": {"target_modules": {"a": 1}},
    "a slow expression": {"target_modules": TARGETS}, "a slow exception": {"exclude_modules": TARGETS},
    "a slow pattern of ranks": {"rank_pattern": {TARGETS: 2}},
    "a slow pattern of scales": {"alpha_pattern": {TARGETS: 2}},
    "a slow pattern of layers": {"layers_pattern": TARGETS, "layers_to_transform": [0]},
    "a pattern that is a list": {"rank_pattern": [1]},
    "a task that is none": {"task_type": "NONE_SUCH"},
    "layers without end": {"layer_replication": [[0, 2]] * 200_000},
    "a range of layers without end": {"layer_replication": [[0, 10**12]]},
    "ranges of layers that are text": {"layer_replication": ["0-2"]},
    "modules of its own": {"modules_to_save": ["lm_head"]}, "a dropout of text": {"lora_dropout": "x"},
}  # fmt: skip


@pytest.mark.parametrize("what", ADAPTERS)
def test_a_broken_adapter_is_refused_in_one_sentence(here, what):
    settings("a/adapter_config.json", **ADAPTERS[what])
    refuses("a", "eval", "a/adapter_config.json", "a:")
