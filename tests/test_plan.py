"""What a plan says of memory and tokens is what is measured and what a run logs."""

import json
import os
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from trailmark import memory, methods, plan
from trailmark.commands.app import app
from trailmark.config import load_recipe, resolve
from trailmark.learn.checkpoint import seed_all
from trailmark.runs.launch import launch
from trailmark.runs.store import Run, read_metrics

RECIPES = Path(__file__).parents[1] / "recipes"
SHAPE = {"layers": 2, "width": 32, "heads": 4, "context": 256}
ARITH = {
    "method": "policy_gradient",
    "task": {"name": "arith"},
    "prompts_per_step": 3,
    "n": 4,
    "sampling": {"max_tokens": 6},
}


def recipe(tmp_path, **given):
    if "data" in given:
        said = lambda i: "so " * (i % 5) + f"{i % 7 + i % 3}"
        rows = [{"prompt": f"{i % 7}+{i % 3}=", "response": said(i), "reward": i % 2} for i in range(40)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        given["data"] = str(tmp_path / "rows.jsonl")
    shape = {**SHAPE, **given.pop("shape", {})}
    lora = given.pop("lora", None)
    given = {"out": str(tmp_path / "run"), "model": {"name": "tiny", "shape": shape, "lora": lora}, "steps": 3} | given
    method = methods.get_method(given["method"])
    return method, resolve(given, method.Config)


CASES = {
    "sft": {"method": "sft", "data": "", "batch": 6},
    "sft gpt2": {"method": "sft", "data": "", "batch": 6, "shape": {"family": "gpt2"}},
    "sft qwen2": {"method": "sft", "data": "", "batch": 6, "shape": {"family": "qwen2", "kv_heads": 2, "ffn": 48}},
    "lora": {"method": "sft", "data": "", "lora": {"rank": 3}},
    "dpo": {"method": "preference", "data": "", "batch": 6},
    "rejection": {"method": "preference", "data": "", "batch": 6, "objective": "rejection"},
    "oreo": {"method": "oreo", "data": "", "batch": 5, "learner": {"ema": 0.9}},
    "grpo": ARITH,
    "grpo with a reference": {**ARITH, "objective": {"kind": "clipped", "beta": 0.1}},
}


def bytes_of(tensors):
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("name", CASES)
def test_memory_is_what_the_tensors_take(tmp_path, name):
    """Weights, moments, gradients, keys and values are counted by their tensors, and by hooks what a pass keeps for its
    backward pass. The adapters' own activations are not planned."""
    cls, config = recipe(tmp_path, **CASES[name])
    said = plan.make_plan(config, probe=False).parts[0].memory
    seed_all(0)
    run = Run.create(tmp_path / "measured", "method: x\n")
    method = cls(config, run)
    update = next(iter(method.updates(1)))
    models = {id(lm): lm for lm in method.learner.models.values()}.values()
    weights = [p for lm in models for p in lm.model.state_dict().values()]
    heads = sum(p.numel() * 4 for lm in models for head in lm.heads.values() for p in head.parameters())
    assert said.weights == pytest.approx(bytes_of(weights), rel=0.002)
    own = {p.untyped_storage().data_ptr() for p in weights}
    kept = {}

    def keep(t):
        if t.untyped_storage().data_ptr() not in own and t.is_floating_point():
            kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        method.learner.gradient(update.samples, update.objective, method.learner.optimisers)
    grads = [p.grad for o in method.learner.optimisers.values() for p in o.named.values() if p.grad is not None]
    assert said.gradients == pytest.approx(bytes_of(grads) - heads, rel=0.02)
    for o in method.learner.optimisers.values():
        o.step()
    states = [item for o in method.learner.optimisers.values() for item in o.tensors().items()]
    moments = [t for n, t in states if not n.startswith("step/")]
    assert said.optimiser == pytest.approx(bytes_of(moments) - 3 * heads * bool(heads), rel=0.03)
    if name != "lora":
        size = max(p.ids.size for p in method.learner.pack(update.samples))
        logits = 12 * min(2048, size) * method.learner.models["policy"].vocab * len(method.learner.optimisers)
        assert said.activations - logits == pytest.approx(bytes_of(kept.values()), rel=0.25)
    engines = getattr(getattr(method, "opened", None), "engines", {}).values()
    assert len(engines) == (config.method == "policy_gradient")
    for engine in engines:
        held = [*engine.decoder.cache.keys.values(), *engine.decoder.cache.values.values()]
        assert said.engine == bytes_of(held) + engine.slots * 4 * engine.lm.vocab


def test_models_besides_the_policy_are_counted(tmp_path):
    """With `overlap` the engine has weights of its own; step_rl has a reference and a critic."""
    weights = lambda **given: plan.make_plan(recipe(tmp_path, **given)[1], probe=False).parts[0].memory.weights
    one = weights(**ARITH)
    assert weights(**ARITH, overlap=True) == 2 * one and weights(**ARITH, kl_reward=0.1) == 2 * one
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "gold": "b"}\n{"prompt": "c", "gold": "d"}\n')
    gold = {**ARITH, "task": {"name": "prompts", "options": {"path": str(tmp_path / "rows.jsonl")}}}
    reader = {"kind": "likelihood", "model": {"name": "tiny", "shape": {**SHAPE, "layers": 2}}}
    assert weights(**gold, reward=reader) == 2 * one
    steps = {**ARITH, "method": "step_rl"}
    assert weights(**steps) == 3 * one and weights(**steps, algorithm="grpo") == 2 * one


