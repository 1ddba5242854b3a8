"""The arithmetic of a plan: bytes, seconds, warnings and the printed rows, each worked out by hand."""

import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from trailmark import methods, plan
from trailmark.commands.app import app
from trailmark.commands.plan import _rows
from trailmark.config import EngineConfig, ModelConfig, OptimConfig, resolve
from trailmark.methods.base import ModelInMemory
from trailmark.models.load import describe
from trailmark.models.tiny import tiny_tokenizer
from trailmark.plan import Memory, Part, Plan, Tokens

SHAPE = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "context": 256}


def model(**more):
    return ModelConfig.model_validate({"name": "tiny", "shape": {**SHAPE, **more.pop("shape", {})}, **more})


def counted(*held, ema=None, offload=(), device="cpu"):
    memory = Memory(device=device)
    plan.count_models(memory, held, SimpleNamespace(learner=SimpleNamespace(ema=ema, offload=offload)))
    return memory


def test_a_frozen_model_has_weights_alone():
    n = describe(model())["parameters"]
    for dtype, item in (("float32", 4), ("bfloat16", 2), ("float64", 8)):
        m = counted(ModelInMemory("ref", model(dtype=dtype)))
        assert (m.weights, m.gradients, m.optimiser, m.engine, m.total) == (item * n, 0, 0, 0, item * n)


def test_what_training_adds():
    n = describe(model())["parameters"]
    adam = counted(ModelInMemory("policy", model(), OptimConfig()))
    assert (adam.weights, adam.gradients, adam.optimiser) == (4 * n, 4 * n, 8 * n) and adam.total == 16 * n
    assert counted(ModelInMemory("policy", model(), OptimConfig(bits=8))).optimiser == 2 * n
    assert counted(ModelInMemory("policy", model(), OptimConfig()), ema=0.9).optimiser == 12 * n
    half = counted(ModelInMemory("policy", model(dtype="bfloat16"), OptimConfig()))
    assert (half.weights, half.gradients, half.optimiser) == (2 * n, 2 * n, 4 * n)  # moments have the weights' dtype
    both = counted(ModelInMemory("policy", model(), OptimConfig()), ModelInMemory("ref", model()))
    assert both.weights == 8 * n and both.total == 20 * n
    head = counted(ModelInMemory("value", model(), OptimConfig(), output=False))  # its output layer has no gradient
    vocab = len(tiny_tokenizer())
    assert head.weights == 4 * n and head.gradients == 4 * (n - vocab * 32) and head.optimiser == 8 * (n - vocab * 32)


def test_what_offload_leaves_on_a_gpu():
    """Moments and frozen weights come to the GPU while no activations lie there: the larger of the two counts."""
    n = describe(model())["parameters"]
    held = ModelInMemory("policy", model(), OptimConfig()), ModelInMemory("ref", model())
    away = ["optimiser", "frozen"]
    m = counted(*held, ema=0.9, offload=away, device="cuda")
    assert (m.weights, m.gradients, m.optimiser, m.moved) == (4 * n, 4 * n, 4 * n, 8 * n) and m.total == 20 * n
    m.activations = 5 * n
    assert m.total == 20 * n
    m.activations = 9 * n
    assert m.total == 21 * n
    assert counted(*held, offload=["frozen"], device="cuda").moved == 4 * n
    assert counted(*held, offload=away).total == counted(*held).total == 20 * n  # on a CPU nothing is moved


def test_adapters_by_their_two_sides():
    """Width 32, queries 32, keys 2 heads of 8: q and o 64 each, k and v 48, and three of 32 + 48."""
    c = model(lora={"rank": 3})
    assert plan.adapter_weights(c) == 3 * 2 * (64 + 48 + 48 + 64 + 80 + 80 + 80)
    assert plan.adapter_weights(model(lora={"rank": 3, "targets": ["q_proj", "v_proj"]})) == 3 * 2 * (64 + 48)
    gpt = model(lora={"rank": 2}, shape={"family": "gpt2", "kv_heads": None, "ffn": None})
    assert plan.adapter_weights(gpt) == 2 * 2 * (4 * 32 + (64 + 160) + 160)
    n, few = describe(c)["parameters"], plan.adapter_weights(c)
    m = counted(ModelInMemory("policy", c, OptimConfig()))
    assert (m.weights, m.gradients, m.optimiser) == (4 * (n + few), 4 * few, 8 * few)


