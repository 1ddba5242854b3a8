"""The `reward` section of a recipe. It imports without torch, so a mistake is reported at once."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, create_model, model_validator

from trailmark import registry
from trailmark.config import ModelConfig, ServerConfig
from trailmark.errors import RecipeError
from trailmark.recipe import Config, resolve
from trailmark.seats.pinned_models import pin_part

LIMIT = "most seconds for one {}; a play that takes longer has failed, which is no reward of 0; none: any time"


class JudgeConfig(Config):
    """What every kind of reward has. `opens` is who makes the judge of these settings: "module:function or class"."""

    opens: ClassVar[str] = ""
    reads: ClassVar[bool] = False  # whether `model`, where it is not given, is the model that training starts from
    success: float | None = Field(
        None, description="smallest reward that counts as a success; none: no success is reported"
    )

    def held(self) -> list[ModelConfig]:
        """The models that the judge holds in this process, for a plan of the memory."""
        return []

    def with_model(self, model: ModelConfig) -> JudgeConfig:
        """The settings with the model that training starts from, if they need a model and name none."""
        return self.model_copy(update={"model": model}) if self.reads and getattr(self, "model", None) is None else self


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
    time_limit: PositiveFloat | None = Field(None, description=LIMIT.format("call of the function"))


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
    time_limit: PositiveFloat | None = Field(None, description=LIMIT.format("mark, with all that is asked for it"))

    @model_validator(mode="after")
    def _one(self) -> ModelJudgeConfig:
        if (self.server is None) == (self.model is None):
            raise ValueError("a judge of kind model needs either server or model: who is asked?")
        if self.low >= self.high:
            raise ValueError(f"low {self.low:g} must be less than high {self.high:g}")
        return self


class NamedReward(Config):
    """One of several rewards."""

    weight: float = Field(1.0, description="what it counts in the sum; 0: a metric, which is logged and never paid")
    reward: Any = Field(description="a reward of any kind but several")


class SeveralConfig(JudgeConfig):
    """Several rewards with names; their weighted sum is the reward of a play."""

    opens: ClassVar[str] = "trailmark.score.several:open_several"

    kind: Literal["several"] = Field("several", description="several rewards with names")
    of: dict[str, NamedReward] = Field(description="the rewards by their names")

    def held(self) -> list[ModelConfig]:
        return [model for named in self.of.values() for model in named.reward.held()]

    def with_model(self, model: ModelConfig) -> JudgeConfig:
        filled = lambda named: named.model_copy(update={"reward": named.reward.with_model(model)})
        return self.model_copy(update={"of": {name: filled(named) for name, named in self.of.items()}})

    @model_validator(mode="after")
    def _named(self) -> SeveralConfig:
        if not self.of:
            raise ValueError("of names no reward")
        if odd := next((name for name in self.of if not re.fullmatch(r"\w[\w-]*", name)), None):
            raise ValueError(f"'{odd}' is no name of a reward: use letters, digits, _ and -")
        return self


@functools.cache
def _holder() -> Any:
    """A section with a key `reward` of any kind that somebody brings, or of several."""
    kinds: Any = functools.reduce(operator.or_, [registry.load("rewards", n) for n in registry.names("rewards")])
    one = Annotated[kinds, Field(discriminator="kind")]
    named: Any = create_model("NamedReward", __base__=NamedReward, reward=(one, ...))
    several: Any = create_model("SeveralConfig", __base__=SeveralConfig, of=(dict[str, named], ...))
    reward = Annotated[kinds | several, Field(discriminator="kind")]
    return create_model("_Holder", __base__=Config, reward=(reward, ...))


def _spelled_out(v: Any) -> Any:
    """A text is the path of a function, and so is a mapping with a path. A mapping of nothing but rewards has names."""
    if isinstance(v, str):
        return {"kind": "function", "path": v}
    if not isinstance(v, Mapping):
        return v
    if "kind" not in v and isinstance(v.get("path"), str):
        return {"kind": "function", **v}
    named = v.get("of") if v.get("kind") == "several" else v if "kind" not in v and _are_rewards(v) else None
    if not isinstance(named, Mapping):
        return v
    more = v if "kind" in v else {"kind": "several"}
    return {**more, "of": {name: _with_weight(one) for name, one in named.items()}}


def _are_rewards(v: Mapping[str, Any]) -> bool:
    marks = {"kind", "path", "reward", "weight"}
    named = lambda x: re.fullmatch(r"\S+:\S+", x) if isinstance(x, str) else isinstance(x, Mapping) and marks & x.keys()
    return bool(v) and all(map(named, v.values()))


def _with_weight(v: Any) -> Any:
    """One of several rewards. A reward alone has weight 1."""
    if isinstance(v, str) or (isinstance(v, Mapping) and {"kind", "path"} & v.keys()):
        v = {"reward": v}
    return {**v, "reward": _spelled_out(v["reward"])} if isinstance(v, Mapping) and "reward" in v else v


def judge_config(reward: JudgeConfig | str | Mapping[str, Any]) -> Any:
    """The settings of a judge from the `reward` of a recipe."""
    if isinstance(reward, JudgeConfig):
        return reward
    if isinstance(reward, list):
        raise RecipeError("recipe: key 'reward': several rewards have names, such as {right: my_file.py:right}.")
    try:
        return resolve({"reward": _spelled_out(reward)}, _holder()).reward
    except RecipeError as e:  # it names the keys as they were written
        short = isinstance(reward, Mapping) and "kind" not in reward
        raise RecipeError(str(e).replace("'reward.of.", "'reward.") if short else str(e)) from None


def pin_options(options: Mapping[str, Any], run: Path | None) -> dict[str, Any]:
    """The options of a task, with a folder for the model that `reward` names as judge: what it meant in a run."""
    return pin_part(typed(options), "task.options", run)


def typed(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a task, with the settings of a judge as `reward`. One that cannot be read stays as it is: opening
    the task reports the error."""
    if not isinstance(options.get("reward"), Mapping):
        return dict(options)
    try:
        return {**options, "reward": judge_config(options["reward"])}
    except RecipeError:
        return dict(options)
