"""The keys of VR-CLI's recipe and of its reward. They import without torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, PositiveInt, StringConstraints, model_validator

from trailmark.config import Config, ModelConfig, Seed, ServerConfig
from trailmark.methods.online_configs import PolicyGradientRecipe
from trailmark.score.config import JudgeConfig

# Recipes hold lists, not tuples. After the validator of `Reward`, pydantic no longer knows that a list came from JSON.
Pair = Annotated[tuple[float, float], BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)]


class LikelihoodJudgeConfig(JudgeConfig):
    """How much an answer lowers the perplexity of a gold text (VR-CLI)."""

    opens: ClassVar[str] = "trailmark.methods.vrcli.judge:LikelihoodJudge"
    reads: ClassVar[bool] = True

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

    def held(self) -> list[ModelConfig]:
        return [] if self.server else [self.model or ModelConfig()]

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


FileName = Annotated[str, StringConstraints(pattern=r"^\w[\w .-]*$")]


class VrcliFinal(Config):
    """Which plans are compared at the end, by how much each lowers the perplexity of the gold texts. Each writes a file
    evaluation/NAME.jsonl in the run; its rewards are improvements, 0.25 for 25 percent."""

    split: str = Field("val", description="split of the task")
    n: PositiveInt | None = Field(None, description="number of rows; none: all")
    plans: dict[FileName, str] = Field(
        {}, description='further plans by name: templates with keys of the row, such as {best: "{synopsis}"}'
    )
    readers: dict[FileName, str] = Field(
        {}, description="runs or models by name that read the gold texts without a plan, such as a fine-tuned one"
    )


class VrcliRecipe(PolicyGradientRecipe):
    final: VrcliFinal = Field(VrcliFinal(), description="the comparison at the end")


