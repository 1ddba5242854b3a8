"""The recipe classes of all methods. They import without torch, so a mistake in a recipe is reported at once."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from trailmark.config import (
    CheckpointConfig,
    Config,
    EngineConfig,
    LoraConfig,
    NamesFile,
    NamesModel,
    OptimConfig,
    RunConfig,
    SamplingConfig,
)
from trailmark.errors import RecipeError, TrailmarkError
from trailmark.formats import FORMATS
from trailmark.objectives import OBJECTIVES, get_objective
from trailmark.objectives.soft_bellman import Level
from trailmark.rollout.search import parse_plan
from trailmark.runs.older import PREFERENCES
from trailmark.samples import Mean
from trailmark.score.config import judge_config
from trailmark.seats.config import SeatConfig, seats_section
from trailmark.steps import Split

Head = Literal["listed", "alphabet", "vocabulary"]
Shuffle = Literal["none", "permute", "alphabet"]

# --- policy_gradient -------------------------------------------------------------------------------------------------


class TaskConfig(Config):
    name: str = Field("taxi", description="name of a task, or package.module:Class")
    options: Annotated[dict[str, Any], NamesFile()] = Field({}, description="options of the task")


class PolicyGradientRecipe(RunConfig):
    task: TaskConfig = Field(TaskConfig(), description="the world")
    starts: PositiveInt = Field(8, description="starts (tasks) in one step")
    n: PositiveInt = Field(8, description="episodes of each start; they form one group")
    sampling: SamplingConfig = Field(SamplingConfig(), description="how the policy draws")
    engine: EngineConfig = Field(EngineConfig(), description="who writes the tokens")
    seats: dict[str, SeatConfig] = seats_section()
    credit: Literal["returns", "group", "leave_one_out"] = Field(
        "group", description="how advantages are computed from rewards"
    )
    gamma: float = Field(1.0, ge=0, le=1, description="discount over turns (credit: returns)")
    mean: Mean = Field("token", description="what the loss is averaged over")
    objective: dict[str, Any] = Field({"kind": "clipped"}, description="the loss: its kind and its settings")
    passes: PositiveInt = Field(1, description="passes over the episodes of a step")
    minibatches: PositiveInt = Field(1, description="optimiser steps in one pass")
    overlap: bool = Field(False, description="play the next batch while the learner works; it is one step older")
    truncate: float = Field(2.0, ge=1, description="largest importance weight of a token of an older policy (overlap)")
    old: Literal["learner", "sampler"] = Field("learner", description="where the old log-probs of the ratio come from")

    short = ("data", "reward")

    @classmethod
    def spelled_out(cls, raw: dict[str, Any]) -> dict[str, Any]:
        return with_prompts(raw)

    @model_validator(mode="after")
    def _groups(self) -> PolicyGradientRecipe:
        if self.n < 2 and self.credit != "returns":
            raise ValueError(
                f"n is 1, and with credit {self.credit} an episode is compared with the others of its start, so every "
                "advantage would be 0: set n to 2 or more, or set credit: returns"
            )
        return self

    @field_validator("objective")
    @classmethod
    def _known(cls, v: dict[str, Any]) -> dict[str, Any]:
        if v.get("kind") not in ("clipped", "weighted_logp"):
            if v.get("kind") in PREFERENCES:
                raise ValueError(
                    f"{v['kind']} is an objective of method preference: write method: preference and "
                    f"objective: {v['kind']}"
                )
            raise ValueError(f"kind must be clipped or weighted_logp here (all: {', '.join(OBJECTIVES)})")
        try:
            return get_objective(v).model_dump()
        except RecipeError as e:
            raise ValueError(str(e)) from e


def with_prompts(raw: dict[str, Any]) -> dict[str, Any]:
    """Rewrite the short keys of a recipe: `data: FILE` becomes task `prompts` with that file, and `reward` becomes the
    task's judge. A judge that needs a model but names none uses the model that training starts from."""
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
        judge_config(reward)
        section: dict[str, Any] = {"kind": "function", "path": reward} if isinstance(reward, str) else dict(reward)
        if section["kind"] in ("function", "likelihood") and not section.get("model"):
            start = raw.get("model") or {}
            section["model"] = {k: v for k, v in start.items() if k not in ("lora", "gradient_checkpointing")}
        options["reward"] = section
    return {**raw, "task": {**task, "options": options}}


