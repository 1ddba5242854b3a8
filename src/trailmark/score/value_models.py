"""A value model by its name, for searches and for measures of reward models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trailmark.config import ModelConfig
from trailmark.errors import ModelError
from trailmark.models.load import load_model
from trailmark.models.openrlhf_critic import foreign_head, in_our_layout
from trailmark.runs.checkpoints import is_run
from trailmark.score.classes import must_share_tokenizer
from trailmark.score.values import HeadValues, read_as
from trailmark.seats.model_names import locate, newest_checkpoint

VALUES = ("critic", "value", "policy")  # the folders of a checkpoint that may hold a value model, in order of search


def locate_value(name: str | Path, key: str = "--value") -> Path:
    """The folder of a value model. `name` is that folder (also in OpenRLHF's layout), or a run or checkpoint whose
    critic is meant (or its policy, if that has the head)."""
    folder = Path(name)
    if not folder.is_dir():
        raise ModelError(f"{key} {name}: there is no such run or folder.")
    if is_run(folder):
        folder = newest_checkpoint(folder, key)
    for part in (folder, *(folder / seat for seat in VALUES)):
        if (part / "heads.safetensors").is_file() or foreign_head(part):
            return part
    raise ModelError(
        f"{key}: {folder} holds no value model: no heads.safetensors there or in {', '.join(VALUES)}, and "
        "no value_head or score among its weights."
    )


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
