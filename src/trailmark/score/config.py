"""The `reward` section of a recipe. It imports without torch, so a mistake is reported at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, model_validator

from trailmark.config import ModelConfig, Seed, ServerConfig
from trailmark.recipe import Config, resolve

# Recipes hold lists, not tuples. After the validator of `Reward`, pydantic no longer knows that a list came from JSON.
Pair = Annotated[tuple[float, float], BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)]


class _JudgeConfig(Config):
    success: float | None = Field(
        None, description="smallest reward that counts as a success; none: no success is reported"
    )


class FunctionJudgeConfig(_JudgeConfig):
    """A user's Python function."""

    kind: Literal["function"] = Field("function", description="a Python function")
    path: str = Field(min_length=1, description="my_file.py:score, or package.module:score")
    model: ModelConfig | None = Field(
        None, description="the model behind `scorer`; none: the model that training starts from"
    )
    server: ServerConfig | None = Field(
        None, description="a server that has the model behind `scorer`; then `model` gives its tokenizer"
    )
    at_once: PositiveInt = Field(32, description="calls at the same time, if the function is async")


class ModelJudgeConfig(_JudgeConfig):
    """A language model that gives marks."""

    kind: Literal["model"] = Field("model", description="a language model")
    server: ServerConfig | None = Field(None, description="a server that speaks OpenAI's protocol")
    model: ModelConfig | None = Field(None, description="a model to load in this process, in place of a server")
    rubric: str = Field(
        "Is the answer correct and helpful?",
        description="instructions for the judge; {prompt}, {answer}, {dialogue} and {KEY} of the row are filled in",
    )
    low: float = Field(0.0, description="the worst mark; it becomes reward 0")
    high: float = Field(10.0, description="the best mark; it becomes reward 1")
    temperature: float = Field(0.0, ge=0, description="sampling temperature of the judge")
    max_tokens: PositiveInt = Field(256, description="most tokens of the judge's answer")
    again: NonNegativeInt = Field(2, description="how often the judge is asked again if its answer cannot be read")
    at_once: PositiveInt = Field(32, description="questions at the same time")
    cache: str | None = Field(None, description="a file of answers to share between runs; none: in the run's folder")

    @model_validator(mode="after")
    def _one(self) -> ModelJudgeConfig:
        if (self.server is None) == (self.model is None):
            raise ValueError("a judge of kind model needs either server or model: who is asked?")
        if self.low >= self.high:
            raise ValueError(f"low {self.low:g} must be less than high {self.high:g}")
        return self


class LikelihoodJudgeConfig(_JudgeConfig):
    """How much an answer lowers the perplexity of a gold text (VR-CLI)."""

    kind: Literal["likelihood"] = Field("likelihood", description="the likelihood of a gold text")
    model: ModelConfig | None = Field(
        None, description="the model that scores it; none: the model that training starts from"
    )
    server: ServerConfig | None = Field(
        None, description="a server that scores it (`trailmark serve`, vLLM); then `model` gives its tokenizer"
    )
    gold: str = Field("gold", description="the row's key that holds the gold text")
    context: str = Field(
        "{prompt}", description="template of the context without the answer; {KEY} of the row may be used"
    )
    plan: str = Field("{prompt}{answer}", description="template of the context with the answer")
    empty: str | None = Field(None, description="template used in place of `plan` if nothing is left of the answer")
    markers: list[str] = Field([], description="markers; only the part of the answer after the last of each is used")
    no_marker: Literal["whole", "invalid"] = Field(
        "whole",
        description="an answer without any marker: all of it is used, or it is invalid and earns the smallest reward",
    )
    tokens: Literal["text", "turn", "template"] = Field(
        "turn",
        description="text: score the gold text; turn: also its end token; template: all that the template writes",
    )
    chat: bool = Field(
        False,
        description="format the context as a user's message and the gold text as the assistant's answer; "
        "rows of messages always are",
    )
    reward: Literal["stepped", "clipped", "binary", "linear", "nll", "contrastive"] = Field(
        "stepped", description="how an improvement in percent becomes a reward"
    )
    steps: list[Pair] = Field(
        [(0.05, 0.5), (1.0, 0.9), (2.0, 1.0)], description="stepped: pairs of a smallest improvement and its reward"
    )
    weight: float = Field(
        0.5, ge=0, description="contrastive: the part of the improvement of another story that is subtracted"
    )
    seed: Seed = Field(0, description="contrastive: which other story that is")
    cache: str | None = Field(
        None, description="a file of likelihoods to share between runs; none: in the run's folder"
    )
    baselines: str | None = Field(
        None,
        description="a file of baselines by row id, of one model and one set of rows; another model, template or row "
        "is refused",
    )

    @model_validator(mode="after")
    def _fits(self) -> LikelihoodJudgeConfig:
        if not all(m.strip() for m in self.markers):
            raise ValueError("a marker is a text that an answer may hold: markers has an empty one")
        if self.reward == "stepped" and not self.steps:
            raise ValueError("steps is empty, so every answer would earn 0: name pairs such as [[0.05, 0.5], [1, 0.9]]")
        if self.no_marker == "invalid" and not self.markers:
            raise ValueError("no_marker: invalid needs markers: which ones must an answer have?")
        if any(a[0] >= b[0] for a, b in zip(self.steps, self.steps[1:])):
            bounds = ", ".join(f"{least:g}" for least, _ in self.steps)
            raise ValueError(f"the bounds of steps must rise, and they are {bounds}")
        return self


JudgeConfig = FunctionJudgeConfig | ModelJudgeConfig | LikelihoodJudgeConfig
Reward = Annotated[  # a plain text is the path of a function
    JudgeConfig,
    Field(discriminator="kind"),
    BeforeValidator(lambda v: {"kind": "function", "path": v} if isinstance(v, str) else v),
]


class _Holder(Config):
    reward: Reward


def judge_config(reward: JudgeConfig | str | Mapping[str, Any]) -> JudgeConfig:
    """The settings of a judge from the `reward` of a recipe."""
    return reward if isinstance(reward, JudgeConfig) else resolve({"reward": reward}, _Holder).reward