# --- sft --------------------------------------------------------------------------------------------------------


class SftRecipe(RunConfig):
    data: Annotated[str, NamesFile()] = Field(
        description="JSONL file of messages, of prompt and response, or of Reflect-RL's texts"
    )
    eval_data: Annotated[str | None, NamesFile()] = Field(None, description="JSONL file to evaluate on")
    batch: PositiveInt = Field(8, description="conversations in one step")
    checkpoint: CheckpointConfig = Field(CheckpointConfig(metric="eval/nll", mode="min"), description="what is kept")
    chat: bool = Field(
        True, description="use the chat template; false: plain text (Reflect-RL's texts are always plain)"
    )


# --- reflect ----------------------------------------------------------------------------------------------------


class ReflectCritic(Config):
    kind: Literal["none", "shared", "separate"] = Field(
        "none",
        description="shared: a head on the policy's model, whose gradient stops at the head; separate: a second model",
    )
    head: Literal["linear", "mlp"] = Field("linear", description="the network that reads the last token's hidden state")
    every: PositiveInt = Field(5, description="policy updates between two trainings of the critic")
    passes: PositiveInt = Field(5, description="passes over the data in one training")
    optim: OptimConfig = Field(OptimConfig(lr=2e-4), description="the critic's optimiser and schedule")


class RlConfig(Config):
    algorithm: Literal["pg", "ppo"] = Field("pg", description="pg: policy gradient; ppo: clipped surrogate")
    starts: PositiveInt = Field(32, description="episodes of one step")
    entropy: float = Field(0.0, ge=0, description="weight of the entropy bonus on the label")
    baseline: Literal["none", "batch"] = Field(
        "none", description="what is subtracted from the return if there is no critic: nothing, or the batch mean"
    )
    clip: float = Field(0.1, gt=0, lt=1, description="the ratio is clipped to 1 - clip and 1 + clip (ppo)")
    epochs: PositiveInt = Field(3, description="optimiser steps on one batch (ppo)")
    critic: ReflectCritic = Field(ReflectCritic(), description="the model that estimates the value of a state")
    replay: NonNegativeInt = Field(50, description="size of the replay memory of successful episodes; 0: no replay")
    replay_batch: PositiveInt = Field(16, description="replayed episodes in one step")


class CurriculumConfig(Config):
    kind: Literal["none", "modes", "depth"] = Field(
        "none",
        description="modes: the taxi's pickup, dropoff and full, a third of the steps each; depth: by target depth",
    )
    index: NonNegativeInt | None = Field(None, description="train on this level only; none: all levels in order")
    merge_first_two: bool = Field(False, description="merge the two shallowest levels (depth)")
    keep: PositiveInt = Field(3, description="most levels; deeper ones are merged into the last (depth)")


class TeacherConfig(Config):
    name: str = Field("bfs", description="who writes reflections and actions: 'bfs' computes the taxi's shortest path")
    path: Annotated[str | None, NamesFile()] = Field(
        None, description="the folder that teacher 'file' reads, written by `trailmark data`"
    )
    starts: PositiveInt = Field(40, description="starts that the teacher plays; with curriculum modes: of each mode")
    perturb: float = Field(
        0.5, ge=0, le=1, description="share of random moves, so that lessons also show how to recover"
    )
    label: Literal["oracle", "behaviour"] = Field("oracle", description="which action is imitated")


class ImitationConfig(Config):
    reflector: NonNegativeInt = Field(200, description="training steps on reflections; 0: skip this stage")
    policy: NonNegativeInt = Field(100, description="training steps on actions; 0: skip this stage")
    batch: PositiveInt = Field(32, description="lessons in one step")
    optim: OptimConfig = Field(OptimConfig(lr=2e-3), description="optimiser and schedule of both stages")


class LoadConfig(Config):
    """Players from earlier runs. Each is a run, a checkpoint or a model folder."""

    policy: Annotated[str | None, NamesModel("policy", stored=True)] = Field(
        None, description="the policy to start from; none: model"
    )
    reflector: Annotated[str | None, NamesModel("reflector", stored=True)] = Field(
        None, description="a trained reflector; none: model"
    )


