"""The trainings of LPR. Each is a run of its own, and its recipe is made here. The losses are those of the methods that
train: `objectives/` has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trailmark.config import ModelConfig, resolve
from trailmark.errors import RecipeError
from trailmark.methods.lpr.round import Round, floats
from trailmark.methods.offline_configs import PreferenceRecipe, RewardModelRecipe
from trailmark.methods.online_configs import StepRlRecipe
from trailmark.methods.pipeline import training_stage
from trailmark.recipe import merged
from trailmark.runs.stages import Stage

MEASURES = ("eval", "engine", "sampling", "final")  # they measure an imitation, and do not change its policy


def sft(r: Round) -> Stage:
    """The policy imitates the lessons."""
    section = {"objective": "rejection", **(r.config.sft or {}), "data": str(r.at("lessons") / "all.jsonl")}
    recipe = training(r, PreferenceRecipe, "preference", "sft", r.config.model, section)
    measures = () if recipe.eval.patience else MEASURES
    return training_stage("sft", recipe, r.root, measures, metrics=floats("sft"))


def prm(r: Round) -> Stage:
    """f learns the class by cross-entropy: L = -log f(r_e | x, state), behind the last token of each step."""
    c, reads = r.config, r.read().model_dump(include={"classes", "over"})
    more = {"skip": c.read.skip, "split": c.clean.split, "offset": c.read.offset, "raw": c.read.raw}
    reads |= {k: v for k, v in more.items() if v and v != "newline"}
    section: dict[str, Any] = {"read": reads, **c.prm}
    if r.learns_values():
        data = r.at("examples")
        section |= {"data": str(data / "train.jsonl"), "outputs": 2 if c.labels.binary else c.complete.n + 1}
        section |= {"eval_data": str(data / "dev.jsonl")} if c.labels.dev_shards else {}
    else:
        section["data"] = str(r.at("cleaned") / "all.jsonl")
    before = Round(c, r.run, r.k - 1)
    if r.k > 1 and c.labels.replay and "begin" not in section and before.needs_prm():
        section["begin"] = str(before.at("prm"))
    recipe = training(r, RewardModelRecipe, "reward_model", r.name("prm"), r.policy(), section)
    return training_stage(r.name("prm"), recipe, r.root, metrics=floats("prm"))


def preference(r: Round) -> Stage:
    """L_DPO on the pairs; or the chosen answers are imitated (`objective: rejection`)."""
    c, folder, section = r.config, r.at("pairs"), dict(r.config.preference or {})
    every = lambda kind: str(r.at(kind) / "all.jsonl")
    if section.get("objective") == "rejection":
        lessons = str(r.root / "lessons" / "all.jsonl")
        section["data"] = [str(folder / "chosen.jsonl"), lessons] if c.teacher.replay else str(folder / "chosen.jsonl")
    elif r.files.pairs:
        section["data"] = str(folder / "sides.jsonl")
    else:
        sides = "completions" if c.pairs.steps is not None else "cleaned"
        kinds = dict.fromkeys([sides, *(["cleaned", "worsened"] if c.worsen is not None else [])])
        section |= {"data": [every(kind) for kind in kinds], "pair_file": str(folder / "pairs.jsonl")}
    recipe = training(r, PreferenceRecipe, "preference", r.name("policy"), r.policy(), section)
    return training_stage(r.name("policy"), recipe, r.root, metrics=floats("policy"))


def reinforcement(r: Round) -> Stage:
    """Each step of a new solution earns what f says there, the last one the outcome."""
    c, model = r.config, r.policy(after_preference=True)
    section: dict[str, Any] = dict(c.rl or {})
    rewards = dict(section.get("rewards", {}))
    if r.pays_steps():
        reads = {"classes": r.read().classes, "skip": c.read.skip, **({"raw": True} if c.read.raw else {})}
        rewards = {**reads, **rewards, "model": str(r.at("prm"))}
    section["rewards"] = {"split": c.clean.split, **rewards}
    section = {"task": c.task.model_dump(), "sampling": c.sampling.model_dump(), **section}
    recipe = training(r, StepRlRecipe, "step_rl", r.name("rl"), model, section)
    return training_stage(r.name("rl"), recipe, r.root, metrics=floats("rl"))


def training(
    r: Round, recipe: Any, method: str, name: str, model: ModelConfig, section: Mapping[str, Any]
) -> Any:
    """The recipe of a training: the recipe's own learner, checkpoint and evaluation, and over them, key by key, what
    its section says."""
    c = r.config
    base: dict[str, Any] = {
        "method": method, "name": f"{c.name} {name}", "out": str(r.root / name), "seed": c.seed,
        "model": model.model_dump(), "learner": c.learner.model_dump(), "checkpoint": c.checkpoint.model_dump(),
        "failures": c.failures,
    }  # fmt: skip
    if method == "reward_model":
        base["checkpoint"]["metric"] = "eval/accuracy"
        base |= {"format": "episodes", "eval": {"every": 1_000_000} if "eval_data" in section else {}}  # at the end
    else:
        base |= {"eval": c.eval.model_dump(), "engine": c.engine.model_dump()}
    if method == "preference":
        greedy = {**c.sampling.model_dump(), "temperature": 0.0}
        base |= {"format": "episodes", "task": c.task.model_dump(), "sampling": greedy}
    try:
        return resolve(merged(base, section), recipe)
    except RecipeError as problem:
        raise RecipeError(f"stage '{name}': {str(problem).removeprefix('recipe: ')}") from None
