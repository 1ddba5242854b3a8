"""The keys of OREO's recipes. They import without torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from trailmark.config import Config, NamesFile, SamplingConfig
from trailmark.errors import TrailmarkError
from trailmark.methods.configs import CriticConfig, TaskConfig
from trailmark.methods.offline_configs import OfflineFinal, OfflineRecipe
from trailmark.methods.oreo.soft_bellman import Level
from trailmark.rollout.search import parse_plan
from trailmark.steps import Split


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
    critic: CriticConfig = Field(CriticConfig(), description="the value's model")
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
        if (self.final.search or self.final.start or self.final.choose) and self.task is None:
            raise ValueError("final needs a task to play")
        return self


class CollectConfig(Config):
    prompts: PositiveInt = Field(64, description="starts of one round")
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
