"""What the recipe of each method may say. No torch here, so that a mistake in a recipe is told at once."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from trailmark.config import (
    CheckpointConfig,
    Config,
    EngineConfig,
    LoraConfig,
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
from trailmark.samples import Mean
from trailmark.score.config import judge_config
from trailmark.seats.config import SeatConfig, seats_section
from trailmark.steps import Split

Head = Literal["listed", "alphabet", "vocabulary"]
Shuffle = Literal["none", "permute", "alphabet"]

# --- policy_gradient -------------------------------------------------------------------------------------------------


class TaskConfig(Config):
    name: str = Field("taxi", description="a registered task, or package.module:Make")
    options: dict[str, Any] = Field({}, description="keywords of the task")


class PolicyGradientRecipe(RunConfig):
    task: TaskConfig = Field(TaskConfig(), description="the world")
    starts: PositiveInt = Field(8, description="tasks drawn in one step")
    n: PositiveInt = Field(8, description="episodes of each task: one group")
    sampling: SamplingConfig = Field(SamplingConfig(), description="how the policy draws")
    engine: EngineConfig = Field(EngineConfig(), description="who writes the tokens")
    seats: dict[str, SeatConfig] = seats_section()
    credit: Literal["returns", "group", "leave_one_out"] = Field("group", description="who earned the reward")
    gamma: float = Field(1.0, ge=0, le=1, description="discount over turns (credit: returns)")
    mean: Mean = Field("token", description="how tokens, turns and episodes are averaged")
    objective: dict[str, Any] = Field({"kind": "clipped"}, description="kind and its settings")
    passes: PositiveInt = Field(1, description="passes over the episodes of a step")
    minibatches: PositiveInt = Field(1, description="optimiser steps in one pass")
    old: Literal["learner", "sampler"] = Field("learner", description="whose log-probs the ratio starts from")

    short = ("data", "reward")

    @classmethod
    def spelled_out(cls, raw: dict[str, Any]) -> dict[str, Any]:
        return with_prompts(raw)

    @model_validator(mode="after")
    def _groups(self) -> PolicyGradientRecipe:
        if self.n < 2 and self.credit != "returns":
            raise ValueError(
                f"n is 1, and with credit {self.credit} an episode is compared with the others of its start, so every "
                "advantage would be 0: set n to 2 or more, or credit: returns"
            )
        return self

    @field_validator("objective")
    @classmethod
    def _known(cls, v: dict[str, Any]) -> dict[str, Any]:
        if v.get("kind") not in ("clipped", "weighted_logp"):
            raise ValueError(f"kind must be clipped or weighted_logp here (all: {', '.join(OBJECTIVES)})")
        try:
            return get_objective(v).model_dump()
        except RecipeError as e:
            raise ValueError(str(e)) from e


def with_prompts(raw: dict[str, Any]) -> dict[str, Any]:
    """A recipe in which `data: FILE` has become task `prompts` of that file, and `reward` the task's judge. A judge
    that reads texts with a model, and names none, reads with the model that training starts from."""
    raw = dict(raw)
    data, reward = raw.pop("data", None), raw.pop("reward", None)
    if data is None and reward is None:
        return raw
    task = dict(raw.get("task") or {})
    options = dict(task.get("options") or {})
    if data is not None:
        if not isinstance(data, str) or task.get("name", "prompts") != "prompts":
            raise RecipeError(
                "key 'data': it is a file of prompts and stands for task prompts: leave out task.name, or data."
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
    data: str = Field(description="JSONL of messages, of prompt and response, or of Reflect-RL's texts")
    eval_data: str | None = Field(None, description="JSONL to evaluate on")
    batch: PositiveInt = Field(8, description="conversations in one step")
    checkpoint: CheckpointConfig = Field(CheckpointConfig(metric="eval/nll", mode="min"), description="what is kept")
    chat: bool = Field(True, description="use the chat template; false: plain text, as Reflect-RL's texts always are")


# --- reflect ----------------------------------------------------------------------------------------------------


class ReflectCritic(Config):
    kind: Literal["none", "shared", "separate"] = Field(
        "none", description="shared: a head on the policy's body, which it does not train; separate: a model of its own"
    )
    head: Literal["linear", "mlp"] = Field("linear", description="what reads the last token's state")
    every: PositiveInt = Field(5, description="policy updates between two rounds of the critic")
    passes: PositiveInt = Field(5, description="passes of one round")
    optim: OptimConfig = Field(OptimConfig(lr=2e-4), description="its optimiser and schedule")


class RlConfig(Config):
    algorithm: Literal["pg", "ppo"] = Field("pg", description="policy gradient, or the clipped surrogate")
    starts: PositiveInt = Field(32, description="episodes of one step")
    entropy: float = Field(0.0, ge=0, description="weight of the entropy of the label")
    baseline: Literal["none", "batch"] = Field(
        "none", description="what is taken off the return where there is no critic: nothing, or the mean of the batch"
    )
    clip: float = Field(0.1, gt=0, lt=1, description="how far a ratio may leave 1 (ppo)")
    epochs: PositiveInt = Field(3, description="optimiser steps on one batch (ppo)")
    critic: ReflectCritic = Field(ReflectCritic(), description="who says what a state is worth")
    replay: NonNegativeInt = Field(50, description="successes remembered; 0: no replay")
    replay_batch: PositiveInt = Field(16, description="of them in one step")


class CurriculumConfig(Config):
    kind: Literal["none", "modes", "depth"] = Field(
        "none", description="modes: pickup, dropoff, full of the taxi, a third each; depth: by how deep a target lies"
    )
    index: NonNegativeInt | None = Field(None, description="train on this stage alone; none: one after the other")
    merge_first_two: bool = Field(False, description="the two shallowest stages are one (depth)")
    keep: PositiveInt = Field(3, description="so many stages stay, the deeper ones are one with the last (depth)")


class TeacherConfig(Config):
    name: str = Field("bfs", description="who writes reflections and actions: 'bfs' knows the taxi's shortest way")
    path: str | None = Field(None, description="what 'file' reads: a folder that `trailmark data` wrote")
    starts: PositiveInt = Field(40, description="starts that the teacher shows; in a curriculum of modes, of each mode")
    perturb: float = Field(
        0.5, ge=0, le=1, description="share of random moves on the way, so that it also shows recovery"
    )
    label: Literal["oracle", "behaviour"] = Field("oracle", description="which action is imitated")


class ImitationConfig(Config):
    reflector: NonNegativeInt = Field(200, description="steps on reflections; 0: no such stage")
    policy: NonNegativeInt = Field(100, description="steps on actions; 0: no such stage")
    batch: PositiveInt = Field(32, description="lessons in one step")
    optim: OptimConfig = Field(OptimConfig(lr=2e-3), description="optimiser and schedule of either stage")


class LoadConfig(Config):
    """Players from earlier runs: a run, a checkpoint or a model folder."""

    policy: Annotated[str | None, NamesModel("policy", stored=True)] = Field(
        None, description="where the policy begins; none: as model says"
    )
    reflector: Annotated[str | None, NamesModel("reflector", stored=True)] = Field(
        None, description="the reflector, already taught; none: as model says"
    )


class ReflectFinal(Config):
    """The evaluations after imitation and at the end, whose episodes are kept by name."""

    split: str | None = Field(None, description="none: 'all' where the task has it, else what eval says")
    n: PositiveInt | None = Field(None, description="starts of each stage; none: all")
    samples: PositiveInt = Field(1, description="plays of each start")
    references: bool = Field(False, description="also play at random, and by the oracle where the world has one")


class PlayersRecipe(RunConfig):
    """What imitation and play of Reflect-RL have in common."""

    task: TaskConfig = Field(TaskConfig(), description="the world")
    reflect: bool = Field(True, description="with the reflector; false: the policy alone")
    load: LoadConfig = Field(LoadConfig(), description="players from earlier runs")
    teacher: TeacherConfig = Field(TeacherConfig(), description="who shows how")
    curriculum: CurriculumConfig = Field(CurriculumConfig(), description="the order of what is played")
    head: Head = Field("listed", description="what the label is drawn from: listed labels, all labels, all tokens")
    labels: Literal["alphabet", "all"] = Field(
        "alphabet",
        description="the labels that the tokenizer has as single tokens, or all: the others become new tokens",
    )
    shuffle: Shuffle = Field(
        "none", description="new labels at each decision: a permutation, or drawn from the whole alphabet"
    )
    reflect_prob: float = Field(
        1.0, ge=0, le=1, description="share of decisions in training that hear the reflector; the others hear nothing"
    )
    thought: PositiveInt = Field(32, description="most tokens of a reflection")
    instruction: str = Field("", description="text before both players' prompts, with the reflector")
    final: ReflectFinal = Field(ReflectFinal(), description="evaluation after imitation and at the end")
    engine: EngineConfig = Field(EngineConfig(), description="who writes the tokens")

    @model_validator(mode="after")
    def _labels(self) -> PlayersRecipe:
        if self.labels == "all" and self.model.quant != "none":
            raise ValueError(
                "labels all changes the base, which a quantised one does not allow: set model.quant to none"
            )
        return self


class ReflectRecipe(PlayersRecipe):
    steps: NonNegativeInt = Field(100, description="steps of play; 0: imitation alone")
    sft: ImitationConfig = Field(ImitationConfig(), description="imitation, in stages before play")
    rl: RlConfig = Field(RlConfig(), description="reinforcement; its optimiser is learner.optim")

    @model_validator(mode="after")
    def _fits(self) -> ReflectRecipe:
        if self.rl.algorithm == "ppo" and self.rl.critic.kind == "none" and self.rl.baseline == "none":
            raise ValueError("rl.algorithm ppo needs rl.critic.kind shared or separate (or rl.baseline batch)")
        if self.steps == 0 and not self.sft.policy and not (self.reflect and self.sft.reflector):
            raise ValueError("steps, sft.reflector and sft.policy are 0: there is nothing to do")
        return self


class ImitationRecipe(PlayersRecipe):
    """A stage of `reflect`, which writes this recipe itself."""

    seat: Literal["reflector", "policy"] = Field("policy", description="who imitates")
    batch: PositiveInt = Field(32, description="lessons in one step")


# --- from a file of scored trajectories ------------------------------------------------------------------------------


class OfflineFinal(Config):
    """Evaluations at the end, beside those on the way; each is a file evaluation/NAME.jsonl of the run."""

    start: bool = Field(False, description="of the policy as it started: evaluation/start.jsonl")


class OfflineRecipe(RunConfig):
    """What the methods that learn from a file of scored trajectories have in common."""

    data: str | list[str] = Field(description="one file of scored trajectories, or several")
    format: str = Field("trajectories", description="what it is: trajectories, agent, episodes, pairs, …")
    seat: str = Field("policy", description="whose turns are trained")
    max_len: PositiveInt | None = Field(None, description="longer trajectories are left out; none: the model's context")
    batch: PositiveInt = Field(128, description="trajectories (or pairs) in one step")
    epochs: PositiveInt | None = Field(None, description="passes over the data, in place of steps")
    ref: Annotated[str | None, NamesModel()] = Field(
        None, description="the reference: a name as in model.name; none: the policy as it starts"
    )
    task: TaskConfig | None = Field(None, description="a world to evaluate in")
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
    beta: float | None = Field(None, gt=0, description="temperature (dpo, ipo, kto); none: 0.1")
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
    """alpha * KL to the reference, added to the policy's loss. It raises the effective temperature: about beta + alpha
    / (2 beta)."""

    kind: Literal["reverse", "forward", "k3"] = Field(
        "reverse", description="exact KL(policy || ref), exact KL(ref || policy), or k3 of the stored tokens"
    )
    alpha: float = Field(0.01, ge=0, description="its weight; the paper: token 0.01, step 0.1, response 0.3")
    target: float | None = Field(None, ge=0, description="learn the weight so that the KL becomes this")
    lr: float = Field(1e-3, gt=0, description="learning rate of the log of the learnt weight")
    start: float = Field(0.0, description="log of the learnt weight at the start")


class OreoCritic(Config):
    """The model of the value. Its head starts at zero unless it is loaded."""

    name: Annotated[str | None, NamesModel("critic")] = Field(
        None, description="a value model: a folder (also OpenRLHF's), a run, a checkpoint; none: the policy's start"
    )
    lora: LoraConfig | None = Field(None, description="train adapters and the head only; none: all weights")
    optim: OptimConfig | None = Field(None, description="its optimiser; none: as the policy's")


class RewardConfig(Config):
    mul: float = Field(1.0, description="R = mul * reward + add")
    add: float = Field(0.0, description="R = mul * reward + add")


class OreoFinal(OfflineFinal):
    search: list[str] = Field([], description="with the value that was learnt: beam:3, best_of:4, actions:5")
    temperature: float = Field(1.0, gt=0, description="of what is searched")

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
        None, description="which moments have a value; none: steps at level step, else tokens"
    )
    split: Split = Field("newline", description="steps of turns that have none: turn, newline, sentence or auto")
    kl: KlConfig = Field(KlConfig(), description="what holds the policy near the reference")
    reward: RewardConfig = Field(RewardConfig(), description="scale of the stored rewards")
    importance: Literal["none", "sequence", "batch"] = Field(
        "none", description="weigh by exp(min(sum l, 1)); the mean over each sequence, or over all states of a batch"
    )
    clip_log: float | None = Field(None, gt=0, description="limit of the sum of log-ratios in the value's target")
    hinge: float = Field(0.0, ge=0, description="at level response: keeps successes at least as likely as at the start")
    target: Literal["policy", "ema"] = Field("policy", description="whose log-ratios are the value's target")
    freeze: float = Field(0.0, ge=0, lt=1, description="share of the steps before the policy starts to move")
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
    starts: PositiveInt = Field(64, description="tasks of a round")
    n: PositiveInt = Field(10, description="episodes of each task; with balanced: at most so many")
    balanced: PositiveInt | None = Field(
        None, description="keep at most this many right and wrong ones of each task; none: keep all"
    )
    split: str = Field("train", description="of the task")
    sampling: SamplingConfig = Field(SamplingConfig(max_tokens=256), description="how the policy draws")


class RoundsRecipe(OreoRecipe):
    objective: Literal["oreo", "rejection", "dpo", "ipo", "kto"] = Field(
        "oreo", description="how a round learns: oreo, or as method preference does"
    )
    beta: float | None = Field(None, gt=0, description="temperature; none: 0.03 for oreo, 0.1 for dpo, ipo and kto")
    pairs: PositiveInt | None = Field(None, description="most pairs of one group (dpo, ipo); none: all")
    desirable: float = Field(1.0, ge=0, description="weight of successes (kto)")
    undesirable: float = Field(1.0, ge=0, description="weight of failures (kto)")
    data: str | list[str] = Field("", description="not used: each round collects its own")
    format: str = Field("episodes", description="of what is collected")
    steps: PositiveInt = Field(3, description="rounds")
    training: NonNegativeInt = Field(
        100, description="optimiser steps of a round (epochs, if given, count instead); 0: only collect"
    )
    collect: CollectConfig = Field(CollectConfig(), description="how a round plays")
    task: TaskConfig = Field(TaskConfig(), description="the world")
    anchor: Literal["previous", "start"] = Field("previous", description="the reference of a round")
    critic_from: Literal["previous", "fresh"] = Field("previous", description="where a round's value starts")
    learn_from: Literal["new", "all"] = Field("new", description="which episodes a round learns from")

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
