"""Recipes that cannot be run are refused in one sentence, before anything is allocated, imported or written."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from trailmark import memory
from trailmark.commands.app import app
from trailmark.config import ModelShape
from trailmark.engines.local import LocalEngine
from trailmark.learn.optim import Optimiser
from trailmark.memory import TooLarge, parameters
from trailmark.models.load import describe, load_model

RECIPE = """
method: policy_gradient
out: run
steps: 1
prompts_per_step: 2
n: 2
task: {name: arith}
sampling: {max_tokens: 1}
model: {name: tiny, shape: {layers: 1, width: 16, heads: 2, context: 64}}
engine: {max_num_seqs: 2}
"""


@pytest.fixture
def refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(RECIPE)

    def check(*words, says):
        done = CliRunner().invoke(app, ["train", "r.yaml", *words])
        assert done.exit_code == 2 and "Traceback" not in done.stderr, done.stderr
        for part in says:
            assert part in done.stderr, done.stderr
        assert not (tmp_path / "run" / "recipe.yaml").exists()

    return check


def test_seeds_that_no_generator_takes(refused):
    for seed in ("-3", str(2**63), str(2**64), str(10**30)):
        refused(f"seed={seed}", says=["key 'seed'", "expected", seed])
        refused(f"model.seed={seed}", says=["key 'model.seed'", "expected", seed])


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "a b", ".", "a..b", "os.system(1)", "x:y:z", ""])
def test_a_method_that_is_no_name(refused, name):
    refused(f"method='{name}'", says=[f"unknown method '{name}'", "To use your own method, write package.module"])


def test_what_others_call_a_method_is_told_what_it_is_here(refused):
    here = "'grpo': in Trailmark it is method: policy_gradient"
    refused("method=grpo", says=[here, "credit: group", "recipes/arith-grpo.yaml"])
    refused("method=GRPO", says=["in Trailmark it is method: policy_gradient"])
    refused("method=dr-grpo", says=["in Trailmark it is method: policy_gradient"])
    refused("method=dpo", says=["'dpo': in Trailmark it is method: preference with objective: dpo"])
    refused("method=policy-gradiant", says=["Did you mean 'policy_gradient'?"])


def test_a_method_of_ones_own_that_does_not_import(refused, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_method.py").write_text("def run(:\n")
    refused("method=broken_method", says=["method 'broken_method' cannot be imported", "SyntaxError"])


@pytest.mark.parametrize("value", [r'"a\0b"', r'"\ud800"'])
@pytest.mark.parametrize("key", ["out", "name", "model.name", "task.name", "task.options.x"])
def test_a_null_byte_or_half_a_character_in_a_text(refused, key, value):
    refused(f"{key}={value}", says=["which no file or path can hold"])


def test_an_unknown_key_of_an_objective_names_the_nearest(refused):
    refused("objective={kind: clipped, lo: 0.1}", says=["key 'lo': is not known. Did you mean 'low'?\n"])
    refused("objective={kind: clipped, low: much}", says=["key 'low': expected a number, found the text 'much'.\n"])
    refused("objective={kind: clipped, beta: -1}", says=["key 'beta'", "greater than or equal to 0"])


def test_a_group_of_one_teaches_nothing(refused):
    refused("n=1", says=["n is 1", "credit group", "every advantage would be 0"])
    refused("n=1", "credit=leave_one_out", says=["n is 1", "credit leave_one_out"])


def test_models_engines_and_batches_that_do_not_fit_the_memory(refused, monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device="cpu": 2_000_000_000)
    refused("model.shape.width=1000000000", says=["model.shape", "are free", "2.0 GB", "--insist"])
    refused("model.shape.layers=100000000", says=["model.shape", "--insist"])
    refused("model.lora={rank: 100000000}", says=["model.lora.rank 100,000,000", "are free"])
    refused(
        "engine.max_num_seqs=1000000",
        says=["engine.max_num_seqs 1,000,000", "lower engine.max_num_seqs or engine.max_len"],
    )
    rows = "prompts_per_step * n"
    refused("prompts_per_step=100000000", says=[rows, "200,000,000 rows in one step", "410 GB", f"lower {rows}"])
    refused("n=100000000", says=[f"{rows}: 200,000,000 rows in one step"])


def test_evaluations_of_more_starts_than_fit_the_memory(refused, monkeypatch):
    """100,000 starts of 2,048 bytes are 205 MB; a run evaluates only after steps of training, so it is told before."""
    monkeypatch.setattr(memory, "free_memory", lambda device="cpu": 200_000_000)
    refused("eval.n=100000", "eval.every=1", says=["eval.n: 100,000 starts", "205 MB", "lower eval.n"])
    words = ["eval", "tiny", "--task", "arith", "--n"]
    for more, says in (
        (["100000"], "task 'arith': 100,000 starts"),
        (["2", "--samples", "50000"], "2 tasks, 50,000 times each: 100,000 starts"),
    ):
        done = CliRunner().invoke(app, [*words, *more])
        assert done.exit_code == 2 and says in done.stderr and "205 MB" in done.stderr, done.stderr


def test_insisting_gets_past_the_estimate(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(memory, "free_memory", lambda device="cpu": 1)
    (tmp_path / "r.yaml").write_text(RECIPE)
    assert CliRunner().invoke(app, ["train", "r.yaml"]).exit_code == 2
    monkeypatch.setenv(memory.INSIST, "")  # undone after the test, whatever --insist sets
    done = CliRunner().invoke(app, ["train", "r.yaml", "--insist"])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "mistral", "gemma"])
def test_the_estimate_counts_the_weights_that_are_made(family):
    from trailmark.config import ModelConfig

    other = {"layers": 3, "width": 48, "heads": 4, "kv_heads": 2, "ffn": 100, "vocab": 300}
    for more in ({}, other, {"tied": True}, {"tied": False}):
        config = ModelConfig(shape=ModelShape(family=family, **more))
        lm = load_model(config)
        count = sum(p.numel() for p in lm.model.parameters())
        assert parameters(config.shape, lm.vocab) == count == describe(config)["parameters"]


@pytest.mark.parametrize(
    ("recipe", "count"), [("vrcli-paper-3b", 3_085_938_688), ("vrcli-paper-7b", 7_615_616_512),
                          ("oreo-qwen-math", 1_543_714_304), ("oreo-gsm8k-gpu", 134_515_008)]
)  # fmt: skip
def test_the_models_of_the_recipes_have_the_size_on_their_cards(recipe, count):
    """As Hugging Face counts the published weights: tied embeddings once."""
    from trailmark.config import ModelConfig
    from trailmark.recipe import load_recipe

    loaded = load_recipe(Path(__file__).parents[1] / f"recipes/{recipe}.yaml")
    assert describe(ModelConfig(**loaded.raw["model"]))["parameters"] == count


def test_the_estimate_of_an_engine_is_what_its_slots_take(monkeypatch):
    """Two layers, 2 of 4 heads kept, 16 wide, float32, 3 slots of 64 columns: 2 * 2 * 2 * 16 * 64 * 4 bytes each."""
    from trailmark.config import LearnerConfig, ModelConfig

    shape = ModelShape(layers=2, width=64, heads=4, kv_heads=2, context=64)
    lm, said = load_model(ModelConfig(shape=shape)), []
    monkeypatch.setattr("trailmark.engines.local.need", lambda amount, *a: said.append(amount))
    monkeypatch.setattr("trailmark.learn.optim.need", lambda amount, *a: said.append(amount))
    LocalEngine(lm, slots=3)
    assert said == [3 * (2 * 2 * 2 * 16 * 64 * 4 + 4 * lm.vocab)]
    Optimiser(lm, LearnerConfig().optim, 1)
    assert said[1] == 12 * sum(p.numel() for p in lm.model.parameters())  # gradient and two moments, float32


def test_memory_that_is_free_is_read_from_the_system():
    assert 0 < memory.free_memory() < 2**50
    memory.need(0, "nothing", "")
    with pytest.raises(TooLarge, match="everything would take at least 1,000 PB of memory"):
        memory.need(1e18, "everything", "take less")


@pytest.mark.parametrize(
    "words",
    [
        ["quickstart", "--seed"], ["eval", "tiny", "--task", "arith", "--seed"], ["play", "arith", "--seed"],
        ["data", "gold", "arith", "out.jsonl", "--seed"], ["data", "taxi", "--out", "out", "--seed"],
        ["worlds", "check", "alfworld", "--seed"],
    ],
)  # fmt: skip
def test_seeds_of_commands(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    for seed in ("-1", str(2**63)):
        done = CliRunner().invoke(app, [*words, seed])
        assert done.exit_code == 2 and "--seed" in done.stderr, done.output
    assert not list(tmp_path.iterdir())


def test_a_file_in_the_place_of_a_quickstart(tmp_path):
    (tmp_path / "file").write_text("mine")
    done = CliRunner().invoke(app, ["quickstart", "--out", str(tmp_path / "file")])
    assert done.exit_code == 2 and "is a file" in done.stderr and (tmp_path / "file").read_text() == "mine"
