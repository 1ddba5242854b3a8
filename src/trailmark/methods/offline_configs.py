"""The recipes of methods that learn from files: `preference`, `reward_model`, and what `oreo` shares with them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from trailmark import formats
from trailmark.config import CheckpointConfig, Config, EngineConfig, NamesFile, NamesModel, RunConfig, SamplingConfig
from trailmark.methods.configs import TaskConfig
from trailmark.score.classes import Over
from trailmark.steps import Split


class OfflineFinal(Config):
    """Evaluations at the end. Each writes a file evaluation/NAME.jsonl in the run."""

    start: bool = Field(False, description="also evaluate the policy as it was before training: evaluation/start.jsonl")
    choose: PositiveInt | None = Field(
        None,
        description="also draw so many answers of each start from the policy before training: all of them "
        "(evaluation/single.jsonl), one with the commonest answer (vote.jsonl), the best by `value` (best.jsonl), and "
        "a right one if there is any (any.jsonl)",
    )
    value: Annotated[str | None, NamesModel("value")] = Field(None, description="the reward model that chooses")

    @model_validator(mode="after")
    def _chooses(self) -> OfflineFinal:
        if (self.choose is None) != (self.value is None):
            raise ValueError("choose and value belong together: how many answers, and the reward model that chooses")
        return self


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
        if v not in formats.known():
            raise ValueError(f"format '{v}' is not known. Known: {', '.join(formats.known())}.")
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
        "answer",
        description="log-ratios: their sum over an answer (for ipo, too, as its paper defines it), or their mean over "
        "its tokens (dpo, ipo, hinge), which some programs take for ipo",
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
        if (self.final.start or self.final.choose) and self.task is None:
            raise ValueError("final needs a task to play")
        return self


# --- reward_model -------------------------------------------------------------------------------------------------


class ReadConfig(Config):
    """How the numbers of a reward model are read off its head, by whoever scores or searches with it."""

    classes: list[NonNegativeInt] | None = Field(
        None, description="the classes whose probabilities are summed; none: the last one"
    )
    over: Over = Field("last", description="one number over all steps: last, min, mean, product, geomean or sum")
    skip: list[str] = Field([], description="types of steps that take no part, such as Action (with split react)")
    offset: NonNegativeInt = Field(0, description="so many last steps take no part")
    raw: bool = Field(False, description="the head's number for the last class, in place of a probability")


class ReadWhole(ReadConfig):
    """The same, of whole answers that a search or a server has to cut into steps itself."""

    split: Split = Field("newline", description="how an answer is cut into steps")


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
    epochs: PositiveInt | None = Field(None, description="passes over the data; replaces steps")
    begin: Annotated[str | None, NamesModel("value")] = Field(
        None, description="a reward model to go on from: a run, a checkpoint or a folder; none: model with a new head"
    )
    read: ReadWhole = Field(ReadWhole(), description="how its numbers are read when it scores or serves")
    checkpoint: CheckpointConfig = Field(CheckpointConfig(metric="eval/accuracy"), description="what is kept")

    @model_validator(mode="after")
    def _fits(self) -> RewardModelRecipe:
        if self.format not in formats.known():
            raise ValueError(f"format '{self.format}' is not known. Known: {', '.join(formats.known())}.")
        if self.kind != "pairwise" and (self.format == "pairs" or self.pair_file):
            raise ValueError("pairs are for kind pairwise")
        outputs = {"classes": self.outputs, "outcome": 2}.get(self.kind, 1)
        if wrong := [c for c in self.read.classes or () if c >= outputs]:
            raise ValueError(f"read.classes: there is no class {wrong[0]}: kind {self.kind} has {outputs} output(s)")
        return self

    @property
    def files(self) -> list[str]:
        return [self.data] if isinstance(self.data, str) else self.data
