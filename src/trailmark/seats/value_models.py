"""A value model by its name, for searches and for measures of reward models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trailmark.config import ModelConfig
from trailmark.models.load import load_model
from trailmark.models.openrlhf_critic import in_our_layout
from trailmark.score.classes import must_share_tokenizer
from trailmark.score.values import HeadValues, read_as
from trailmark.seats.locate import locate, locate_value


def load_values(name: str | Path, tokenizer: Any = None, device: str = "auto", dtype: str = "float32") -> HeadValues:
    """The value model of a run or folder (also OpenRLHF's), frozen. `tokenizer` is the policy's; the value model must
    have the same. A reward model is read as the recipe of its run says (`read`)."""
    folder = locate_value(name)
    with in_our_layout(folder) as ours:
        lm = load_model(ModelConfig.model_validate({"name": str(ours), "device": device, "dtype": dtype})).freeze()
    lm.name = str(folder)
    if tokenizer is not None:
        must_share_tokenizer(lm, tokenizer, str(name))
    return HeadValues(lm, **read_as(locate(str(folder)).section("read")))