def test_the_papers_runs_of_vr_cli():
    """The comment of recipes/vrcli-paper-3b.yaml: what both need on a GPU."""
    counted = {}
    for name in ("3b", "7b"):
        method = methods.get_method("policy_gradient")
        config = resolve(load_recipe(RECIPES / f"vrcli-paper-{name}.yaml"), method.Config)
        memory = plan.Memory(device="cuda")
        plan.count_models(memory, method.models_in_memory(config), config)
        counted[name] = memory.total / 1e9
        assert config.model.dtype == "float32" and config.learner.amp == "bf16" and config.eval.n is None
    assert counted == {"3b": pytest.approx(70.0, abs=0.1), "7b": pytest.approx(165.2, abs=0.1)}


@pytest.mark.parametrize("name", [*CASES, "overlap"])
@pytest.mark.parametrize("probe", [True, False])
def test_tokens_are_those_that_the_run_logs(tmp_path, name, probe):
    cls, config = recipe(tmp_path, **{**CASES, "overlap": {**ARITH, "overlap": True}}[name])
    (part,) = plan.make_plan(config, probe).parts
    assert not (tmp_path / "run").exists() and (part.seconds is not None) == probe
    launch(cls, config)
    rows = read_metrics(tmp_path / "run")
    learnt = sum(t["learn_tokens"] for t in read_metrics(tmp_path / "run" / "timings.jsonl"))
    if probe or config.method != "policy_gradient":
        assert part.steps * part.tokens.learnt == learnt and not part.tokens.first_turns
    else:
        assert part.tokens.first_turns and part.tokens.written == 3 * 4 * 6
        assert learnt <= part.steps * part.tokens.learnt <= learnt + 3 * 3 * 4 * 6
    if probe and config.method == "policy_gradient":
        assert part.steps * part.tokens.written == sum(r["written_tokens"] for r in rows)
        assert part.steps * part.tokens.trained == sum(r["written_tokens"] for r in rows)


def test_a_staged_recipe_has_a_part_for_each_stage(tmp_path):
    _, config = recipe(
        tmp_path, method="reflect", task={"name": "taxi", "options": {"mode": "pickup"}}, teacher={"prompts": 4},
        sft={"reflector": 2, "policy": 2, "batch": 4}, thought=40, final={"n": 2}, rl={"prompts_per_step": 2}, steps=1,
        shape={"context": 512},
    )  # fmt: skip
    made = plan.make_plan(config)
    assert [(p.name, p.steps) for p in made.parts] == [("reflector", 2), ("policy", 2), ("play", 1)]
    assert all(p.tokens.learnt > 0 and p.seconds["update"] > 0 for p in made.parts)
    assert made.parts[1].tokens.trained == 4 and made.parts[2].tokens.written > 0
    told = made.to_dict()["parts"][0]
    assert told["memory"]["total"] == made.parts[0].memory.total
    assert told["tokens"]["in_all"] == 2 * told["tokens"]["learnt"]


def warned(tmp_path, **given):
    _, config = recipe(tmp_path, **given)
    return plan.make_plan(config, probe=False).warnings


def test_what_cannot_go_well_is_told(tmp_path, monkeypatch):
    assert warned(tmp_path, **CASES["sft"]) == []
    told = warned(tmp_path, **CASES["sft"], eval={"every": 10, "patience": 2}, checkpoint={"every": 7},
                  learner={"optim": {"warmup": 3}})  # fmt: skip
    assert [w.split(",")[0].split(" of ")[0] for w in told] == [
        "eval.every is 10", "checkpoint.every is 7", "learner.optim.warmup is 3"
    ]  # fmt: skip
    (never,) = warned(tmp_path, **CASES["sft"], eval_data=str(tmp_path / "rows.jsonl"))
    assert "eval_data is never read" in never
    (room,) = warned(tmp_path, **{**ARITH, "engine": {"max_len": 32}, "sampling": {"max_tokens": 30}})
    assert "do not fit the 32 of the engine" in room and "engine.max_len=" in room
    (alone,) = warned(tmp_path, **{**ARITH, "learner": {"micro_tokens": 8}})
    assert "each sequence is computed alone" in alone
    monkeypatch.setattr(plan, "free_memory", lambda device: 100_000)
    loaded = []
    monkeypatch.setattr(methods.get_method("sft"), "__init__", lambda *a: loaded.append(a))
    (large,) = warned(tmp_path, **CASES["sft"])
    assert "it does not fit" in large and "model.lora" in large and loaded == []


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, config = recipe(tmp_path, **CASES["sft"])
    given = json.dumps({"method": "sft", "data": config.data, "model": {"name": "tiny", "shape": SHAPE}, "steps": 4})
    (tmp_path / "r.yaml").write_text(given)
    done = CliRunner().invoke(app, ["plan", "r.yaml"])
    assert done.exit_code == 0 and "learnt in 4 steps" in done.output and "update of a step" in done.output
    done = CliRunner().invoke(app, ["plan", "r.yaml", "eval.every=9", "--no-probe", "--json"])
    (part,) = json.loads(done.output)["parts"]
    assert done.exit_code == 1 and part["seconds"] is None and "eval.every is 9" in part["warnings"][0]
    (tmp_path / "rounds.yaml").write_text(json.dumps({"method": "oreo_rounds"}))
    done = CliRunner().invoke(app, ["plan", "rounds.yaml"])
    assert done.exit_code == 2 and "plan one round as method oreo" in done.output
    assert sorted(os.listdir(tmp_path)) == ["r.yaml", "rounds.yaml", "rows.jsonl"] and memory.size(1e6) == "1.0 MB"
