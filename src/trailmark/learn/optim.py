"""AdamW over named parameters, with parameter groups, warm-up, a schedule, clipping, and a state of plain tensors."""

from __future__ import annotations

import contextlib
import fnmatch
import importlib
import importlib.util
import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from trailmark.config import OptimConfig
from trailmark.errors import LearnError
from trailmark.memory import need
from trailmark.models.lm import LM


def rate(config: OptimConfig, step: int, total: int) -> float:
    """The factor on the learning rate at optimiser step `step` (from 0): linear warm-up, then the schedule down to
    `final`."""
    warm = config.warmup * total if config.warmup < 1 else config.warmup
    if step < warm:
        return min(1.0, (step + 1) / max(warm, 1))  # a fraction of the steps may not be a whole number
    if config.schedule == "constant":
        return 1.0
    done = min(1.0, (step - warm) / max(total - warm, 1))
    shape = 1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return config.final + (1 - config.final) * shape


def _real(p: Tensor) -> torch.dtype:
    return torch.float64 if p.dtype == torch.float64 else torch.float32


class Optimiser:
    """The optimiser of one model. With `ema` it keeps a moving average of the trained weights."""

    def __init__(self, lm: LM, config: OptimConfig, total: int, ema: float | None = None, offload: bool = False):
        """`offload`: keep the moments in CPU memory between steps."""
        self.config, self.total, self.decay, self.steps = config, total, ema, 0
        self.named = dict(lm.parameters())
        if not self.named:
            raise LearnError(f"model '{lm.name}' has nothing to train: every weight is frozen")
        groups: dict[str | None, list[Tensor]] = {}
        for name, p in self.named.items():
            pattern = next((g for g in config.groups if fnmatch.fnmatch(name, g)), None)
            groups.setdefault(pattern, []).append(p)
        if unused := [g for g in config.groups if g not in groups]:
            raise LearnError(f"learner.optim.groups: '{unused[0]}' matches no trained parameter of '{lm.name}'")
        self.base = []
        listed: list[dict[str, Any]] = []
        for pattern, params in groups.items():
            own = config.groups.get(pattern) if pattern else None
            lr = config.lr if own is None or own.lr is None else own.lr
            decay = config.weight_decay if own is None or own.weight_decay is None else own.weight_decay
            self.base.append(lr)
            listed.append({"params": params, "lr": lr, "weight_decay": decay})
        weights = sum(p.numel() for p in self.named.values())
        item = next(iter(self.named.values())).element_size()  # of a gradient; moments have it, too
        moments = 0 if offload else 2 * (1 if config.bits == 8 else item)
        each = moments + (4 if ema else 0) + item
        need(
            weights * each, f"training the {weights:,} weights of '{lm.name}'", "train adapters (model.lora)", lm.device
        )
        self.on_gpu = all(p.is_cuda for p in self.named.values())
        self.offload = offload and self.on_gpu
        if config.bits == 8:
            self.adam: torch.optim.Optimizer = _eight_bits(listed, config, self.on_gpu)
        else:
            self.adam = torch.optim.AdamW(listed, betas=config.betas, eps=config.eps, foreach=False, fused=self.on_gpu)
        self.average = {n: p.detach().clone().to(_real(p)) for n, p in self.named.items()} if ema else {}
        if any(p.dtype in (torch.bfloat16, torch.float16) for p in self.named.values()):
            warnings.warn(
                f"model '{lm.name}' is trained in {lm.dtype}: steps below its rounding are lost; train float32 "
                "weights and set learner.amp to bf16 instead",
                stacklevel=2,
            )

    def step(self) -> dict[str, float]:
        """Clip, step, and clear the gradients. Returns the gradient norm before clipping and the learning rate."""
        grads = [p.grad for p in self.named.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads) if grads else torch.zeros(())
        self._move(away=False)
        size = float(norm)  # the one moment of a step at which the host waits for a GPU
        if not math.isfinite(size):
            self.adam.zero_grad(set_to_none=True)
            raise LearnError(
                f"the gradient is not finite (norm {size}) at optimiser step {self.steps}: lower the learning rate or "
                "look at the data; the last checkpoint is intact"
            )
        if self.config.clip is not None and size > self.config.clip:
            torch.nn.utils.clip_grads_with_norm_(list(self.named.values()), self.config.clip, norm)
        factor = rate(self.config, self.steps, self.total)
        for group, lr in zip(self.adam.param_groups, self.base):
            group["lr"] = lr * factor
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        self._move(away=True)
        self.steps += 1
        for name, shadow in self.average.items():
            shadow.lerp_(self.named[name].detach().to(shadow.dtype), 1 - (self.decay or 0))
        return {"grad_norm": size, "lr": self.config.lr * factor}

    def _move(self, away: bool) -> None:
        """Take the moments to the computer's memory, or bring them back to the GPU."""
        if self.offload:
            for p, state in self.adam.state.items():
                where = torch.device("cpu") if away else p.device
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.numel() > 1:
                        state[key] = value.to(where, non_blocking=not away)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside this context the model has its moving average as weights."""
        own = {n: self.named[n].detach().clone() for n in self.average}
        with torch.no_grad():
            for n, shadow in self.average.items():
                self.named[n].copy_(shadow)
            try:
                yield
            finally:
                for n, weight in own.items():
                    self.named[n].copy_(weight)

    def tensors(self) -> dict[str, Tensor]:
        """The whole state as named tensors: moments, step counts, the moving average."""
        out = {f"ema/{n}": t for n, t in self.average.items()}
        for name, p in self.named.items():
            for key, value in self.adam.state.get(p, {}).items():
                out[f"{key}/{name}"] = value if isinstance(value, Tensor) else torch.tensor(value)
        return out

    def load(self, tensors: dict[str, Tensor], steps: int) -> None:
        self.steps = steps
        self.adam.state.clear()
        for name, p in self.named.items():
            mine = {k.removesuffix(f"/{name}"): t for k, t in tensors.items() if k.endswith(f"/{name}")}
            if f"step/{name}" not in tensors:
                continue
            if self.config.bits == 8:  # its step is a plain number
                self.adam.state[p] = {
                    k: int(t) if k == "step" else t.to(p.device).clone() for k, t in mine.items() if k != "ema"
                }
                continue
            self.adam.state[p] = {
                key: (t := mine[key]).to("cpu" if key == "step" and not p.is_cuda else p.device, t.dtype).clone()
                for key in ("step", "exp_avg", "exp_avg_sq")
            }
        self._move(away=True)
        for name in self.average:
            self.average[name] = tensors[f"ema/{name}"].to(self.named[name].device).clone()


def _eight_bits(groups: list[dict[str, Any]], config: OptimConfig, on_gpu: bool) -> torch.optim.Optimizer:
    """AdamW with moments of 8 bits, from bitsandbytes."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise LearnError("learner.optim.bits=8 needs bitsandbytes: pip install 'trailmark[quant]'")
    if not on_gpu:
        raise LearnError("learner.optim.bits=8 needs a GPU: leave it at 32 here")
    made = importlib.import_module("bitsandbytes.optim")
    return made.AdamW8bit(groups, betas=config.betas, eps=config.eps)
