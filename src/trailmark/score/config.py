"""The `reward` section of a recipe. It imports without torch, so a mistake is reported at once."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, create_model, model_validator

from trailmark import registry
from trailmark.config import ModelConfig, ServerConfig
from trailmark.errors import RecipeError
from trailmark.recipe import Config, resolve
from trailmark.seats.names import fix_part


class JudgeConfig(Config):
    """What every kind of reward has. `opens` is who makes the judge of these settings: "module:function or class"."""

    opens: ClassVar[str] = ""
    reads: ClassVar[bool] = False  # whether `model`, where it is not given, is the model that training starts from
    success: float | None = Field(
        None, description="smallest reward that counts as a success; none: no success is reported"
    )

    def held(self) -> ModelConfig | None:
        """The model that the judge holds in this process, for a plan of the memory."""
        return None


class FunctionJudgeConfig(JudgeConfig):
    """A user's Python function."""

    opens: ClassVar[str] = "trailmark.score.function:open_function"
    reads: ClassVar[bool] = True

    kind: Literal["function"] = Field("function", description="a Python function")
    path: str = Field(min_length=1, description="my_file.py:score, or package.module:score")
    model: ModelConfig | None = Field(
        None, description="the model behind `scorer`; none: the model that training starts from"
    )
    server: ServerConfig | None = Field(
        None, description="a server that has the model behind `scorer`; then `model` gives its tokenizer"
    )
    at_once: PositiveInt = Field(32, description="calls at the same time, if the function is async")


class ModelJudgeConfig(JudgeConfig):
    """A language model that gives marks."""

    opens: ClassVar[str] = "trailmark.score.judge:ModelJudge"

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
    constrained: bool = Field(False, description="the judge can write only JSON of the right form, by a JSON schema")
    price: tuple[float, float] | None = Field(
        None, description="dollars for a million tokens of questions, and of answers; none: unknown"
    )
    cache: str | None = Field(None, description="a file of answers to share between runs; none: in the run's folder")

    @model_validator(mode="after")
    def _one(self) -> ModelJudgeConfig:
        if (self.server is None) == (self.model is None):
            raise ValueError("a judge of kind model needs either server or model: who is asked?")
        if self.low >= self.high:
            raise ValueError(f"low {self.low:g} must be less than high {self.high:g}")
        return self


@functools.cache
def _holder() -> Any:
    """A section with a key `reward` of any kind that somebody brings. A plain text is the path of a function."""
    kinds = [registry.load("rewards", name) for name in registry.names("rewards")]
    path = BeforeValidator(lambda v: {"kind": "function", "path": v} if isinstance(v, str) else v)
    reward: Any = functools.reduce(operator.or_, kinds)
    reward = Annotated[reward, Field(discriminator="kind"), path]
    return create_model("_Holder", __base__=Config, reward=(reward, ...))


def judge_config(reward: JudgeConfig | str | Mapping[str, Any]) -> Any:
    """The settings of a judge from the `reward` of a recipe."""
    return reward if isinstance(reward, JudgeConfig) else resolve({"reward": reward}, _holder()).reward


def fix_options(options: Mapping[str, Any], run: Path | None) -> dict[str, Any]:
    """The options of a task, with a folder for the model that `reward` names as judge: what it meant in a run."""
    return fix_part(typed(options), "task.options", run)


def typed(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a task, with the settings of a judge as `reward`. One that cannot be read stays as it is: opening
    the task reports the error."""
    if not isinstance(options.get("reward"), Mapping):
        return dict(options)
    try:
        return {**options, "reward": judge_config(options["reward"])}
    except RecipeError:
        return dict(options)
