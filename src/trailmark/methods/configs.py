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
    Seed,
    resolve,
)
from trailmark.credit.steps import Running
from trailmark.errors import RecipeError, TrailmarkError
from trailmark.formats import FORMATS
from trailmark.objectives import OBJECTIVES, get_objective
from trailmark.objectives.soft_bellman import Level
from trailmark.rollout.search import parse_plan
from trailmark.runs.older import PREFERENCES
from trailmark.samples import Mean
from trailmark.score.classes import Over
from trailmark.score.config import judge_config
from trailmark.seats.config import SeatConfig, seats_section
from trailmark.steps import Split

Head = Literal["listed", "alphabet", "vocabulary"]
Shuffle = Literal["none", "permute", "alphabet"]

# --- policy_gradient -------------------------------------------------------------------------------------------------


class TaskConfig(Config):
    name: str = Field("taxi", description="name of a task, or package.module:Class")
    options: Annotated[dict[str, Any], NamesFile()] = Field({}, description="options of the task")


Variant = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp"]
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
    starts: PositiveInt = Field(8, description="starts (tasks) in one step")
    n: PositiveInt = Field(8, description="episodes of each start; they form one group")
    sampling: SamplingConfig = Field(SamplingConfig(), description="how the policy draws")
    engine: EngineConfig = Field(EngineConfig(), description="who writes the tokens")
    seats: dict[str, SeatConfig] = seats_section()
    variant: Variant | None = Field(None, description="a published set of credit, mean and objective, by its name")
    credit: Literal["returns", "group", "group_mean", "leave_one_out", "batch"] = Field(
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
    truncate: float = Field(2.0, ge=1, description="largest importance weight of a token of an older policy (overlap)")
    old: Literal["learner", "sampler"] = Field("learner", description="where the old log-probs of the ratio come from")

    short = ("data", "reward")

    @classmethod
    def spelled_out(cls, raw: dict[str, Any]) -> dict[str, Any]:
        return with_variant(with_prompts(raw))

    @model_validator(mode="after")
    def _groups(self) -> PolicyGradientRecipe:
        if self.variant and self.n < 2 and self.credit == "batch":
            return self
        if self.n < 2 and self.credit not in ("returns", "batch"):
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
        if isinstance(reward, dict) and "kind" not in reward and isinstance(reward.get("path"), str):
            reward = {"kind": "function", **reward}
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
    trained: Literal["answers", "last", "all"] = Field(
        "answers",
        description="answers: all messages of the assistant; last: its last one, such as a gold text; all: prompts too",
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


Preference = Literal["rejection", "dpo", "ipo", "hinge", "kto"]
PAIRED = ("dpo", "ipo", "hinge")  # objectives of pairs


class PreferenceRecipe(OfflineRecipe):
    objective: Preference = Field("dpo", description="what is learnt")
    beta: float | None = Field(None, gt=0, description="temperature (dpo, ipo, hinge, kto); none: 0.1")
    smooth: float = Field(0.0, ge=0, lt=0.5, description="share of pairs that may be the wrong way round (dpo)")
    per: Literal["answer", "token"] = Field(
        "answer", description="log-ratios: their sum over an answer, or their mean over its tokens (dpo, ipo, hinge)"
    )
    pairs: PositiveInt | None = Field(None, description="most pairs of one group (dpo, ipo, hinge); none: all")
    pair_file: Annotated[str | None, NamesFile()] = Field(
        None, description="JSONL of {chosen, rejected}: which episodes of the data are pairs; none: pairs are made here"
    )
    desirable: float = Field(1.0, ge=0, description="weight of successes (kto)")
    undesirable: float = Field(1.0, ge=0, description="weight of failures (kto)")
    final: OfflineFinal = Field(OfflineFinal(), description="evaluations at the end")

    @model_validator(mode="after")
    def _fits(self) -> PreferenceRecipe:
        if (self.format == "pairs" or self.pair_file) and self.objective not in PAIRED:
            raise ValueError("a file of pairs has no rewards: it is for objective dpo, ipo or hinge")
        if self.pair_file and (self.format == "pairs" or self.pairs):
            raise ValueError("pair_file says which episodes are pairs: leave out format pairs, and pairs")
        if self.smooth and self.objective != "dpo":
            raise ValueError("smooth (label smoothing) belongs to objective dpo alone")
        if self.final.start and self.task is None:
            raise ValueError("final needs a task to play")
        return self


# --- reward_model -------------------------------------------------------------------------------------------------


class ReadConfig(Config):
    """How the numbers of a reward model are read off its head, by whoever scores or searches with it."""

    classes: list[NonNegativeInt] | None = Field(
        None, description="the classes whose probabilities are summed; none: the last one"
    )
    over: Over = Field("last", description="one number over all steps: last, min, mean, product, geomean or sum")


class RewardModelRecipe(RunConfig):
    """A model that says how good an answer is, or how good each of its steps is."""

    kind: Literal["classes", "outcome", "pairwise", "scalar"] = Field(
        "classes",
        description="classes: a class after each labelled step; outcome: right or wrong after the whole answer; "
        "pairwise: a number, higher for the chosen one; scalar: a number after each labelled step",
    )
    data: Annotated[str | list[str], NamesFile()] = Field(
        description="one file or several: episodes with annotations `label`, trajectories, pairs"
    )
    format: str = Field("episodes", description="what it is: episodes, trajectories, react, pairs, …")
    eval_data: Annotated[str | None, NamesFile()] = Field(None, description="a file of the same kind to evaluate on")
    pair_file: Annotated[str | None, NamesFile()] = Field(
        None, description="pairwise: JSONL of {chosen, rejected}, which name episodes of the data"
    )
    label: str = Field("label", description="the annotation with the class of each step; below 0: it has none")
    outputs: int = Field(4, ge=2, description="classes of kind classes; a scalar's target is label / (outputs - 1)")
    seat: str = Field("policy", description="whose turns are judged")
    max_len: PositiveInt | None = Field(None, description="longer answers are left out; none: the model's context")
    batch: PositiveInt = Field(32, description="answers (or pairs) in one step")
    epochs: PositiveInt | None = Field(None, description="passes over the data, in place of steps")
    begin: Annotated[str | None, NamesModel("value")] = Field(
        None, description="a reward model to go on from: a run, a checkpoint or a folder; none: model with a new head"
    )
    read: ReadConfig = Field(ReadConfig(), description="how its numbers are read when it scores or serves")
    checkpoint: CheckpointConfig = Field(CheckpointConfig(metric="eval/accuracy"), description="what is kept")

    @model_validator(mode="after")
    def _fits(self) -> RewardModelRecipe:
        if self.format not in FORMATS:
            raise ValueError(f"format '{self.format}' is not known. Known: {', '.join(FORMATS)}.")
        if self.kind != "pairwise" and (self.format == "pairs" or self.pair_file):
            raise ValueError("pairs are for kind pairwise")
        outputs = {"classes": self.outputs, "outcome": 2}.get(self.kind, 1)
        if wrong := [c for c in self.read.classes or () if c >= outputs]:
            raise ValueError(f"read.classes: there is no class {wrong[0]}: kind {self.kind} has {outputs} output(s)")
        return self

    @property
    def files(self) -> list[str]:
        return [self.data] if isinstance(self.data, str) else self.data


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
            raise ValueError("a file of pairs has no rewards: it is for method preference (dpo, ipo or hinge)")
        if self.level == "step" and self.states == "token":
            raise ValueError("level step needs states: step")
        if self.hinge and self.level != "response":
            raise ValueError("hinge is for level response")
        if self.target == "ema" and self.learner.ema is None:
            raise ValueError("target ema needs learner.ema, such as 0.995")
        if (self.final.search or self.final.start) and self.task is None:
            raise ValueError("final needs a task to play")
        return self


# --- step_rl ------------------------------------------------------------------------------------------------------


class StepRewards(Config):
    """What a step earns: what a reward model says of it, what the whole answer is worth, or both."""

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
    starts: PositiveInt = Field(8, description="tasks drawn in one step")
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
    critic: OreoCritic = Field(
        OreoCritic(), description="the value's model (ppo); no name: the reward model, or else the policy's start"
    )
    passes: PositiveInt = Field(1, description="passes over the episodes of a step")
    minibatches: PositiveInt = Field(1, description="optimiser steps in one pass")

    @model_validator(mode="after")
    def _groups(self) -> StepRlRecipe:
        if self.algorithm == "grpo" and self.n < 2:
            raise ValueError("n is 1, and algorithm grpo compares the steps of several answers: set n to 2 or more")
        return self

    @property
    def overlap(self) -> bool:
        """Whether the next batch is played while the learner works: not here."""
        return False


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


# --- lpr ----------------------------------------------------------------------------------------------------------


class LprGiven(Config):
    """Files from elsewhere in the place of what a stage would make, in the first round. The formats are those of the
    reference implementation (docs/lpr.md), or episodes of ours (*.jsonl)."""

    solutions: str | None = Field(None, description="records {text, label, response, pred, id}")
    states: str | list[str] | None = Field(None, description="such records with inter_states; one file or its shards")
    completions: str | None = Field(None, description="records of completed states, with ids QUESTION_STATE")
    scores: str | None = Field(None, description="records {index, response, ending_logits}")
    pairs: str | None = Field(None, description="records {chosen, reject, id}")


class LprTeacher(Config):
    """Who writes the first solutions: the seat `teacher`, or the task itself. The right ones are imitated."""

    gold: bool = Field(False, description="the task's own worked solutions, in the place of a seat `teacher`")
    starts: PositiveInt | None = Field(None, description="questions; none: all of the split")
    n: PositiveInt = Field(1, description="solutions of each")
    sampling: SamplingConfig | None = Field(None, description="how they are drawn; none: as its seat says")


class LprSample(Config):
    """Solutions of the policy."""

    starts: PositiveInt | None = Field(None, description="questions; none: all of the split")
    n: PositiveInt = Field(10, description="solutions of each question")
    split: str = Field("train", description="of the task")
    sampling: SamplingConfig | None = Field(None, description="how they are drawn; none: as the recipe's sampling")
    models: list[str] = Field(
        [], description="sample these models, too: runs, checkpoints, folders (a checkpoint-* of a run each, say)"
    )


class LprClean(Config):
    """Which solutions are kept, and how they are cut into steps."""

    split: Split = Field("newline", description="how a solution is cut into steps")
    react: Literal["any", "finish", "strict"] = Field(
        "any",
        description="finish: one line with Finish[The answer is …], the last; strict: lines that name no step are also "
        "put behind the one before, and short steps are left out",
    )
    clean: Annotated[str | None, NamesFile(function=True)] = Field(
        None, description="package.module:function or file.py:function: text -> cleaned text, or None to drop it"
    )
    min_steps: NonNegativeInt = Field(0, description="shorter solutions are dropped")
    distinct: bool = Field(False, description="of equal solutions of a question only the first is kept")


class LprStates(Config):
    """Which states (beginnings of solutions that end with a step) are completed. The last step is never one."""

    start: float = Field(0.2, ge=0, le=1, description="share of the steps from which on states are taken")
    end: float = Field(1.0, ge=0, le=1, description="share of the steps up to which they are taken")
    ratio: float = Field(0.4, ge=0, le=1, description="probability with which each of them is taken")
    min_steps: NonNegativeInt = Field(0, description="solutions of fewer steps have no states")
    types: list[str] | None = Field(None, description="only states that end with a step of these types; none: all")
    remove_action: bool = Field(False, description="no states that end with an Action")
    shards: PositiveInt = Field(1, description="files over which the questions are spread")


class LprComplete(Config):
    """How states are completed."""

    k: PositiveInt = Field(3, description="completions of a state; its value is how many of them are right")
    sampling: SamplingConfig | None = Field(None, description="how they are drawn; none: as the recipe's sampling")
    shards: list[NonNegativeInt] | None = Field(None, description="only states of these shards; none: all")
    duplicates: Literal["keep", "discard"] = Field("keep", description="states two of whose completions are equal")
    min_chars: NonNegativeInt = Field(
        0, description="states whose last step says less than so many characters are discarded"
    )


class LprLabels(Config):
    """What the process reward model learns from."""

    full: bool = Field(True, description="whole solutions, too: the best class if right, else class 0")
    dedupe: bool = Field(True, description="equal texts of a question are one example; different values are averaged")
    balance: bool = Field(False, description="as many examples of right solutions as of wrong ones")
    binary: bool = Field(False, description="two classes: some completion is right, or none")
    replay: float = Field(0.0, ge=0, le=1, description="share of earlier examples that are learnt again")
    replay_data: list[str] = Field([], description="files of earlier examples; those of earlier rounds are added")
    dev_shards: list[NonNegativeInt] = Field([], description="shards that are held out to evaluate on")


class LprRead(ReadConfig):
    """How a solution's reward is read off the scores of its steps."""

    classes: list[NonNegativeInt] | None = Field(
        None, description="the classes whose probabilities are summed; none: two or more right completions"
    )
    over: Over = Field("product", description="one number over all steps")
    skip: list[str] = Field([], description="types of steps that take no part, such as Action")
    offset: NonNegativeInt = Field(0, description="so many last steps take no part")
    raw: bool = Field(False, description="the head's number for the last class, in place of a probability")


class LprAccept(Config):
    """Right answers are accepted by chance in place of a margin."""

    beta: float = Field(0.5, gt=0, description="temperature: small takes the best ones, large takes any")
    ratio: float = Field(0.5, gt=0, le=1, description="share of the right answers that are accepted")


class LprStatePairs(Config):
    best_of: PositiveInt = Field(10, description="states of a question that are chosen")
    ratio: float | None = Field(None, gt=0, description="most of them for each pair of whole answers; none: all")
    margin: float = Field(0.5, ge=0, description="a chosen one is worth more than the other by more than this")


class LprStepPairs(Config):
    by: Literal["outcome", "score"] = Field(
        "outcome", description="a right completion above a wrong one, or by the score of the step"
    )
    margin: float = Field(0.5, ge=0, description="of scores")
    whole: bool = Field(False, description="train the whole completion, in place of its first step alone")


class LprPairs(Config):
    """Which pairs are made."""

    process: bool = Field(True, description="rank by process; false: every right answer with every wrong one")
    best_of: PositiveInt | None = Field(10, description="right answers of a question that are chosen; none: all")
    max_wrong: PositiveInt | None = Field(10, description="wrong answers of a question, the hardest first; none: all")
    margin: float = Field(0.5, ge=0, description="a right answer above another is worth more by more than this")
    right_pairs: Literal["after", "before", "only", "none"] = Field(
        "after", description="pairs of two right answers: behind the others, before them, nothing else, or none"
    )
    up_sampling: PositiveInt = Field(1, description="how often pairs of two right answers are repeated")
    all_right: bool = Field(False, description="any right answer may be above another, not the chosen ones alone")
    among_wrong: bool = Field(False, description="wrong answers are ranked among each other, too")
    drop_losers: bool = Field(False, description="a right answer that loses to another is not set against wrong ones")
    reject_surplus: bool = Field(False, description="right answers that were not chosen are rejected like wrong ones")
    hard_only: bool = Field(False, description="right answers are compared only where some answer is wrong")
    accept: LprAccept | None = Field(None, description="accept right answers by chance, in place of the margin")
    min_right_steps: NonNegativeInt = Field(0, description="shorter right answers take no part")
    min_wrong_steps: NonNegativeInt = Field(0, description="shorter wrong answers take no part")
    exclude: Annotated[str | None, NamesFile()] = Field(
        None, description="JSON list of the questions of which no two right answers are compared"
    )
    states: LprStatePairs | None = Field(None, description="also pairs of states")
    steps: LprStepPairs | None = Field(None, description="pairs of steps behind one state, in the place of all others")
    aliased: bool = Field(
        False, description="all pairs of a question become its last one, as in the reference implementation"
    )
    seed: Seed = Field(0, description="of what is accepted by chance")


class LprRecipe(RunConfig):
    """The road: solutions, states, completions, values, reward model, scores, pairs, and what is trained on them."""

    steps: PositiveInt = Field(1, description="rounds")
    task: TaskConfig = Field(TaskConfig(name="arith"), description="the questions")
    seats: dict[str, SeatConfig] = seats_section("`policy` writes solutions and completions, `teacher` the first ones")
    sampling: SamplingConfig = Field(SamplingConfig(max_tokens=256), description="how tokens are drawn")
    engine: EngineConfig = Field(EngineConfig(), description="who writes the tokens")
    given: LprGiven = Field(LprGiven(), description="files from elsewhere")
    teacher: LprTeacher = Field(LprTeacher(), description="the first solutions, where there is a seat `teacher`")
    sft: dict[str, Any] | None = Field(None, description="imitation of the teacher: keys of method preference")
    sample: LprSample = Field(LprSample(), description="solutions")
    clean: LprClean = Field(LprClean(), description="which are kept")
    states: LprStates = Field(LprStates(), description="states")
    complete: LprComplete = Field(LprComplete(), description="completions")
    labels: LprLabels = Field(LprLabels(), description="examples for the reward model")
    prm: dict[str, Any] = Field({}, description="the reward model's training: keys of method reward_model")
    read: LprRead = Field(LprRead(), description="rewards of solutions")
    pairs: LprPairs = Field(LprPairs(), description="pairs")
    preference: dict[str, Any] | None = Field({}, description="keys of method preference; none: no such training")
    rl: dict[str, Any] | None = Field(None, description="keys of method step_rl; none: no such training")

    @field_validator("sft", "preference", "prm", "rl")
    @classmethod
    def _sections(cls, v: dict[str, Any] | None, info: Any) -> dict[str, Any] | None:
        """Each is checked as the recipe that its training will be."""
        if v is None:
            return None
        kind = {"prm": "reward_model", "rl": "step_rl"}.get(info.field_name, "preference")
        filled: dict[str, Any] = {"method": kind} | ({} if kind == "step_rl" else {"data": "", "format": "episodes"})
        if own := sorted(set(v) & {"method", "data", "format", "model", "out", "name", "seed", "pair_file", "task"}):
            raise ValueError(f"key '{own[0]}' is set by lpr itself: leave it out")
        try:
            resolve({**filled, **v}, RECIPES[kind])
        except RecipeError as e:
            raise ValueError(str(e).replace("recipe: ", "").replace("\n", "; ")) from e
        return v

    @model_validator(mode="after")
    def _fits(self) -> LprRecipe:
        if self.preference is None and self.rl is None:
            raise ValueError("preference and rl are both none: there is nothing to train the policy with")
        known = range(self.states.shards)
        for key, shards in (("complete.shards", self.complete.shards), ("labels.dev_shards", self.labels.dev_shards)):
            if wrong := [i for i in shards or () if i not in known]:
                raise ValueError(f"{key}: there is no shard {wrong[0]}: states.shards is {self.states.shards}")
        if self.teacher.gold and "teacher" in self.seats:
            raise ValueError("teacher.gold takes the place of the seat teacher: leave one of them out")
        if unknown := sorted(set(self.seats) - {"policy", "teacher"}):
            raise ValueError(f"seats: '{unknown[0]}' has nothing to do here: the seats of lpr are policy and teacher")
        return self


RECIPES: dict[str, type[RunConfig]] = {
    "lpr": LprRecipe,
    "sft": SftRecipe,
    "policy_gradient": PolicyGradientRecipe,
    "reflect": ReflectRecipe,
    "reflect_imitation": ImitationRecipe,
    "preference": PreferenceRecipe,
    "reward_model": RewardModelRecipe,
    "step_rl": StepRlRecipe,
    "oreo": OreoRecipe,
    "oreo_rounds": RoundsRecipe,
}
