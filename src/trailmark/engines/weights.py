"""The engine's own copy of a model: in another dtype, with adapters merged."""

from __future__ import annotations

import copy

import torch

from trailmark.models.lm import LM

MORE_THAN_LORA = ("lora_bias", "modules_to_save", "trainable_token_indices", "layer_replication")


def engine_copy(lm: LM, dtype: torch.dtype) -> LM:
    """A copy of a model in another dtype, for an engine that samples in bf16 while training is in float32. Adapters are
    merged into the copy if they are a sum of weights: in a small model they cause most of the kernel launches."""
    model = copy.deepcopy(lm.model)
    model = model.merge_and_unload() if mergeable(lm) else model
    known = {"sharing": lm.sharing, "reach": lm.reach, "leaks": lm.leaks}
    return LM(model.to(dtype), lm.tokenizer, lm.name, lm.revision, **known).freeze()


def mergeable(lm: LM) -> bool:
    """Whether the adapter is plain LoRA on linear layers whose weights are not shared. Then it can be merged as a sum
    of weights."""
    from peft import LoraConfig
    from peft.tuners.lora import Linear, LoraLayer

    if not lm.adapted or getattr(lm.base, "quantization_method", None):
        return False
    config = lm.model.active_peft_config
    if type(config) is not LoraConfig or any(getattr(config, name, None) for name in MORE_THAN_LORA):
        return False
    layers = [x for x in lm.base.modules() if isinstance(x, LoraLayer)]
    last = lm.base.get_output_embeddings()
    return all(type(x) is Linear and not x.lora_variant and x is not last for x in layers)


def plain_weights(lm: LM, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The weights of a model by their names without adapters, with the adapters merged and rounded to `dtype`. If they
    cannot be merged: the weights as they are."""
    if not mergeable(lm):
        return lm.model.state_dict()
    layers = {name: x for name, x in lm.base.named_modules() if hasattr(x, "get_delta_weight")}
    out = {}
    for name, tensor in lm.base.state_dict().items():
        if ".lora_" in name:
            continue
        layer = layers.get(name.removesuffix(".base_layer.weight"))
        if layer is not None:
            changes = [layer.get_delta_weight(a) for a in layer.active_adapters if a in layer.lora_A]
            tensor = sum((c.to(tensor.dtype) for c in changes), tensor).to(dtype)
        out[name.replace(".base_layer.", ".")] = tensor
    return out
