"""The keys of Reflect-RL's recipes. They import without torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from trailmark.config import Config, EngineConfig, NamesFile, NamesModel, OptimConfig, RunConfig
from trailmark.methods.configs import TaskConfig

Head = Literal["listed", "alphabet", "vocabulary"]
Shuffle = Literal["none", "permute", "alphabet"]

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
    prompts_per_step: PositiveInt = Field(32, description="episodes of one step")
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
    prompts: PositiveInt = Field(40, description="starts that the teacher plays; with curriculum modes: of each mode")
    perturb: float = Field(
        0.5, ge=0, le=1, description="share of random moves, so that lessons also show how to recover"
    )
    label: Literal["oracle", "behaviour"] = Field("oracle", description="which action is imitated")


class ImitationConfig(Config):
    reflector: NonNegativeInt = Field(200, description="training steps on reflections; 0: skip this stage")
    policy: NonNegativeInt = Field(100, description="training steps on actions; 0: skip this stage")
    epochs: PositiveInt | None = Field(
        None, description="passes over the lessons; replaces the steps of each stage that is not skipped"
    )
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
    epochs: PositiveInt | None = Field(None, description="passes over the starts of the task, in play; replaces steps")
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
    epochs: PositiveInt | None = Field(None, description="passes over the lessons; replaces steps")
