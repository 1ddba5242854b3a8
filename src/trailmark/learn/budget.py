"""The number of tokens in a micro-batch if the recipe does not set it: on a GPU as many as surely fit.

A shared prefix is computed once per micro-batch, so few large micro-batches are faster than many small ones. The
estimate counts what a forward pass keeps for the backward pass, from the model's shape and the free memory. It is
rounded down to a power of two and stored in checkpoints, so that a resumed run splits its batches at the same places.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trailmark.memory import free_memory
from trailmark.models.context_limit import text_config
from trailmark.models.lm import LM

PLAIN = 8192  # on a CPU, where larger micro-batches are not faster
LEAST, MOST = 1024, 1 << 17
SHARE = 0.75  # share of the free memory; the rest is for scratch space of kernels and for gaps between tensors
CHUNK = 2048  # tokens whose logits exist at once


def places(models: Mapping[str, LM], trained: Mapping[str, Any], amp: bool) -> int:
    """The tokens of one micro-batch of a learner that optimises the models in `trained`."""
    each = {id(lm): lm for lm in models.values()}
    kept = {id(models[name]) for name in trained}
    device = next(iter(each.values())).device
    free = free_memory(device) if device.type == "cuda" else None
    if free is None:
        return PLAIN
    for lm in each.values():
        if id(lm) in kept:  # gradients and both moments of AdamW; none of them exists before the first step
            grown = sum(p.numel() * (p.element_size() + 8) for _, p in lm.parameters() if p.grad is None)
            free -= grown
    vocab = max(lm.vocab for lm in each.values())
    free -= CHUNK * vocab * 12
    per_place = sum(bytes_per_token(lm, id(lm) in kept, amp) for lm in each.values())
    return rounded(SHARE * free / per_place)


def rounded(tokens: float) -> int:
    """The power of two at or below `tokens`, within bounds."""
    return min(MOST, max(LEAST, 1 << max(0, int(tokens).bit_length() - 1)))


def bytes_per_token(lm: LM, trained: bool, amp: bool) -> float:
    """The bytes that a forward pass keeps per token. A compiled block keeps about three vectors of its feed-forward
    width and eight of the model's width. An uncompiled one keeps about half as many again."""
    c: Any = text_config(lm.base.config)
    layers, width = getattr(c, "num_hidden_layers", 1), lm.width
    ffn = getattr(c, "intermediate_size", None) or getattr(c, "n_inner", None) or 4 * width
    ffn = max(ffn) if isinstance(ffn, list) else ffn  # some families have one for each layer
    experts = getattr(c, "num_experts_per_tok", None) or 1
    wide = (getattr(c, "moe_intermediate_size", None) or ffn) * experts
    item = 3 if amp and lm.dtype == torch.float32 else lm.dtype.itemsize
    block = (3 * wide + 8 * width) * (1 if lm.device.type == "cuda" and lm.compiled.worth(lm.base) else 1.5) * item
    if not trained:
        return 2 * block
    if getattr(lm.base, "is_gradient_checkpointing", False):
        return layers * width * item + 3 * block
    return layers * block
