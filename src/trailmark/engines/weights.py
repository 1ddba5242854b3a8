"""What a learner publishes, and the engine's own copy of a model: in another dtype, with adapters merged."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from trailmark.models.forward import fill, pack
from trailmark.models.layout import lay_out
from trailmark.models.lm import LM
from trailmark.models.readout import Readout
from trailmark.types import Sample

MORE_THAN_LORA = ("lora_bias", "modules_to_save", "trainable_token_indices", "layer_replication")


def engine_copy(lm: LM, dtype: torch.dtype) -> LM:
    """A copy of a model in another dtype, for an engine that samples in bf16 while training is in float32. Adapters are
    merged into the copy if they are a sum of weights: in a small model they cause most of the kernel launches."""
    model = copy.deepcopy(lm.model)
    model = model.merge_and_unload() if mergeable(lm) else model
    known = {"sharing": lm.sharing, "limit": lm.limit, "leaks": lm.leaks}
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


class Weights:
    """The weights of a learner's model: `named` tensors, or its `adapter` for an engine that holds the same base. An
    engine that copied them scores a `probe` as the learner does."""

    def __init__(self, lm: LM):
        self.lm = lm

    def named(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors by their names without adapters, one after the other, with the adapters merged and rounded to
        `dtype`. If they cannot be merged: the tensors as they are."""
        if not mergeable(self.lm):
            yield from self.lm.model.state_dict().items()
            return
        layers = {name: x for name, x in self.lm.base.named_modules() if hasattr(x, "get_delta_weight")}
        for name, tensor in self.lm.base.state_dict().items():
            if ".lora_" in name:
                continue
            layer = layers.get(name.removesuffix(".base_layer.weight"))
            if layer is not None:
                changes = [layer.get_delta_weight(a) for a in layer.active_adapters if a in layer.lora_A]
                tensor = sum((c.to(tensor.dtype) for c in changes), tensor).to(dtype)
            yield name.replace(".base_layer.", "."), tensor

    def adapter(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The trained tensors of an adapter, by the names that a file of it has; nothing if there is none."""
        if self.lm.adapted:
            from peft import get_peft_model_state_dict

            yield from get_peft_model_state_dict(self.lm.model).items()

    def probe(self, ids: Sequence[int]) -> list[float]:
        """The log-probs of all tokens but the first under the learner's model."""
        return read(self.lm, [ids], [1], Readout("logp", law=False))[0].streams["logp"][1:].tolist()


def read(lm: LM, rows: Sequence[Sequence[int]], starts: Sequence[int], *readouts: Readout) -> list[Sample]:
    """Rows of tokens with what a model says about each token from `starts` on. One row is computed alone."""
    lm.train(False)
    samples = []
    for tokens, start in zip(rows, starts):
        weight = np.arange(len(tokens)) >= max(start, 1)
        samples.append(Sample(np.array(tokens, np.int64), {"weight": weight}))
    models = {"policy": lm}
    packs = [lay_out(samples, "rows")] if len(samples) == 1 else pack(models, samples)
    return fill(models, samples, packs, readouts)
