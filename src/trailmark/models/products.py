"""Matrix products in float32 on a CPU, through oneDNN where that is faster than torch's own.

torch gives these products to MKL, which is slow on a CPU of AMD. oneDNN is in
the same wheel and is not. Which of the two computes a product depends on the CPU (vendor and instruction set) and on
the shapes, and never on a timing, so a machine always computes the same numbers. `onednn` says what a CPU uses; a run
writes it down (versions.json).

`adopt` prepares the linear layers of a model: forward pass, gradient of the input and gradient of the weight. `Packed`
keeps the weights of an engine in oneDNN's order, which saves reordering them for each token.

TRAILMARK_PRODUCTS=plain turns this off, TRAILMARK_PRODUCTS=onednn uses it on any CPU that can.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from trailmark.errors import ModelError
from trailmark.models.hardware import vendor

SWITCH = "TRAILMARK_PRODUCTS"
VENDORS = ("AuthenticAMD", "HygonGenuine")  # where MKL is slow

# Sizes are counted in multiplications: rows x in x out. Below them, or with fewer weights, a call of oneDNN costs more
# than it saves. A new shape costs it about a millisecond more, once.
LEAST_WEIGHTS = 1 << 15
LEAST_PACKED = 600_000
LEAST_WORK = 1 << 22
MUCH_WORK = 1 << 25  # from here on also with few weights, as adapters have them
LONG_SIDE = 512
BLOCK = 512  # rows
MOST_BLOCKS = 8
PACKED_ROWS = 256  # with more rows, reordering the weights costs nothing to speak of
SAMPLED = 64  # values of each packed weight that are compared


# --- which products this CPU uses ----------------------------------------------------------------------------------


@functools.cache
def onednn() -> bool:
    """Whether large products go through oneDNN. If that was wanted and cannot be, one line says why."""
    said = os.environ.get(SWITCH, "")
    if said not in ("", "plain", "onednn"):
        raise ModelError(f"{SWITCH} is '{said}': set it to plain or onednn, or leave it out")
    if said == "plain" or (not said and vendor() not in VENDORS):
        return False
    wrong = missing()
    if wrong:
        print(f"{wrong}: products in float32 are computed by torch's own code, which may be slower", file=sys.stderr)
    return not wrong


def path() -> str:
    """What computes float32 products on this CPU, for the record of a run."""
    return f"oneDNN, {vendor()} {torch.backends.cpu.get_cpu_capability()}" if onednn() else "plain"


def missing() -> str:
    """Why oneDNN cannot be used here; "" if it can."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return "this CPU has no AVX2"
    if not torch.backends.mkldnn.is_available():
        return "this torch was built without oneDNN"
    try:
        x, weight = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3)
        right = x @ weight.t()
        same = all(torch.equal(_product(x, w), right) for w in (weight, _pack(weight), weight.t().contiguous().t()))
        return "" if same else "the oneDNN of this torch multiplies wrongly"
    except (AttributeError, RuntimeError, TypeError) as problem:
        return f"this torch has other oneDNN operators ({type(problem).__name__})"


# --- products ------------------------------------------------------------------------------------------------------


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.t() + bias, [N, in] and [out, in] -> [N, out]. Views that are transposed cost nothing more."""
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight.default(weight)


def rounded(rows: int) -> int:
    """The number of rows that are computed for so many: few sizes, with at most a quarter too many rows. oneDNN keeps
    code and memory for every shape that it ever met."""
    return -(-rows // (step := 1 << max(0, min((rows - 1).bit_length() - 3, 7)))) * step


def _padded(x: Tensor) -> Tensor:
    pad = rounded(len(x)) - len(x)
    return F.pad(x, (0, 0, 0, pad)) if pad else x


def by_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.t() + bias in a few sizes."""
    out = _product(_padded(x), weight, bias)
    return out if len(out) == len(x) else out.resize_(len(x), out.shape[1])  # no view, and no copy