class ReflectFinal(Config):
    """The evaluations after imitation and at the end. Their episodes are kept by name."""

    split: str | None = Field(None, description="split to play; none: 'all' if the task has it, else eval.split")
    n: PositiveInt | None = Field(None, description="starts of each level; none: all")
    samples: PositiveInt = Field(1, description="plays of each start")
    references: bool = Field(False, description="also play a random player, and the oracle if the world has one")


class PlayersRecipe(RunConfig):
    """The keys that imitation and play of Reflect-RL share."""

    task: TaskConfig = Field(TaskConfig(), description="the world")
    reflect: bool = Field(True, description="use the reflector; false: the policy alone")
    load: LoadConfig = Field(LoadConfig(), description="players from earlier runs")
    teacher: TeacherConfig = Field(TeacherConfig(), description="who shows how")
    curriculum: CurriculumConfig = Field(
        CurriculumConfig(), description="the order in which parts of the world are played"
    )
    head: Head = Field(
        "listed", description="the tokens that a label is sampled from: listed labels, all labels, all tokens"
    )
    labels: Literal["alphabet", "all"] = Field(
        "alphabet",
        description="alphabet: the labels that are one token; all: the other labels become new tokens",
    )
    shuffle: Shuffle = Field(
        "none", description="rename labels at each decision: permute the listed ones, or draw from the whole alphabet"
    )
    reflect_prob: float = Field(
        1.0, ge=0, le=1, description="share of training decisions that get a reflection; the others get none"
    )
    thought: PositiveInt = Field(32, description="most tokens of a reflection")
    instruction: str = Field("", description="text before the prompts of both players, if there is a reflector")
    final: ReflectFinal = Field(ReflectFinal(), description="evaluation after imitation and at the end")
    engine: EngineConfig = Field(EngineConfig(), description="who writes the tokens")

    @model_validator(mode="after")
    def _labels(self) -> PlayersRecipe:
        if self.labels == "all" and self.model.quant != "none":
            raise ValueError(
                "labels: all changes the model's embedding, which is not possible in a quantised model: set "
                "model.quant to none"
            )
        return self


class ReflectRecipe(PlayersRecipe):
    steps: NonNegativeInt = Field(100, description="steps of play; 0: imitation alone")
    sft: ImitationConfig = Field(ImitationConfig(), description="imitation: the stages before play")
    rl: RlConfig = Field(RlConfig(), description="reinforcement learning; its optimiser is learner.optim")

    @model_validator(mode="after")
    def _fits(self) -> ReflectRecipe:
        if self.rl.algorithm == "ppo" and self.rl.critic.kind == "none" and self.rl.baseline == "none":
            raise ValueError("rl.algorithm ppo needs rl.critic.kind shared or separate (or rl.baseline batch)")
        if self.steps == 0 and not self.sft.policy and not (self.reflect and self.sft.reflector):
            raise ValueError("steps, sft.reflector and sft.policy are 0: there is nothing to do")
        return self


class ImitationRecipe(PlayersRecipe):
    """The recipe of one imitation stage. Method `reflect` writes it."""

    seat: Literal["reflector", "policy"] = Field("policy", description="who imitates")
    batch: PositiveInt = Field(32, description="lessons in one step")


# --- from a file of scored trajectories ------------------------------------------------------------------------------


class OfflineFinal(Config):
    """Evaluations at the end. Each writes a file evaluation/NAME.jsonl in the run."""

    start: bool = Field(False, description="also evaluate the policy as it was before training: evaluation/start.jsonl")


