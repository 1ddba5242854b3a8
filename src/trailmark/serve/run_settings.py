"""What a served model takes from its run's recipe (dtype, quantisation), and how long its sequences may be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trailmark.config import ModelConfig
from trailmark.errors import ModelError
from trailmark.memory import free_memory

if TYPE_CHECKING:
    from trailmark.models.lm import LM
    from trailmark.seats.model_names import Located

SHARE = 0.5  # share of the free memory for keys and values, if no length is given
UNKNOWN = 8e9  # bytes that count as free on a machine that does not say


def served_model(
    found: Located, device: str, dtype: str | None, revision: str | None, tokenizer: str | None
) -> ModelConfig:
    """The `model:` section to load: in the dtype of the run, and quantised as in the run if the device can. An error in
    it names an option of the command line."""
    from pydantic import ValidationError

    from trailmark.models.load import is_adapter, pick_device

    if found.kind == "server":
        raise ModelError(f"{found.name} is served already: serve takes a run, a folder or a name on the hub.")
    fields = {"name": found.folder, "revision": revision, "tokenizer": tokenizer, "device": device}
    fields["dtype"] = dtype or found.dtype
    try:
        config = ModelConfig.model_validate(fields)
    except ValidationError as problem:
        first = problem.errors()[0]
        raise ModelError(f"--{first['loc'][0]}: {first['msg'].removeprefix('Value error, ')}.") from None
    quant = found.section("model").get("quant", "none")
    if quant != "none" and is_adapter(found.folder) and pick_device(device).startswith("cuda"):
        return config.model_copy(update={"quant": quant})
    return config


def longest(lm: LM, slots: int) -> int:
    """The model's context, or the part of it that `slots` sequences can have in half of the free memory."""
    from trailmark.models.layout_check import decodes

    decodes(lm)  # counts what is kept for a token
    a_token = lm.kept * lm.dtype.itemsize
    free = free_memory(lm.device)
    fits = int(SHARE * (UNKNOWN if free is None else free) / (a_token * max(1, slots)))
    return max(2, min(lm.context, max(256, fits // 256 * 256)))