def in_blocks(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same with many rows in blocks. Not for sampling: all rows of an engine go through one call, so that they
    cannot differ."""
    blocks = [by_rows(part, weight, bias) for part in _blocks(x)]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def over_rows(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of a weight, grad.t() @ x."""
    parts = (_product(_padded(g).t(), _padded(part).t()) for g, part in zip(_blocks(grad), _blocks(x)))
    total = next(parts)
    for part in parts:
        total += part
    return total


def _blocks(x: Tensor) -> list[Tensor]:
    """Parts of `x` whose numbers of rows are multiples of `BLOCK`, and the rest."""
    sizes, rest = [], len(x)
    while rest >= BLOCK:
        sizes.append(min(rest // BLOCK, MOST_BLOCKS) * BLOCK)
        rest -= sizes[-1]
    return list(x.split([*sizes, rest] if rest else sizes))


def _worth(rows: int, weights: int) -> bool:
    work = rows * weights
    return work >= MUCH_WORK or (work >= LEAST_WORK and weights >= LEAST_WEIGHTS)


def _fits(x: Tensor, weight: Tensor) -> bool:
    """Whether both are plain float32 matrices on the CPU, and nothing else wants to compute the product."""
    return (
        x.dtype is torch.float32 and weight.dtype is torch.float32
        and type(x) is Tensor and type(weight) in (Tensor, nn.Parameter)
        and x.device.type == "cpu" == weight.device.type and x.ndim > 1
        and not torch.is_autocast_enabled("cpu")
    )  # fmt: skip


class _Linear(torch.autograd.Function):
    """x @ weight.t() + bias, [N, in] and [out, in] -> [N, out], with all three products by oneDNN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # type: ignore[override]
        of_x, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        return in_blocks(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x, weight), (of_x, of_weight, of_bias) = ctx.saved_tensors, ctx.needs_input_grad
        if torch.is_grad_enabled():  # for a second derivative: products that torch knows to differentiate
            by_x, by_weight = (lambda: grad @ weight), (lambda: grad.t() @ x)
        else:
            grad = grad.contiguous()
            by_x, by_weight = (lambda: in_blocks(grad, weight.t())), (lambda: over_rows(grad, x))
        return by_x() if of_x else None, by_weight() if of_weight else None, grad.sum(0) if of_bias else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, pack: Pack | None = None) -> Tensor:
    """x @ weight.t() + bias, [..., in] and [out, in] -> [..., out]. In inference mode a `pack` holds the weight."""
    weights, rows, samples = weight.numel(), x.numel() // max(x.shape[-1], 1), torch.is_inference_mode_enabled()
    few = samples and pack is not None and pack.used and rows <= PACKED_ROWS and rows * weights >= LEAST_PACKED
    if not (few or _worth(rows, weights)) or not _fits(x, weight) or not onednn():
        return F.linear(x, weight, bias)
    flat = x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        out = _Linear.apply(flat, weight, bias)
    elif samples:
        out = by_rows(flat, pack.of(weight) if few and pack is not None else weight, bias)
    else:
        out = in_blocks(flat, weight, bias)
    return out.view(*x.shape[:-1], len(weight))


# --- the layers of a model -----------------------------------------------------------------------------------------


class Pack:
    """A weight in oneDNN's order. A copy of a layer has an empty one."""

    __slots__ = ("_of", "_sample", "_version", "_weight", "used")

    def __init__(self) -> None:
        self.used = False
        self.drop()

    def drop(self) -> None:
        self._weight: Tensor | None = None
        self._of: Tensor | None = None  # keeps the memory of the weight, so that no other weight has its address
        self._sample: Tensor | None = None
        self._version = -1

    def of(self, weight: Tensor) -> Tensor:
        """The packed weight; packed again if the weight is another one, or was changed in place."""
        held, packed = self._of, self._weight
        if packed is None or held is None or held.data_ptr() != weight.data_ptr() or self._version != weight._version:
            packed = self._weight = _pack(weight.detach())
            self._of, self._version, self._sample = weight.detach(), weight._version, _sampled(weight).clone()
        return packed

    def check(self) -> None:
        """Drop the pack if values of the weight were changed where torch does not count it, through `.data`."""
        if self._of is not None and self._sample is not None and not torch.equal(_sampled(self._of), self._sample):
            self.drop()

    def __deepcopy__(self, memo: Any) -> Pack:
        return Pack()

    def __reduce__(self) -> tuple[Any, ...]:
        return Pack, ()


def _sampled(weight: Tensor) -> Tensor:
    flat = weight.detach().view(-1) if weight.is_contiguous() else weight.detach().t().view(-1)
    return flat[:: max(1, flat.numel() // SAMPLED)]


class FastLinear(nn.Linear):
    """nn.Linear, whose large products are computed by `linear`."""

    pack: Pack

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias, self.pack)


class FastConv1D(Conv1D):
    """GPT-2's linear layer: its weight is [in, out]."""

    pack: Pack

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.t(), self.bias, self.pack)


FAST: dict[type, type] = {nn.Linear: FastLinear, Conv1D: FastConv1D}


def adopt(model: nn.Module) -> None:
    """Let the large linear layers of a model on a CPU compute by `linear`. Names, weights and saved files stay what
    they are. Layers of other classes (quantised ones, say) are left alone."""
    for module in model.modules():
        fast = FAST.get(type(module))
        if fast is None or not onednn():
            continue
        weight = module.weight
        assert isinstance(weight, Tensor)
        large = weight.numel() >= LEAST_WEIGHTS or max(weight.shape) >= LONG_SIDE
        if large and weight.device.type == "cpu" and weight.dtype is torch.float32:
            module.__class__, module.pack = fast, Pack()  # pyrefly: ignore


class Packed:
    """The packed weights of a model that an engine samples from."""

    def __init__(self, model: nn.Module):
        fast = [m for m in model.modules() if isinstance(m, FastLinear | FastConv1D)]
        here = [m for m in fast if m.weight.dtype is torch.float32 and m.weight.device.type == "cpu"]
        self.layers = [m for m in here if m.weight.numel() >= LEAST_WEIGHTS]
        for m in self.layers:
            m.pack.used = True

    @property
    def bytes(self) -> int:
        return sum(m.weight.numel() * m.weight.element_size() for m in self.layers)

    def drop(self) -> None:
        """The weights have changed."""
        for m in self.layers:
            m.pack.drop()

    def check(self) -> None:
        """Before sampling starts: drop what no longer fits its weight."""
        for m in self.layers:
            m.pack.check()