def test_keys_and_values_of_an_engine():
    """Places come in buckets; a place has 2 (keys, values) times 2 layers times 2 heads of 8 numbers."""
    from trailmark.engines.local import BUCKET

    vocab = plan.shape_of(model()).vocab_size
    most = -(-256 // BUCKET) * BUCKET  # of the model's context
    for longest, places in ((1, BUCKET), (BUCKET, BUCKET), (BUCKET + 1, 2 * BUCKET), (10_000, most)):
        m = counted(ModelInMemory("policy", model(), engine=EngineConfig(max_num_seqs=3, max_len=longest)))
        assert m.engine == 3 * (2 * 2 * 16 * places * 4 + 4 * vocab)
    other = counted(ModelInMemory("policy", model(), engine=EngineConfig(max_num_seqs=3, max_len=1, dtype="bfloat16")))
    assert other.engine == 3 * (2 * 2 * 16 * BUCKET * 2 + 4 * vocab)
    assert other.weights == (4 + 2) * describe(model())["parameters"]  # a copy in the other dtype


def test_activations_grow_with_tokens_and_shrink_with_checkpointing():
    c = SimpleNamespace(learner=SimpleNamespace(amp=None))
    half = SimpleNamespace(learner=SimpleNamespace(amp="bf16"))
    trained, frozen = ModelInMemory("policy", model(), OptimConfig()), ModelInMemory("ref", model())
    block, rest = plan.kept_floats(plan.shape_of(model()), 10, "cpu")
    assert (block, rest) == (6 * 32 + 2 * 32 + 2 * 16 + 4 * 48 + 4 + 2 + 10, 2 * 32 + 2 * 32 // 4 + 3)
    vocab = plan.shape_of(model()).vocab_size
    assert plan.activations(trained, 40, 10, c, "cpu") == 40 * 4 * (2 * block + rest) + 40 * vocab * 12
    assert plan.activations(trained, 40, 10, half, "cpu") == 40 * 3 * (2 * block + rest) + 40 * vocab * 12
    assert plan.activations(frozen, 40, 10, c, "cpu") == 2 * 40 * 4 * block
    kept = ModelInMemory("policy", model(gradient_checkpointing=True), OptimConfig())
    assert plan.activations(kept, 40, 10, c, "cpu") == 40 * 4 * (2 * 32 + block + rest) + 40 * vocab * 12
    assert plan.kept_floats(plan.shape_of(model()), 10, "cuda") == (8 * 32 + 3 * 48, 96)


# --- time and words --------------------------------------------------------------------------------------------------


def part(**more):
    given = {"name": "", "steps": 10, "memory": Memory(weights=2e6, gradients=1e6, free=20_000_000), **more}
    return Part(**given)


def test_seconds_of_a_run():
    assert part().total_seconds is None
    p = part(seconds={"sample": 1.5, "update": 0.5}, evaluations=3, evaluation_seconds=2.0)
    assert p.total_seconds == 10 * 2.0 + 3 * 2.0
    made = Plan([part(name="one", warnings=["slow"]), part(warnings=["late"]), p])
    assert made.warnings == ["one: slow", "late"]
    told = made.to_dict()
    assert told["warnings"] == made.warnings and told["parts"][2]["total_seconds"] == 26.0
    assert told["parts"][0]["memory"]["total"] == 3e6 and told["parts"][0]["tokens"] is None
    known = Plan([part(tokens=Tokens(learnt=7, trained=3))]).to_dict()["parts"][0]
    assert known["tokens"]["in_all"] == 70 and json.loads(json.dumps(known)) == known


@pytest.mark.parametrize(("every", "steps", "wanted"), [(0, 10, 0), (3, 10, 4), (5, 10, 2), (20, 10, 1)])
@pytest.mark.parametrize("first", [False, True])
def test_how_many_evaluations(every, steps, wanted, first):
    found = plan._evaluations(SimpleNamespace(eval=SimpleNamespace(every=every, first=first)), steps)
    assert found == wanted + (first and every > 0)


def test_an_evaluation_plays_as_fast_as_a_step_and_reads_in_a_third():
    c = SimpleNamespace(prompts_per_step=2, n=4)
    p = part(seconds={"sample": 2.0, "update": 3.0}, tokens=Tokens(written=5))
    assert plan._evaluation_seconds(p, c, 20) == 2.0 * 20 / 8
    assert plan._evaluation_seconds(p, SimpleNamespace(rl=SimpleNamespace(prompts_per_step=5)), 20) == 8.0
    assert plan._evaluation_seconds(part(seconds={"sample": 2.0, "update": 3.0}, tokens=Tokens()), c, 20) == 1.0


def test_the_rows_that_are_printed():
    rows = _rows(part())
    assert rows == [
        ("memory", "3.0 MB", "of 20 MB free on cpu"),
        ("", "2.0 MB", "weights"),
        ("", "1.0 MB", "gradients"),
    ]
    assert _rows(part(memory=Memory(weights=2e9, free=None)))[0] == ("memory", "2.0 GB", "")
    tokens = Tokens(learnt=1200, trained=300, prompt=800, written=400, first_turns=True)
    more = _rows(part(tokens=tokens, seconds={"sample": 0.25, "score": 0.0, "update": 7.0}, evaluations=2))[3:]
    assert more == [
        ("tokens", "1.2k", "learnt in a step, 300 of them in the loss (first turns, with answers of full length)"),
        ("", "800", "in prompts of a step"),
        ("", "400", "written in a step"),
        ("", "12k", "learnt in 10 steps"),
        ("time", "1:12", "for 10 steps and 2 evaluations"),
        ("", "250 ms", "sample of a step"),
        ("", "7000 ms", "update of a step"),
    ]


def test_what_does_not_fit_names_the_largest_share():
    for key, look in (
        ("weights", "model.dtype, model.quant or a smaller model"),
        ("optimiser", "model.lora"),
        ("activations", "learner.micro_tokens or model.gradient_checkpointing"),
        ("engine", "engine.max_num_seqs or engine.max_len"),
    ):
        p = part(memory=Memory(**{"gradients": 1e6, key: 5e6}, free=5_999_999), warnings=["other"])
        assert plan._too_large(p) and plan._too_large(p)  # told once
        assert p.warnings == ["other", "it does not fit: it needs about 6.0 MB, and 6.0 MB are free on cpu. Most of it "
                              f"is for {key} (5.0 MB): look at {look}"]  # fmt: skip
    fits = part(memory=Memory(weights=5e6, free=5_000_000))
    assert not plan._too_large(fits) and fits.warnings == [] and not plan._too_large(part(memory=Memory(weights=1e99)))


def test_the_warnings_of_a_schedule_word_by_word(tmp_path):
    config = lambda **given: resolve(
        {"method": "sft", "data": "x", "out": str(tmp_path), "model": {"name": "tiny"}, "steps": 3, **given},
        methods.get_method("sft").Config,
    )
    assert plan._schedule_warnings(config()) == plan._schedule_warnings(config(eval={"every": 3})) == []
    told = config(
        eval={"every": 4, "patience": 1}, checkpoint={"every": 5}, learner={"optim": {"warmup": 3}}, eval_data="x"
    )
    assert plan._schedule_warnings(told) == [
        "eval.every is 4, steps is 3: the only evaluation is at the end",
        "checkpoint.every is 5, steps is 3: the only checkpoint is at the end",
        "learner.optim.warmup is 3 of 3 steps: the learning rate never reaches lr",
    ]
    assert plan._schedule_warnings(config(eval={"every": 0, "patience": 1}, eval_data="x")) == [
        "eval.patience needs evaluations, and eval.every is 0: the run never stops early",
        "eval_data is never read: eval.every is 0",
    ]


def test_recipes_that_cannot_be_planned(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lpr.yaml").write_text(json.dumps({"method": "lpr", "model": {"name": "tiny"}}))
    done = CliRunner().invoke(app, ["plan", "lpr.yaml"])
    assert done.exit_code == 2 and "Traceback" not in done.output
    assert " ".join(done.output.split()).endswith(
        "a plan needs the data, which the stages of lpr make themselves: plan its trainings as methods reward_model, "
        "preference and step_rl, with their data"
    )
    assert CliRunner().invoke(app, ["plan", "none.yaml"]).exit_code == 2
    assert [p.name for p in tmp_path.iterdir()] == ["lpr.yaml"]