class OfflineRecipe(RunConfig):
    """The keys that all methods share which learn from a file of scored trajectories."""

    data: Annotated[str | list[str], NamesFile()] = Field(description="one file of scored trajectories, or several")
    format: str = Field("trajectories", description="format of the file: trajectories, agent, episodes, pairs, …")
    seat: str = Field("policy", description="the seat whose turns are trained")
    max_len: PositiveInt | None = Field(None, description="longer trajectories are left out; none: the model's context")
    batch: PositiveInt = Field(128, description="trajectories (or pairs) in one step")
    epochs: PositiveInt | None = Field(None, description="passes over the data; replaces steps")
    ref: Annotated[str | None, NamesModel()] = Field(
        None, description="the reference: a name as in model.name; none: the policy as it starts"
    )
    task: TaskConfig | None = Field(None, description="a task to evaluate on")
    sampling: SamplingConfig = Field(SamplingConfig(temperature=0.0, max_tokens=256), description="of evaluations")
    engine: EngineConfig = Field(EngineConfig(), description="who writes the tokens of evaluations")

    @field_validator("format")
    @classmethod
    def _known(cls, v: str) -> str:
        if v not in FORMATS:
            raise ValueError(f"format '{v}' is not known. Known: {', '.join(FORMATS)}.")
        return v

    @property
    def files(self) -> list[str]:
        return [self.data] if isinstance(self.data, str) else self.data


# --- preference ---------------------------------------------------------------------------------------------------


class PreferenceRecipe(OfflineRecipe):
    objective: Literal["rejection", "dpo", "ipo", "kto"] = Field("dpo", description="what is learnt")
    beta: float | None = Field(None, gt=0, description="temperature beta (dpo, ipo, kto); none: 0.1")
    pairs: PositiveInt | None = Field(None, description="most pairs of one group (dpo, ipo); none: all")
    desirable: float = Field(1.0, ge=0, description="weight of successes (kto)")
    undesirable: float = Field(1.0, ge=0, description="weight of failures (kto)")
    final: OfflineFinal = Field(OfflineFinal(), description="evaluations at the end")

    @model_validator(mode="after")
    def _fits(self) -> PreferenceRecipe:
        if self.format == "pairs" and self.objective not in ("dpo", "ipo"):
            raise ValueError("a file of pairs has no rewards: it is for objective dpo or ipo")
        if self.final.start and self.task is None:
            raise ValueError("final needs a task to play")
        return self


# --- oreo -------------------------------------------------------------------------------------------------------


class KlConfig(Config):
    """A penalty on the policy's loss: alpha * KL to the reference. It raises the effective temperature to about beta +
    alpha / (2 beta)."""

    kind: Literal["reverse", "forward", "k3"] = Field(
        "reverse", description="exact KL(policy || ref), exact KL(ref || policy), or k3 of the stored tokens"
    )
    alpha: float = Field(
        0.01, ge=0, description="weight of the penalty; the paper uses 0.01 (token), 0.1 (step), 0.3 (response)"
    )
    target: float | None = Field(None, ge=0, description="learn the weight so that the KL reaches this value")
    lr: float = Field(1e-3, gt=0, description="learning rate of the log of the learnt weight")
    start: float = Field(0.0, description="log of the learnt weight at the start")


class OreoCritic(Config):
    """The value model. Its head starts at zero unless it is loaded."""

    name: Annotated[str | None, NamesModel("critic")] = Field(
        None, description="a value model: a folder (also OpenRLHF's), a run, a checkpoint; none: the policy's start"
    )
    lora: LoraConfig | None = Field(None, description="train adapters and the head only; none: all weights")
    optim: OptimConfig | None = Field(None, description="optimiser of the value; none: as the policy's")


class RewardConfig(Config):
    mul: float = Field(1.0, description="R = mul * reward + add")
    add: float = Field(0.0, description="R = mul * reward + add")


class OreoFinal(OfflineFinal):
    search: list[str] = Field(
        [], description="also evaluate searches with the learnt value: beam:3, best_of:4, actions:5"
    )
    temperature: float = Field(1.0, gt=0, description="sampling temperature of the searches")

    @field_validator("search")
    @classmethod
    def _plans(cls, v: list[str]) -> list[str]:
        for text in v:
            try:
                parse_plan(text)
            except TrailmarkError as e:
                raise ValueError(str(e)) from e
        return v


