"""Every road to a model: no code of a checkpoint is run, and only whole, finite weights are used."""

import ast
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import trailmark
from trailmark.commands.app import app
from trailmark.config import LoraConfig, ModelConfig, ModelShape
from trailmark.errors import ModelError
from trailmark.models.load import load_model

SRC = Path(trailmark.__file__).parent
TINY = ModelConfig(name="tiny", shape=ModelShape(layers=2, width=16, heads=2, context=128))
LOADERS = ("from_pretrained", "from_config")
SFT = "method: sft\nout: out\ndata: rows.jsonl\nsteps: 2\nbatch: 2\nmodel: {name: model}\n"
RIGHTS = "raise SystemExit(open('RAN', 'w').write('x'))\n"


def calls():
    """Every call of a loader in src and bench: file, line, the call."""
    for root in (SRC, SRC.parents[1] / "bench"):
        for file in sorted(root.rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in LOADERS:
                    yield f"{file.name}:{node.lineno}", node


def test_every_call_of_a_loader_refuses_the_code_of_a_checkpoint():
    found = list(calls())
    assert len(found) >= 12
    for where, call in found:
        if ast.unparse(call.func).startswith("Peft"):  # has no such switch; `_only_lora` looks at its settings first
            assert where.startswith("adapters.py"), where
            continue
        said = {k.arg: ast.unparse(k.value) for k in call.keywords}
        assert said.get("trust_remote_code") == "False", f"{where}: {ast.unparse(call)}"
    wanted = {"torch.load", "pickle.load", "pickle.loads"}
    for file in sorted(SRC.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in wanted:
                assert "weights_only=True" in ast.unparse(node), file


    for root in (SRC, SRC.parents[1] / "bench"):
        for file in sorted(root.rglob("*.py")):  # a loader that has another name could not be seen above
            nodes = list(ast.walk(ast.parse(file.read_text())))
            called = {id(n.func) for n in nodes if isinstance(n, ast.Call)}
            others = [n for n in nodes if isinstance(n, ast.Attribute) and n.attr in LOADERS and id(n) not in called]
            others += [n for n in nodes if isinstance(n, ast.Constant) and n.value in LOADERS]
            others += [n for n in nodes if isinstance(n, ast.alias) and n.name in ("pipeline", "torch.hub")]
            assert not others, (file, [ast.unparse(n) for n in others])


def call(*words):
    done = CliRunner().invoke(app, [str(w) for w in words], input="y\n" * 9)
    assert "Traceback" not in done.output + done.stderr, done.output + done.stderr
    return done


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of a tiny model."""
    place = tmp_path_factory.mktemp("made")
    (place / "rows.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n' * 4)
    lm = load_model(TINY)
    lm.model.save_pretrained(place / "model")
    lm.tokenizer.save_pretrained(place / "model")
    (place / "sft.yaml").write_text(SFT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert call("train", "sft.yaml").exit_code == 0
    return place


@pytest.fixture
def folder(made, tmp_path, monkeypatch):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "model"


def change(file, **new):
    file.write_text(json.dumps({**json.loads(file.read_text()), **new}))


ROADS = [
    ["train", "sft.yaml", "out=new"],
    ["train", "sft.yaml", "out=new", "--dry-run"],
    ["train", "sft.yaml", "steps=3", "--resume"],
    ["plan", "sft.yaml"],
    ["eval", "model", "--task", "arith", "--n", "1"],
    ["serve", "model", "--port", "1"],
    ["convert", "model", "conv", "--to", "transformers"],
    ["convert", "empty", "new", "--to", "transformers", "--like", "model"],
    ["convert", "rows.jsonl", "new", "--from", "messages", "--to", "episodes", "--tokenizer", "model"],
    ["verify", "out"],
    ["report", "out", "--tokenizer", "model", "--no-plots"],
    ["eval", "out", "--task", "arith", "--n", "1"],
]


@pytest.mark.parametrize("how", ["a known family", "an unknown one"])
def test_no_road_runs_or_asks_to_run_the_code_of_a_checkpoint(folder, how, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *a: pytest.fail("a question was asked"))
    Path("empty").mkdir()
    for place in (folder, Path("out/checkpoints/000002/policy")):
        (place / "theirs.py").write_text(RIGHTS)
        auto = {n: f"theirs.{n}" for n in ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")}
        more = {"model_type": "theirs"} if how == "an unknown one" else {}
        change(place / "config.json", auto_map=auto, **more)
        own = {"auto_map": {"AutoTokenizer": ["theirs.T", "theirs.T"]}}
        change(place / "tokenizer_config.json", **own, **({"tokenizer_class": "T"} if more else {}))
    shutil.copy(folder / "model.safetensors", "empty")
    ends = []
    for words in ROADS:
        if "serve" in words and how == "a known family":
            continue  # it would serve
        done = call(*words)
        assert not Path("RAN").exists(), words
        ends.append(done.exit_code)
    if how == "an unknown one":
        assert ends[0] == ends[4] == ends[5] == ends[6] == 2


def test_a_config_names_no_code_of_the_hub(folder):
    """transformers fetches a kernel that a config.json names as its attention."""
    for place in (folder, Path("out/checkpoints/000002/policy")):
        change(place / "config.json", attn_implementation="theirs/kernel")
    for words in (ROADS[4], ROADS[6], ROADS[9]):
        done = call(*words)
        assert done.exit_code == 0 and "kernel" not in done.output, (words, done.output)


def test_weights_are_as_readable_as_the_files_beside_them(folder):
    assert call("convert", "model", "conv", "--to", "transformers").exit_code == 0
    files = [*Path("conv").glob("*.safetensors"), *Path("out/checkpoints").rglob("*.safetensors")]
    assert len(files) > 2 and {f.stat().st_mode for f in files} == {Path("rows.jsonl").stat().st_mode}


def damage(folder, how):
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    if how == "missing":
        del tensors[name]
    elif how == "extra":
        tensors["model.layers.7.mlp.up_proj.weight"] = tensors[name].clone()
    elif how == "misshaped":
        tensors[name] = tensors[name][:, :5].clone()
    else:
        tensors[name][1, 2] = float(how)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return "model.layers.7.mlp.up_proj.weight" if how == "extra" else name


HOWS = ["missing", "extra", "misshaped", "nan", "-inf"]


@pytest.mark.parametrize("how", HOWS)
def test_incomplete_weights_are_refused_by_name_and_never_filled(folder, how):
    name = damage(folder, how)
    for words in [ROADS[0], ROADS[4], ROADS[5], ROADS[6]] if how == "missing" else ROADS[6:3:-2]:
        done = call(*words)
        said = " ".join(done.stderr.split())
        assert done.exit_code == 2 and name in said and "LOAD REPORT" not in said, (words, said)
    assert not Path("conv").exists()


@pytest.mark.parametrize("how", HOWS)
def test_the_base_of_an_adapter_is_checked_too(folder, how):
    lora = load_model(ModelConfig(name="model", lora=LoraConfig(rank=2)))
    lora.model.save_pretrained("adapter")
    name = damage(folder, how)
    with pytest.raises(ModelError, match=name):
        load_model(ModelConfig(name="adapter"))


@pytest.mark.parametrize("how", HOWS)
def test_a_damaged_adapter_is_refused_by_name(folder, how):
    load_model(ModelConfig(name="model", lora=LoraConfig(rank=2))).model.save_pretrained("adapter")
    file = Path("adapter/adapter_model.safetensors")
    tensors = load_file(file)
    name = sorted(tensors)[0]
    if how == "missing":
        del tensors[name]
    elif how == "extra":
        name, tensors = f"{name}.more", {**tensors, f"{name}.more": tensors[name].clone()}
    elif how == "misshaped":
        tensors[name] = tensors[name][:, :3].clone()
    else:
        tensors[name][0, 0] = float(how)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"lora_A"):
        load_model(ModelConfig(name="adapter"))


@pytest.mark.parametrize(
    "settings",
    [{"peft_type": "PROMPT_TUNING", "tokenizer_kwargs": {"trust_remote_code": True}}, {"r": 10**9},
     {"megatron_config": {"a": 1}, "megatron_core": "theirs.core"}, {"r": "2"}, {"target_modules": 3}],
)  # fmt: skip
def test_an_adapter_that_is_more_than_lora_is_refused(folder, settings):
    load_model(ModelConfig(name="model", lora=LoraConfig(rank=2))).model.save_pretrained("adapter")
    change(Path("adapter/adapter_config.json"), **settings)
    with pytest.raises(ModelError, match="adapter"):
        load_model(ModelConfig(name="adapter"))


@pytest.mark.parametrize("what", ["cut", "width", "nan", "text"])
def test_damaged_heads_are_refused(folder, what):
    file = folder / "heads.safetensors"
    weight = torch.zeros(1, 9 if what == "width" else 16)
    save_file({"value.weight": weight * float("nan") if what == "nan" else weight}, file)
    if what == "cut":
        file.write_bytes(file.read_bytes()[:40])
    elif what == "text":
        file.write_text("no tensors")
    with pytest.raises(ModelError, match=r"heads\.safetensors"):
        load_model(ModelConfig(name="model"))
    assert call("eval", "model", "--task", "arith", "--n", "1").exit_code == 2


@pytest.mark.parametrize(
    "new", [{"num_hidden_layers": 10**6}, {"vocab_size": 10**13}, {"hidden_size": 10**7, "head_dim": 8},
            {"num_hidden_layers": "many"}, {"num_attention_heads": 0}, {"model_type": 3}, {"rope_parameters": 7}]
)  # fmt: skip
def test_a_config_that_no_model_has_is_refused_at_once(folder, new):
    change(folder / "config.json", **new)
    for words in (ROADS[4], ROADS[6]):
        done = call(*words)
        assert done.exit_code == 2, (words, done.output)
