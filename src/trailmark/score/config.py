"""What a recipe may say about who gives the reward. No torch here, so that a mistake is told at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, model_validator

from trailmark.config import ModelConfig, ServerConfig
from trailmark.recipe import Config, resolve

# A recipe has lists, no tuples; behind the validator of `Reward` pydantic does not see that they come from JSON.
Pair = Annotated[tuple[float, float], BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)]


class _JudgeConfig(Config):
    success: float | None = Field(None, description="a reward of at least this is a success; none: rewards only")


class FunctionJudgeConfig(_JudgeConfig):
    """A person's own Python function."""

    kind: Literal["function"] = Field("function", description="a Python function")
    path: str = Field(min_length=1, description="my_file.py:score, or package.module:score")
    model: ModelConfig | None = Field(None, description="the model behind `scorer`; none: the one that training starts from")
    at_once: PositiveInt = Field(32, description="calls in flight at once, where the function is async")


class ModelJudgeConfig(_JudgeConfig):
    """A language model that is asked for a mark."""

    kind: Literal["model"] = Field("model", description="a language model")
    server: ServerConfig | None = Field(None, description="any server that speaks OpenAI's protocol")
    model: ModelConfig | None = Field(None, description="a model that is loaded here, where there is no server")
    rubric: str = Field(
        "Is the answer correct and helpful?",
        description="what a good answer is; {prompt}, {answer}, {dialogue} and {KEY} of the row are filled in",
    )
    low: float = Field(0.0, description="the worst mark; it becomes reward 0")
    high: float = Field(10.0, description="the best mark; it becomes reward 1")
    temperature: float = Field(0.0, ge=0, description="of the judge's words")
    max_tokens: PositiveInt = Field(256, description="most tokens of an answer")
    again: NonNegativeInt = Field(2, description="how often it is asked again when its answer cannot be read")
    at_once: PositiveInt = Field(32, description="questions in flight at once")
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
    model: ModelConfig | None = Field(None, description="who reads it; none: the model that training starts from")
    gold: str = Field("gold", description="the row's key that holds the gold text")
    context: str = Field("{prompt}", description="what stands before the gold text; {KEY} of the row may be used")
    plan: str = Field("{prompt}{answer}", description="the same with what was written")
    markers: list[str] = Field([], description="of the answer only what follows the last of each of these is used")
    tokens: Literal["text", "turn", "template"] = Field(
        "turn", description="what is scored: the text, the token that ends it too, or all that the template writes"
    )
    chat: bool = Field(
        False,
        description="the context is a user's message, and the gold text the assistant's answer; rows of messages are so anyway",
    )
    reward: Literal["stepped", "clipped", "binary", "linear", "nll"] = Field(
        "stepped", description="what an improvement in percent is worth"
    )
    steps: list[Pair] = Field(
        [(0.05, 0.5), (1.0, 0.9), (2.0, 1.0)], description="stepped: from which improvement on, which reward"
    )
    cache: str | None = Field(None, description="a file of likelihoods to share between runs; none: in the run's folder")


JudgeConfig = FunctionJudgeConfig | ModelJudgeConfig | LikelihoodJudgeConfig
Reward = Annotated[  # a text alone is the path of a function
    JudgeConfig,
    Field(discriminator="kind"),
    BeforeValidator(lambda v: {"kind": "function", "path": v} if isinstance(v, str) else v),
]


class _Holder(Config):
    reward: Reward


def judge_config(reward: JudgeConfig | str | Mapping[str, Any]) -> JudgeConfig:
    """A section from what a recipe says."""
    return reward if isinstance(reward, JudgeConfig) else resolve({"reward": reward}, _Holder).reward
