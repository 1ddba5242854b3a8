"""The value model of a method that has one beside its policy (`oreo`, `step_rl`): loaded, or imported from OpenRLHF."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trailmark.config import ModelConfig, OptimConfig
from trailmark.methods.base import ModelInMemory
from trailmark.methods.configs import CriticConfig
from trailmark.models.lm import LM
from trailmark.models.load import load_model
from trailmark.models.openrlhf_critic import foreign_head, import_critic
from trailmark.score.classes import must_share_tokenizer
from trailmark.seats.model_names import stored_model


def critic_in_memory(model: ModelConfig, critic: CriticConfig, optim: OptimConfig) -> ModelInMemory:
    """The value model as `load_critic` loads it. `optim` is that of the policy."""
    own = model.model_copy(update={"name": critic.name or model.name, "lora": critic.lora})
    return ModelInMemory("critic", own, critic.optim or optim, output=False)


def load_critic(model: ModelConfig, critic: CriticConfig, scratch: Path) -> LM:
    """Load a value model: a copy of the initial policy with a head of zeros, or a model from a folder (with its head,
    if it has one)."""
    name = critic.name or model.name
    if critic.name and (found := foreign_head(Path(critic.name))):
        name = str(import_critic(Path(critic.name), scratch, found))
    lm = load_model(model.model_copy(update={"name": name, "lora": critic.lora}))
    if "value" not in lm.heads:
        lm.add_head("value")
    return lm


def load_frozen(model: ModelConfig, place: str | Path, tokenizer: Any, name: str | None = None) -> LM:
    """A model with a head that only reads, from a folder. It must have the policy's tokenizer."""
    lm = load_model(stored_model(model, place).model_copy(update={"lora": None})).freeze()
    must_share_tokenizer(lm, tokenizer, name or str(place))
    return lm
