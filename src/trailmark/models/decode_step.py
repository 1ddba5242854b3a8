"""One decoding step through the layers of Llama, Mistral, Qwen2 and Qwen3 in float32 on a CPU, without the modules of
transformers around the products.

The operations are theirs, so the numbers are the same, bit for bit. What goes is Python and small tensors: more than
half of a step of a tiny model. `short_step` compares both on a few tokens. If they differ, or the layers are of another
kind, it returns None, and a step is computed by the model's own code.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trailmark.models.attention import Decoding, How, Prefill, Slots
from trailmark.models.lm import LM

KINDS = ("llama", "mistral", "qwen2", "qwen3")
STATIC = ("default", "linear", "llama3", "yarn")  # rotary angles that depend on the position only
PROBE = 4  # tokens that are compared, in two rows


def short_step(lm: LM) -> ShortStep | None:
    """The step of a model, if it is known and gives the model's own numbers."""
    if lm.device.type != "cpu" or lm.dtype != torch.float32 or lm.context < 2:
        return None
    body = lm.base.base_model
    layers = getattr(body, "layers", None)
    if not layers or any(not _known(layer) for layer in layers) or _hooked(body):
        return None
    return _compared(lm, ShortStep(lm))


def _known(layer: nn.Module) -> bool:
    """Whether a layer is one whose forward pass is written here."""
    name = type(layer).__name__.removesuffix("DecoderLayer").lower()
    return name in KINDS and type(layer).__module__ == f"transformers.models.{name}.modeling_{name}"


def _hooked(body: nn.Module) -> bool:
    """Whether somebody listens to a module that the short step does not call."""
    called = ("proj", "embed_tokens")
    skipped = (m for name, m in body.named_modules() if not any(word in name for word in called))
    return any(m._forward_hooks or m._forward_pre_hooks for m in skipped)


@torch.inference_mode()
def _compared(lm: LM, step: ShortStep) -> ShortStep | None:
    """The step, if its numbers are those of the model's own modules on a few tokens."""
    lm.train(False)
    ids = (torch.arange(2 * PROBE).view(2, PROBE) * 37 + 11) % lm.vocab
    begin, pos = min(2, lm.context - 1), torch.arange(min(PROBE, lm.context))
    head = Prefill(torch.full((2, begin), begin), pos[:begin].expand(2, -1))
    lm.body(ids[:, :begin], head, pos[:begin].expand(2, -1))
    slots = [Slots(2, 32), Slots(2, 32)]
    for each in slots:
        each.write([0, 1], head.kept, [0, 1])
    for t in pos[begin:].tolist():
        at = torch.full((2,), t)
        noted = Noted(slots[0], at, 32)
        own = lm.body(ids[:, t : t + 1], noted, at[:, None])[:, 0]
        step.how = noted.how
        if len(step.how) != len(step.layers) or not torch.equal(step(ids[:, t], slots[1].at(at, 32), at), own):
            return None
    return step


class Noted(Decoding):
    """Notes how each layer attends."""

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, how: How) -> Tensor:
        self.how = [*getattr(self, "how", ()), how]
        return super().attend(module, q, k, v, how)


class ShortStep:
    def __init__(self, lm: LM):
        self.body = lm.base.base_model
        self.rotary = self.body.rotary_emb
        self.layers = [_Layer(layer) for layer in self.body.layers]
        self.how: list[How] = []
        self._angles: tuple[Tensor, Tensor] | None = None
        self._static = getattr(self.rotary, "rope_type", "") in STATIC

    def __call__(self, ids: Tensor, layout: Decoding, pos: Tensor) -> Tensor:
        """[N] ids at positions [N] -> hidden states [N, width]."""
        x = self.body.embed_tokens(ids)
        cos, sin = self._turn(x, pos, layout.slots.capacity)
        for layer, how in zip(self.layers, self.how):
            x = layer(x, layout, cos, sin, how)
        return _normed(self.body.norm, x)

    def _turn(self, x: Tensor, pos: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [N, 1, D], the first half of the sines negated: it meets the second half of a head."""
        if not self._static:
            return self._signed(*self.rotary(x, pos[:, None]))
        if self._angles is None or len(self._angles[0]) < most:
            cos, sin = self._signed(*self.rotary(x, torch.arange(most)[None]))
            self._angles = cos.transpose(0, 1), sin.transpose(0, 1)
        return self._angles[0][pos], self._angles[1][pos]

    @staticmethod
    def _signed(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        sin = sin.clone()
        sin[..., : sin.shape[-1] // 2].neg_()
        return cos, sin


class _Layer:
    def __init__(self, layer: Any):
        attn, mlp = layer.self_attn, layer.mlp
        self.attn, self.first, self.second = attn, layer.input_layernorm, layer.post_attention_layernorm
        self.q, self.k, self.v, self.o = attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj
        self.gate, self.up, self.down, self.act = mlp.gate_proj, mlp.up_proj, mlp.down_proj, mlp.act_fn
        self.size = attn.head_dim
        self.norms: tuple[Any, Any] | None = (attn.q_norm, attn.k_norm) if hasattr(attn, "q_norm") else None

    def __call__(self, x: Tensor, layout: Decoding, cos: Tensor, sin: Tensor, how: How) -> Tensor:
        rows, size = len(x), self.size
        y = _normed(self.first, x)
        q, k = self.q(y).view(rows, -1, size), self.k(y).view(rows, -1, size)
        if self.norms is not None:
            q, k = _normed(self.norms[0], q), _normed(self.norms[1], k)
        both = torch.cat((q, k), 1)
        swapped = both.view(rows, -1, 2, size // 2).flip(2).view(both.shape)
        both.mul_(cos).add_(swapped.mul_(sin))
        heads = q.shape[1]
        q, k, v = both[:, :heads, None], both[:, heads:, None], self.v(y).view(rows, -1, 1, size)
        x = x + self.o(layout.attend(self.attn, q, k, v, how).reshape(rows, -1))
        y = _normed(self.second, x)
        return x + self.down(self.act(self.gate(y)).mul_(self.up(y)))


def _normed(norm: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)
