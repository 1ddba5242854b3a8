"""The recipes of methods that learn from what they play: `policy_gradient` and `step_rl`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from trailmark.config import Config, EngineConfig, NamesFile, NamesModel, RunConfig, SamplingConfig
from trailmark.credit.steps import Running
from trailmark.errors import RecipeError
from trailmark.methods.configs import CriticConfig, TaskConfig
from trailmark.objectives.base import Objective
from trailmark.objectives.clipped import Clipped
from trailmark.objectives.weighted_logp import WeightedLogp
from trailmark.recipe import Loaded, resolve
from trailmark.samples import Mean
from trailmark.score.config import judge_config
from trailmark.seats.config import SeatConfig, seats_section
from trailmark.steps import Split

Variant = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp"]
OBJECTIVES: dict[str, type[Objective]] = {"clipped": Clipped, "weighted_logp": WeightedLogp}
CLIPPED = {"kind": "clipped", "ratio": "token", "surrogate": "clipped"}
VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {"credit": "group", "mean": "sequence", "objective": {**CLIPPED, "low": 0.2, "high": 0.2}},
    "dr_grpo": {"credit": "group_mean", "mean": "constant", "objective": {**CLIPPED, "low": 0.2, "high": 0.2}},
    "dapo": {"credit": "group", "mean": "token", "objective": {**CLIPPED, "low": 0.2, "high": 0.28}, "refill": 3},
    "gspo": {"credit": "group", "mean": "sequence",
             "objective": {**CLIPPED, "ratio": "sequence", "low": 3e-4, "high": 4e-4}},
    "cispo": {"credit": "group", "mean": "token",
              "objective": {**CLIPPED, "surrogate": "cispo", "low": 1.0, "high": 4.0}},
    "rloo": {"credit": "leave_one_out", "mean": "constant", "objective": {"kind": "weighted_logp"}},
    "reinforce_pp": {"credit": "batch", "mean": "token", "objective": {**CLIPPED, "low": 0.2, "high": 0.2},
                     "kl_reward": 0.01},
}  # fmt: skip
TUNED = ("low", "high", "beta", "kl", "entropy", "refill", "kl_reward")  # settings that a variant leaves to the recipe


class PolicyGradientRecipe(RunConfig):
    task: TaskConfig = Field(TaskConfig(), description="the world")
    prompts_per_step: PositiveInt = Field(8, description="starts (tasks) in one step")
    epochs: PositiveInt | None = Field(None, description="passes over the rows of the task; replaces steps")
    n: PositiveInt = Field(8, description="episodes of each start; they form one group")
    sampling: SamplingConfig = Field(SamplingConfig(), description="how the policy draws")
    engine: EngineConfig = Field(EngineConfig(), description="who writes the tokens")
    seats: dict[str, SeatConfig] = seats_section()
    variant: Variant | None = Field(None, description="a published set of credit, mean and objective, by its name")
    credit: Literal["returns", "group", "group_mean", "leave_one_out", "turn_leave_one_out", "batch"] = Field(
        "group", description="how advantages are computed from rewards"
    )
    kl_reward: float = Field(0.0, ge=0, description="weight of a KL penalty per token in the reward, not in the loss")
    refill: NonNegativeInt = Field(
        0, description="rounds of further starts in place of groups whose episodes all earn the same; these are dropped"
    )
    gamma: float = Field(1.0, ge=0, le=1, description="discount over turns (credit: returns)")
    mean: Mean = Field("token", description="what the loss is averaged over")
    objective: dict[str, Any] = Field({"kind": "clipped"}, description="the loss: its kind and its settings")
    passes: PositiveInt = Field(1, description="passes over the episodes of a step")
    minibatches: PositiveInt = Field(1, description="optimiser steps in one pass")
    overlap: bool = Field(False, description="play the next batch while the learner works; it is one step older")
    old_logp: Literal["learner", "sampler"] = Field(
        "learner", description="where the old log-probs of the ratio come from"
    )
    eval_fn: Annotated[str | None, NamesFile(function=True)] = Field(
        None, description="my_file.py:name, a function like a reward's; its mean over an evaluation is eval/name"
    )

    short = ("data", "reward")

    @classmethod
    def spelled_out(cls, raw: dict[str, Any]) -> dict[str, Any]:
        return with_variant(with_prompts(raw))

    @field_validator("task")
    @classmethod
    def _reader(cls, v: TaskConfig, info: Any) -> TaskConfig:
        """A judge that needs a model but names none uses the model that training starts from."""
        reward, model = v.reward, info.data.get("model")
        if reward is None or model is None:
            return v
        start = model.model_copy(update={"lora": None, "gradient_checkpointing": False})
        return v.model_copy(update={"options": {**v.options, "reward": reward.with_model(start)}})

    @model_validator(mode="after")
    def _groups(self) -> PolicyGradientRecipe:
        if self.variant and self.n < 2 and self.credit == "batch":
            return self
        if self.n < 2 and self.credit not in ("returns", "batch"):
            raise ValueError(
                f"n is 1, and with credit {self.credit} an episode is compared with the others of its start, so every "
                "advantage would be 0: set n to 2 or more, or set credit: returns"
            )
        if self.credit == "turn_leave_one_out" and self.mean != "constant":
            raise ValueError(
                f"credit turn_leave_one_out is unbiased with mean: constant alone, and mean is {self.mean}: a play "
                "that stops early would count its turns more"
            )
        return self

    @field_validator("objective")
    @classmethod
    def _known(cls, v: dict[str, Any]) -> dict[str, Any]:
        if str(v.get("kind")) not in OBJECTIVES:
            if v.get("kind") in ("rejection", "dpo", "ipo", "kto"):
                raise ValueError(
                    f"{v['kind']} is an objective of method preference: write method: preference and "
                    f"objective: {v['kind']}"
                )
            raise ValueError("kind must be clipped or weighted_logp here")
        try:
            return get_objective(v).model_dump()
        except RecipeError as e:
            raise ValueError(str(e)) from e


def get_objective(spec: Mapping[str, Any]) -> Objective:
    kind = spec["kind"]
    return resolve(Loaded(f"objective {kind}", dict(spec)), OBJECTIVES[kind])


def with_variant(raw: dict[str, Any]) -> dict[str, Any]:
    """A recipe in which `variant` has become its credit, mean and objective. A key that says something else is refused:
    the name would promise what is not done. The settings of the objective may be changed."""
    chosen = VARIANTS.get(raw.get("variant"))  # type: ignore[arg-type]
    if chosen is None:
        return raw
    out = dict(raw)
    for key, value in chosen.items():
        given = raw.get(key)
        if key == "objective":
            given = given if isinstance(given, dict) else {}
            fixed = {k: v for k, v in value.items() if k not in TUNED}
            wrong = next((k for k, v in fixed.items() if k in given and given[k] != v), None)
            if wrong:
                raise RecipeError(
                    f"variant {raw['variant']} means objective.{wrong}: {fixed[wrong]}, and the recipe says "
                    f"{given[wrong]}: leave out one of the two."
                )
            out[key] = {**value, **given}
        elif key in raw and given is not None and given != value and key not in TUNED:
            raise RecipeError(
                f"variant {raw['variant']} means {key}: {value}, and the recipe says {given}: leave out one of the two."
            )
        elif given is None:
            out[key] = value
    return out


def with_prompts(raw: dict[str, Any]) -> dict[str, Any]:
    """Rewrite the short keys of a recipe: `data: FILE` becomes task `prompts` with that file, and `reward` becomes the
    task's judge."""
    raw = dict(raw)
    data, reward = raw.pop("data", None), raw.pop("reward", None)
    if data is None and reward is None:
        return raw
    task = dict(raw.get("task") or {})
    options = dict(task.get("options") or {})
    if data is not None:
        if not isinstance(data, str) or task.get("name", "prompts") != "prompts":
            raise RecipeError(
                "key 'data' is short for task prompts with this file: leave out task.name, or leave out data."
            )
        task["name"], options["path"] = "prompts", data
    if reward is not None:
        options["reward"] = judge_config(reward).model_dump(mode="json")  # an error names the key as it is written
    return {**raw, "task": {**task, "options": options}}


