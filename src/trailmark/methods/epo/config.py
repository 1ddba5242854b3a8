"""The keys of EPO's recipes. They import without torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from trailmark.config import Config, EngineConfig, LearnerConfig, NamesFile, RunConfig, SamplingConfig
from trailmark.credit.marks import Normaliser
from trailmark.methods.configs import TaskConfig
from trailmark.score.config import ModelJudgeConfig
from trailmark.seats.config import SeatConfig, seats_section

STRATEGIST = (
    "You are an expert in negotiation and other talks between people. You help {name} to reach a goal in a talk "
    "with {other}. Think about what was said, and give one strategy for {name}'s next turn. Vary your strategies, and "
    "advise nothing aggressive or unlawful.\n\n{scene}\n\n"
    "Answer in the form\nStrategy: content\nwith one short phrase of at most ten words, and nothing else: no reasons, "
    "and no lines for {name} or {other}."
)
AGENT = "{scene}\n\n{rules}\n"
THOUGHT = (
    "You guide Agent1, who acts in an environment. You see the task, and then what Agent1 does and what happens. "
    "Before each action write one thought for Agent1, in one or two sentences: think of the goal, of what is left to "
    "do, of the state, and of what the last action did. Answer in the form\nThought: content\nand write no action."
)


class PromptsConfig(Config):
    """What the strategist and the agent are told. {name}, {other}, {scene} and {rules} are filled in."""

    strategist: str = Field("", description="instructions of the strategist; none: EPO's, for talks or for worlds")
    agent: str = Field(AGENT, description="instructions of an agent in a talk; the talk so far follows")
    advice: str = Field(
        "Advice for your next turn (use it if it helps, else your own judgement): {strategy}",
        description="how the strategy is told to the agent; {strategy} is filled in",
    )


class EpoRecipe(RunConfig):
    """Train a strategist on trajectories whose turns have weights."""

    data: Annotated[str | list[str], NamesFile()] = Field(
        "", description="files of trajectories whose turns have a score"
    )
    format: Literal["sharegpt", "episodes"] = Field("sharegpt", description="what these files are")
    dataset: str | None = Field(None, description="in place of data: data sets of dataset_info.json, as NAME,NAME")
    dataset_dir: Annotated[str, NamesFile()] = Field("data", description="the folder of dataset_info.json")
    max_samples: PositiveInt | None = Field(None, description="at most so many first rows of each data set; none: all")
    learn: list[str] = Field(
        ["strategist"], min_length=1, description="the seats whose turns are trained (format: episodes)"
    )
    objective: Literal["epo", "unbiased", "ppo"] = Field(
        "epo",
        description="epo: weighted log-probs, mean over tokens, turns, plays; unbiased: their sum by a constant; "
        "ppo: one clipped ratio for each turn",
    )
    clip: float = Field(0.2, gt=0, lt=1, description="how far the ratio of a turn may leave 1 (ppo)")
    batch: PositiveInt = Field(8, description="trajectories in one step")
    epochs: PositiveInt | None = Field(None, description="passes over the data; replaces steps")
    max_len: PositiveInt | None = Field(
        None, description="longer trajectories are cut to it; none: the model's context"
    )
    skip_zero: bool = Field(
        False, description="leave out trajectories whose weights are all 0; else they count in the mean"
    )
    task: TaskConfig | None = Field(None, description="a world to evaluate in")
    strategy: Literal["dialogue", "thought", "none"] = Field(
        "dialogue",
        description="dialogue: the agent is told the strategies; thought: its answer begins with it; none: the "
        "agent alone",
    )
    prompts: PromptsConfig = Field(PromptsConfig(), description="what the players are told")
    seats: dict[str, SeatConfig] = seats_section(
        "strategist, which is trained, and agent; in a world of two seats also partner and partner_strategist"
    )
    sampling: SamplingConfig = Field(
        SamplingConfig(temperature=0.7, max_tokens=32), description="how tokens are drawn, where a seat does not say"
    )
    engine: EngineConfig = Field(EngineConfig(), description="who writes the tokens")

    @property
    def files(self) -> list[str]:
        return [f for f in ([self.data] if isinstance(self.data, str) else self.data) if f]

    @model_validator(mode="after")
    def _data(self) -> EpoRecipe:
        if self.dataset is not None and self.files:
            raise ValueError("data and dataset are both given: name the files, or the data sets")
        if self.dataset is not None and self.format != "sharegpt":
            raise ValueError("dataset names files of format sharegpt: leave out format")
        if self.eval.every and self.task is None:
            raise ValueError("eval.every needs a task to play")
        if self.objective == "ppo" and self.format != "episodes":
            raise ValueError("objective ppo needs the log-probs of played turns: format episodes")
        return self


class CollectConfig(Config):
    prompts: PositiveInt = Field(32, description="starts of one round")
    n: PositiveInt = Field(4, description="plays of each start; they form one group")
    split: str = Field("train", description="of the task")


class TeachConfig(Config):
    """Imitation before round 1: a function plays the strategist, and the model learns to write as it does."""

    function: Annotated[str, NamesFile(function=True)] = Field(
        min_length=3, description="package.module:function or file.py:function, as of a scripted seat"
    )
    prompts: PositiveInt = Field(64, description="starts that it plays")
    steps: PositiveInt = Field(100, description="optimiser steps of imitation")
    batch: PositiveInt = Field(8, description="plays in one step")
    learner: LearnerConfig = Field(LearnerConfig(), description="how its strategies are learnt")


class MarkConfig(Config):
    """Who names the turns that decided a play."""

    kind: Literal["none", "rule", "model"] = Field(
        "none", description="none: nobody, the outcome counts alone; rule: the world; model: a language model"
    )
    model: ModelJudgeConfig | None = Field(None, description="the language model, and how it is asked")

    @model_validator(mode="after")
    def _model(self) -> MarkConfig:
        if (self.kind == "model") != (self.model is not None):
            raise ValueError("kind model and the section model belong together")
        return self


class ShapeConfig(Config):
    """From marks and outcomes to the weights of turns."""

    gamma: float = Field(0.99, ge=0, le=1, description="discount over the strategist's turns")
    outcome: Literal["override", "add"] = Field(
        "override", description="a marked last turn earns 1 in place of the outcome, or 1 and the outcome"
    )
    normalise: Normaliser = Field(
        "trajectory",
        description="trajectory: by its largest return; dataset: by the largest of all; group, turns: minus others of "
        "the group, at their start or at the same turn; baseline: minus a number",
    )
    baseline: float | None = Field(None, description="that number; none: the mean of the other trajectories")
    first: bool = Field(False, description="the first turn earns 1 (files whose first answer is OK)")
    least: float = Field(0.0, description="the smallest outcome that the world gives; a smaller one is refused")
    most: float = Field(1.0, gt=0, description="the largest one, by which outcomes are divided")

    @model_validator(mode="after")
    def _fits(self) -> ShapeConfig:
        if self.baseline is not None and self.normalise != "baseline":
            raise ValueError("baseline is for normalise: baseline")
        if self.least >= self.most:
            raise ValueError("least must be less than most")
        return self


class EpoRoundsRecipe(EpoRecipe):
    """Collect, judge, shape and train, and again with the new strategist."""

    steps: PositiveInt = Field(3, description="rounds")
    training: PositiveInt = Field(50, description="optimiser steps of a round (epochs, if given, count instead)")
    format: Literal["sharegpt", "episodes"] = Field("episodes", description="format of the collected plays")
    task: TaskConfig = Field(TaskConfig(name="negotiation"), description="the world")
    teach: TeachConfig | None = Field(None, description="imitation before round 1; none: model starts as it is")
    collect: CollectConfig = Field(CollectConfig(), description="how the plays of a round are collected")
    judge: MarkConfig = Field(MarkConfig(), description="who names the turns that decided")
    shape: ShapeConfig = Field(ShapeConfig(), description="how turns get their weights")
    init: Literal["previous", "base"] = Field(
        "previous", description="what a round trains: the strategist so far, or model"
    )
    learn_from: Literal["latest", "all"] = Field(
        "latest", description="the plays of this round, or of all rounds so far"
    )

    @model_validator(mode="after")
    def _rounds(self) -> EpoRoundsRecipe:
        if self.files or self.dataset:
            raise ValueError("data and dataset: rounds collect their own plays; leave both out")
        if self.objective == "unbiased" and (self.shape.normalise not in ("group", "turns") or self.shape.gamma != 1):
            raise ValueError("objective unbiased needs shape.normalise: turns (or group) and shape.gamma: 1")
        if self.shape.normalise in ("group", "turns") and self.collect.n < 2:
            raise ValueError(
                f"shape.normalise {self.shape.normalise} compares the plays of a start: set collect.n to 2 or more"
            )
        return self
