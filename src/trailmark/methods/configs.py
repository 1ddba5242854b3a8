"""What the recipe of each method may say. No torch here, so that a mistake in a recipe is told at once."""

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
    name: str = Field("taxi", description="a registered task, or package.module:Make")
    options: Annotated[dict[str, Any], NamesFile()] = Field({}, description="keywords of the task")


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
                f"n is 1, and with credit {self.credit} an episode is compared with the others of its start, so every advantage "
                "would be 0: set n to 2 or more, or credit: returns"
            )
        return self

    @field_validator("objective")
    @classmethod
    def _known(cls, v: dict[str, Any]) -> dict[str, Any]:
        if v.get("kind") not in ("clipped", "weighted_logp"):
            if v.get("kind") in PREFERENCES:
                raise ValueError(f"{v['kind']} is an objective of method preference: write method: preference and objective: {v['kind']}")
            raise ValueError(f"kind must be clipped or weighted_logp here (all: {', '.join(OBJECTIVES)})")
        try:
            return get_objective(v).model_dump()
        except RecipeError as e:
            raise ValueError(str(e)) from e


def with_prompts(raw: dict[str, Any]) -> dict[str, Any]:
    """A recipe in which `data: FILE` has become task `prompts` of that file, and `reward` the task's judge. A judge that reads
    texts with a model, and names none, reads with the model that training starts from."""
    raw = dict(raw)
    data, reward = raw.pop("data", None), raw.pop("reward", None)
    if data is None and reward is None:
        return raw
    task = dict(raw.get("task") or {})
    options = dict(task.get("options") or {})
    if data is not None:
        if not isinstance(data, str) or task.get("name", "prompts") != "prompts":
            raise RecipeError("key 'data': it is a file of prompts and stands for task prompts: leave out task.name, or data.")
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
    data: Annotated[str, NamesFile()] = Field(description="JSONL of messages, of prompt and response, or of Reflect-RL's texts")
    eval_data: Annotated[str | None, NamesFile()] = Field(None, description="JSONL to evaluate on")
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
    path: Annotated[str | None, NamesFile()] = Field(None, description="what 'file' reads: a folder that `trailmark data` wrote")
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

    data: Annotated[str | list[str], NamesFile()] = Field(description="one file of scored trajectories, or several")
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


Preference = Literal["rejection", "dpo", "ipo", "hinge", "kto"]
PAIRED = ("dpo", "ipo", "hinge")  # objectives of pairs


class PreferenceRecipe(OfflineRecipe):
    objective: Preference = Field("dpo", description="what is learnt")
    beta: float | None = Field(None, gt=0, description="temperature (dpo, ipo, hinge, kto); none: 0.1")
    smooth: float = Field(0.0, ge=0, lt=0.5, description="share of pairs that are taken to be the wrong way round (dpo)")
    per: Literal["answer", "token"] = Field(
        "answer", description="log-ratios are summed over an answer, or their mean is taken over its tokens (dpo, ipo, hinge)"
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
    label: str = Field("label", description="the annotation that holds the class of each step; below 0: this step has none")
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
    """alpha * KL to the reference, added to the policy's loss. It raises the effective temperature: about beta + alpha / (2 beta)."""

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
            raise ValueError("a file of pairs has no rewards: it is for method preference with objective dpo, ipo or hinge")
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
    right: float | None = Field(None, description="what a right answer earns in the place of its last step; none: nothing")
    wrong: float = Field(0.0, description="what a wrong answer earns there")
    at_end: bool = Field(False, description="the last step is paid at the token that ends the turn")
    clip: float | None = Field(5.0, gt=0, description="largest reward of a step, up or down; none: no limit")
    split: Split = Field("newline", description="how answers are cut into steps")
    skip: list[str] = Field([], description="types of steps that earn nothing, such as Action")

    @model_validator(mode="after")
    def _some(self) -> StepRewards:
        if self.model is None and self.right is None:
            raise ValueError("nothing is paid: set rewards.model (a reward model), rewards.right (the outcome), or both")
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
    kl: float = Field(0.1, ge=0, description="price of leaving the start: in the reward (ppo, remax), or in the loss (grpo)")
    gamma: float = Field(1.0, ge=0, le=1, description="discount over tokens (ppo, remax)")
    lam: float = Field(0.95, ge=0, le=1, description="of generalised advantages (ppo)")
    clip: float = Field(0.2, gt=0, lt=1, description="how far a ratio may leave 1 (ppo, grpo)")
    value_clip: float | None = Field(0.2, gt=0, description="how far a value may move in one step (ppo); none: no limit")
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
    data: Annotated[str | list[str], NamesFile()] = Field("", description="not used: each round collects its own")
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
    """Who writes the first solutions. The seat `teacher` is sampled, and its right solutions are imitated."""

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
    drop_losers: bool = Field(False, description="a right answer that loses against another is not set against wrong ones")
    reject_surplus: bool = Field(False, description="right answers that were not chosen are rejected like wrong ones")
    hard_only: bool = Field(False, description="right answers are compared only where some answer is wrong")
    accept: LprAccept | None = Field(None, description="accept right answers by chance, in place of the margin")
    min_right_steps: NonNegativeInt = Field(0, description="shorter right answers take no part")
    min_wrong_steps: NonNegativeInt = Field(0, description="shorter wrong answers take no part")
    exclude: str | None = Field(None, description="JSON list of the questions of which no two right answers are compared")
    states: LprStatePairs | None = Field(None, description="also pairs of states")
    steps: LprStepPairs | None = Field(None, description="pairs of steps behind one state, in the place of all others")
    aliased: bool = Field(
        False, description="all pairs of a question become its last one, as in the reference implementation"
    )
    seed: Seed = Field(0, description="of what is accepted by chance")


class LprRecipe(RunConfig):
    """The whole road: solutions, states, completions, values, reward model, scores, pairs, preference, reinforcement."""

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