class OreoRecipe(OfflineRecipe):
    beta: float | None = Field(None, gt=0, description="temperature; none: 0.03")
    level: Level = Field("token", description="which policy loss")
    states: Literal["token", "step"] | None = Field(
        None, description="which states have a value; none: step at level step, else token"
    )
    split: Split = Field("newline", description="how turns without steps are split: turn, newline, sentence or auto")
    kl: KlConfig = Field(KlConfig(), description="KL penalty to the reference")
    reward: RewardConfig = Field(RewardConfig(), description="rescaling of the stored rewards")
    importance: Literal["none", "sequence", "batch"] = Field(
        "none",
        description="weight the loss by exp(min(sum l, 1)); mean over each sequence, or over all states of the batch",
    )
    clip_log: float | None = Field(None, gt=0, description="limit on the sum of log-ratios in the value's target")
    hinge: float = Field(
        0.0,
        ge=0,
        description="weight of a term that keeps successes at least as likely as at the start (level response)",
    )
    target: Literal["policy", "ema"] = Field(
        "policy", description="the policy whose log-ratios form the value's target"
    )
    freeze: float = Field(0.0, ge=0, lt=1, description="share of the steps that train the value only, at the start")
    critic_only: bool = Field(False, description="train the value only")
    critic: OreoCritic = Field(OreoCritic(), description="the value's model")
    final: OreoFinal = Field(OreoFinal(), description="evaluations at the end")

    @model_validator(mode="after")
    def _fits(self) -> OreoRecipe:
        if self.format == "pairs":
            raise ValueError("a file of pairs has no rewards: it is for method preference with objective dpo or ipo")
        if self.level == "step" and self.states == "token":
            raise ValueError("level step needs states: step")
        if self.hinge and self.level != "response":
            raise ValueError("hinge is for level response")
        if self.target == "ema" and self.learner.ema is None:
            raise ValueError("target ema needs learner.ema, such as 0.995")
        if (self.final.search or self.final.start) and self.task is None:
            raise ValueError("final needs a task to play")
        return self


# --- oreo_rounds ------------------------------------------------------------------------------------------------


class CollectConfig(Config):
    starts: PositiveInt = Field(64, description="starts of one round")
    n: PositiveInt = Field(10, description="episodes of each start; with balanced: the most")
    balanced: PositiveInt | None = Field(
        None, description="keep at most this many right and this many wrong episodes of each start; none: keep all"
    )
    split: str = Field("train", description="of the task")
    sampling: SamplingConfig = Field(SamplingConfig(max_tokens=256), description="how the policy draws")


class RoundsRecipe(OreoRecipe):
    objective: Literal["oreo", "rejection", "dpo", "ipo", "kto"] = Field(
        "oreo", description="how a round is trained: oreo, or an objective of method preference"
    )
    beta: float | None = Field(None, gt=0, description="temperature; none: 0.03 for oreo, 0.1 for dpo, ipo and kto")
    pairs: PositiveInt | None = Field(None, description="most pairs of one group (dpo, ipo); none: all")
    desirable: float = Field(1.0, ge=0, description="weight of successes (kto)")
    undesirable: float = Field(1.0, ge=0, description="weight of failures (kto)")
    data: Annotated[str | list[str], NamesFile()] = Field("", description="not used: each round collects its own")
    format: str = Field("episodes", description="format of the collected episodes")
    steps: PositiveInt = Field(3, description="rounds")
    training: NonNegativeInt = Field(
        100, description="optimiser steps of a round (epochs, if given, count instead); 0: only collect"
    )
    collect: CollectConfig = Field(CollectConfig(), description="how the episodes of a round are collected")
    task: TaskConfig = Field(TaskConfig(), description="the world")
    anchor: Literal["previous", "start"] = Field("previous", description="the reference of a round")
    critic_from: Literal["previous", "fresh"] = Field("previous", description="where a round's value starts")
    learn_from: Literal["new", "all"] = Field(
        "new", description="the episodes that a round learns from: new, or all so far"
    )

    @model_validator(mode="after")
    def _has_a_value(self) -> RoundsRecipe:
        if self.final.search and self.objective != "oreo":
            raise ValueError(f"final.search needs a value, and objective {self.objective} learns none")
        return self


RECIPES: dict[str, type[RunConfig]] = {
    "sft": SftRecipe,
    "policy_gradient": PolicyGradientRecipe,
    "reflect": ReflectRecipe,
    "reflect_imitation": ImitationRecipe,
    "preference": PreferenceRecipe,
    "oreo": OreoRecipe,
    "oreo_rounds": RoundsRecipe,
}