class StepRewards(Config):
    """What a step earns: what a reward model says of it, what the whole answer is worth, or both."""

    in_full = True  # with a model, an outcome is paid only if the recipe says so

    model: Annotated[str | None, NamesModel("value")] = Field(
        None, description="a reward model of steps: a run, a checkpoint or a folder; none: the outcome alone"
    )
    classes: list[NonNegativeInt] | None = Field(
        None, description="the classes whose probabilities are summed; none: the last one"
    )
    raw: bool = Field(False, description="the head's number for the last of these classes, in place of a probability")
    running: Running = Field("none", description="each step its own score, or the sum, min or product up to it")
    alpha: float = Field(1.0, ge=0, description="weight of what the reward model says")
    right: float | None = Field(None, description="what a right answer earns at its last step; none: nothing")
    wrong: float = Field(0.0, description="what a wrong answer earns there")
    at_end: bool = Field(False, description="the last step is paid at the token that ends the turn")
    clip: float | None = Field(5.0, gt=0, description="largest reward of a step, up or down; none: no limit")
    split: Split = Field("newline", description="how answers are cut into steps")
    skip: list[str] = Field([], description="types of steps that earn nothing, such as Action")

    @model_validator(mode="after")
    def _some(self) -> StepRewards:
        if self.model is None and self.right is None:
            raise ValueError("nothing is paid: set rewards.model (the process), rewards.right (the outcome), or both")
        return self


