"""A causal language model as the rest of the library sees it: hidden states over a layout, logits, and named heads."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trailmark.errors import ModelError
from trailmark.models.attention import FLEX_BLOCK, NAME, Decoding, Layout
from trailmark.models.compiled import CompiledLayers
from trailmark.models.context_limit import UNLIMITED, context_of, text_config
from trailmark.models.products import adopt


@dataclass(eq=False)
class LM:
    """`model` is a transformers causal LM, possibly wrapped by peft. `sharing` is the richest layout that its attention
    computes exactly, as `models/layout_check.py` found."""

    model: Any
    tokenizer: Any
    name: str
    revision: str = ""
    heads: nn.ModuleDict = field(default_factory=nn.ModuleDict)
    sharing: str = "tree"
    notes: tuple[str, ...] = ()
    base_print: str = ""  # fingerprint of the folder of an adapter's base; empty: not computed yet
    decodes: str | None = None  # what is wrong with decoding from cached keys and values; None: not checked yet
    limit: int = UNLIMITED  # the longest sequence whose windows are computed as the model's own masks say
    leaks: bool | None = None  # whether tokens of another row change a packed row; None: not checked yet
    kept: int = 0  # numbers that decoding keeps per token, once `decodes` is known
    compiled: CompiledLayers = field(default_factory=CompiledLayers)  # on a GPU

    def __post_init__(self) -> None:
        base = self.base
        if base.config._attn_implementation != NAME:
            base.set_attn_implementation(NAME)
        adopt(self.model)
        # A 4D mask is passed through unchanged; our attention reads the layout.
        self._dummy = torch.zeros(1, 1, 1, 1, device=self.device, dtype=self.dtype)
        after = ("logits_scaling", "logit_scale", "final_logit_softcapping")
        config = text_config(base.config)
        self._after = tuple(getattr(config, name, None) for name in after)  # asked once: it is slow

    @property
    def base(self) -> Any:
        """The causal LM without the peft wrapper (adapters stay in place inside it)."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    @property
    def adapted(self) -> bool:
        return hasattr(self.model, "get_base_model")

    @property
    def device(self) -> torch.device:
        return self.base.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.base.get_input_embeddings().weight.dtype

    @property
    def width(self) -> int:
        return self.base.get_input_embeddings().weight.shape[1]

    @property
    def vocab(self) -> int:
        return self.base.get_output_embeddings().weight.shape[0]

    @property
    def context(self) -> int:
        """The longest sequence whose numbers are those of transformers."""
        return min(context_of(self.base.config), self.limit)

    @property
    def pad_multiple(self) -> int:
        return FLEX_BLOCK if self.device.type == "cuda" else 1

    def hidden(self, ids: Tensor, layout: Layout | Decoding, pos: Tensor) -> Tensor:
        """[B, L] ids -> [B, L, width]. Each place attends to the places that the layout allows."""
        if not ids.is_cuda:
            return self.body(ids, layout, pos)
        return self.compiled.run(self.base, layout, lambda: self.body(ids, layout, pos))

    def body(self, ids: Tensor, layout: Layout | Decoding, pos: Tensor) -> Tensor:
        """`hidden` without compiled layers, for callers that compile a whole step themselves."""
        return self.base.base_model(
            input_ids=ids, position_ids=pos, attention_mask=self._dummy, tree=layout, use_cache=False
        ).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """The output layer on any [..., width], with the scaling that some families apply after it."""
        out = self.base.get_output_embeddings()(hidden)
        divisor, scale, cap = self._after
        if divisor:
            out = out / divisor
        if scale:
            out = out * scale
        if cap:
            out = cap * torch.tanh(out / cap)
        return out

    def add_head(self, name: str, outputs: int = 1, zero: bool = True, seed: int = 0) -> nn.Linear:
        """A linear map of hidden states without bias, in float32 (float64 if the model is). A value head starts at
        zero, so V is 0 before training."""
        real = torch.float64 if self.dtype == torch.float64 else torch.float32
        head = nn.Linear(self.width, outputs, bias=False, device=self.device, dtype=real)
        draw = torch.Generator().manual_seed(seed)
        start = (
            torch.zeros(outputs, self.width)
            if zero
            else torch.randn(outputs, self.width, generator=draw) * self.width**-0.5
        )
        with torch.no_grad():
            head.weight.copy_(start)
        self.heads[name] = head
        return head

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters, by name. Tied weights appear once."""
        yield from ((n, p) for n, p in self.model.named_parameters() if p.requires_grad)
        yield from ((f"heads.{n}", p) for n, p in self.heads.named_parameters() if p.requires_grad)

    def train(self, mode: bool = True) -> None:
        if self.model.training != mode:  # visiting every module costs as much as decoding a token of a tiny model
            self.model.train(mode)
        if self.heads.training != mode:
            self.heads.train(mode)

    def freeze(self) -> LM:
        for p in [*self.model.parameters(), *self.heads.parameters()]:
            p.requires_grad_(False)
        self.train(False)
        return self

    @contextlib.contextmanager
    def without_adapter(self) -> Iterator[None]:
        """The base model alone: the reference policy of a LoRA run, without a second copy of the weights."""
        trains = [p.requires_grad for p in self.model.parameters()]
        try:
            with self.model.disable_adapter() if self.adapted else contextlib.nullcontext():
                yield
        finally:
            for p, flag in zip(self.model.parameters(), trains):  # peft makes adapters trainable again, frozen ones too
                p.requires_grad_(flag)

    def fingerprint(self) -> str:
        """A hash of every weight and head, to check that a frozen model did not change."""
        digest = hashlib.sha256()
        for name, tensor in [*self.model.state_dict().items(), *self.heads.state_dict().items()]:
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def check_output_layer(self) -> None:
        """Check that `logits(hidden)` through our attention equals what the model computes through its own."""
        n = min(8, self.context)
        ids = torch.arange(n, device=self.device)[None] % self.vocab
        pos = torch.arange(n, device=self.device)[None]
        with torch.no_grad():
            try:
                self.base.set_attn_implementation("eager")
                own = self.base(input_ids=ids, position_ids=pos, use_cache=False).logits
            finally:
                self.base.set_attn_implementation(NAME)
            ours = self.logits(self.hidden(ids, Layout(torch.full_like(ids, n), pos), pos))
        scale = max(1.0, float(own.abs().max()))
        allowed = {torch.float64: 1e-6, torch.float32: 1e-4}.get(self.dtype, 0.1) * scale
        if not float((own - ours).abs().max()) <= allowed:
            raise ModelError(
                f"model '{self.name}' ({type(self.base).__name__}) computes its logits in a way that Trailmark does "
                f"not know: its logits and ours differ by {float((own - ours).abs().max()):.2g}. Use another family."
            )
