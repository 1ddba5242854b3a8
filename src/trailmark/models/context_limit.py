"""How long a sequence may be, so that what is computed here is what transformers computes for it alone.

The limit is the model's context. There are two reasons for a shorter one:

1. The rotary frequencies of `longrope` (Phi-3 with 128k) change for all positions if the longest sequence of a batch is
   longer than the original context. Then a row would depend on its neighbours, and stored keys would be wrong.
2. A layer's mask has a window, or chunks, that its attention function is not told about. Up to the size of that window
   there is no difference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trailmark.models.attention import Watched, watched

if TYPE_CHECKING:
    from trailmark.models.lm import LM

UNLIMITED = 1 << 30


def text_config(config: Any) -> Any:
    """The config of the language model, also in a model that reads images too."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def context_of(config: Any) -> int:
    """The context of a transformers config, up to which its rotary frequencies are constant."""
    config = text_config(config)
    context = int(getattr(config, "max_position_embeddings", 0) or UNLIMITED)
    return min(context, *(r["original_max_position_embeddings"] for r in _ropes(config) if _changes(r)), UNLIMITED)


def _ropes(config: Any) -> list[dict[str, Any]]:
    """The rotary parameters of a model: one table, or one for each kind of layer."""
    found = getattr(config, "rope_parameters", None) or {}
    return [found] if "rope_type" in found else [r for r in found.values() if isinstance(r, dict)]


def _changes(rope: dict[str, Any]) -> bool:
    return rope.get("rope_type") == "longrope"  # `dynamic` changes too, but only after the model's context


def rope_note(lm: LM) -> tuple[str, ...]:
    """What to tell a user whose model has a shorter context here than in its config."""
    whole = int(getattr(text_config(lm.base.config), "max_position_embeddings", 0) or UNLIMITED)
    if (here := context_of(lm.base.config)) == whole:
        return ()
    return (
        f"model '{lm.name}': its rotary positions (longrope) change for sequences over {here} tokens, and a batch may "
        f"hold shorter ones too: its context here is {here} tokens, not {whole}",
    )


def find_limit(lm: LM) -> tuple[int, tuple[str, ...]]:
    """The longest sequence whose windows are computed as the model's own masks say, and a note if that is a limit."""
    ids = torch.zeros(1, 1, dtype=torch.int64, device=lm.device)
    with torch.no_grad(), watched() as seen:
        lm.base.base_model(input_ids=ids, use_cache=False)
    if (limit := smallest(seen)) >= context_of(lm.base.config):
        return UNLIMITED, ()
    return limit, (
        f"model '{lm.name}': a window of {limit} tokens is in its masks only, which Trailmark does not read: its "
        f"context here is {limit} tokens",
    )


def smallest(seen: Watched) -> int:
    """The smallest window that a mask or an attention function has and the other has not."""
    return min((w for pair in seen.pairs if pair[0] != pair[1] for w in pair if w), default=UNLIMITED)