class StepRlRecipe(RunConfig):
    """Reinforcement with rewards at the ends of steps."""

    algorithm: Literal["ppo", "grpo", "remax"] = Field(
        "ppo", description="ppo: a critic; grpo: steps against the steps of the group; remax: against the greedy answer"
    )
    task: TaskConfig = Field(TaskConfig(), description="the world")
    prompts_per_step: PositiveInt = Field(8, description="starts (tasks) in one step")
    epochs: PositiveInt | None = Field(None, description="passes over the rows of the task; replaces steps")
    n: PositiveInt = Field(1, description="episodes of each task: one group")
    sampling: SamplingConfig = Field(SamplingConfig(), description="how the policy draws")
    engine: EngineConfig = Field(EngineConfig(), description="who writes the tokens")
    seats: dict[str, SeatConfig] = seats_section()
    rewards: StepRewards = Field(StepRewards(right=1.0), description="what steps earn")
    kl: float = Field(0.1, ge=0, description="price of leaving the start: in the reward, or (grpo) in the loss")
    gamma: float = Field(1.0, ge=0, le=1, description="discount over tokens (ppo, remax)")
    lam: float = Field(0.95, ge=0, le=1, description="of generalised advantages (ppo)")
    clip: float = Field(0.2, gt=0, lt=1, description="how far a ratio may leave 1 (ppo, grpo)")
    value_clip: float | None = Field(0.2, gt=0, description="how far a value may move at once (ppo); none: no limit")
    critic: CriticConfig = Field(
        CriticConfig(), description="the value's model (ppo); no name: the reward model, or else the policy's start"
    )
    passes: PositiveInt = Field(1, description="passes over the episodes of a step")
    minibatches: PositiveInt = Field(1, description="optimiser steps in one pass")

    @model_validator(mode="after")
    def _groups(self) -> StepRlRecipe:
        if self.algorithm == "grpo" and self.n < 2:
            raise ValueError("n is 1, and algorithm grpo compares the steps of several answers: set n to 2 or more")
        return self
