"""Recipe keys that methods share, and the recipe of `sft`. The other recipes are in `online_configs.py`,
`offline_configs.py` and the papers' folders. All import without torch, so a mistake in a recipe is reported at once."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, field_validator

from trailmark.config import CheckpointConfig, Config, LoraConfig, NamesFile, NamesModel, OptimConfig, RunConfig
from trailmark.score.config import JudgeConfig, typed


class TaskConfig(Config):
    name: str = Field("taxi", description="name of a task, or package.module:Class")
    options: Annotated[dict[str, Any], NamesFile()] = Field({}, description="options of the task")

    @field_validator("options")
    @classmethod
    def _typed(cls, v: dict[str, Any], info: Any) -> dict[str, Any]:
        return v if ":" in info.data.get("name", ":") else typed(v)

    @property
    def reward(self) -> JudgeConfig | None:
        """The judge that the recipe names."""
        found = self.options.get("reward")
        return found if isinstance(found, JudgeConfig) else None


class CriticConfig(Config):
    """The value model. Its head starts at zero unless it is loaded."""

    name: Annotated[str | None, NamesModel("critic")] = Field(
        None, description="a value model: a folder (also OpenRLHF's), a run, a checkpoint; none: the policy's start"
    )
    lora: LoraConfig | None = Field(None, description="train adapters and the head only; none: all weights")
    optim: OptimConfig | None = Field(None, description="optimiser of the value; none: as the policy's")


class SftRecipe(RunConfig):
    data: Annotated[str, NamesFile()] = Field(
        description="file of messages, of ShareGPT conversations, of prompt and response, or of Reflect-RL's texts"
    )
    eval_data: Annotated[str | None, NamesFile()] = Field(None, description="JSONL file to evaluate on")
    batch: PositiveInt = Field(8, description="conversations in one step")
    epochs: PositiveInt | None = Field(None, description="passes over the data; replaces steps")
    checkpoint: CheckpointConfig = Field(CheckpointConfig(metric="eval/nll", mode="min"), description="what is kept")
    chat: bool = Field(
        True, description="use the chat template; false: plain text (Reflect-RL's texts are always plain)"
    )
    trained: Literal["answers", "last", "all"] = Field(
        "answers",
        description="answers: all messages of the assistant; last: its last one, such as a gold text; all: prompts too",
    )
