"""Compiled code on a GPU: the decoder layers in a learner's forward pass, and the readout of log-probs over the
vocabulary.

A decoder layer is compiled with static shapes and FlexAttention inside, so that it has few, fused kernels. All layers
of a model share one graph. Every length needs its own graph, so `models/layout.py` rounds lengths up to a few values.
If a model meets more than `MOST` lengths, or torch cannot compile it, the model runs uncompiled, with a one-line
warning. The compiler caches its results on disk (TORCHINDUCTOR_CACHE_DIR) for the next run. TRAILMARK_COMPILE=0 turns
compilation off; 1 turns it on for small models too.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trailmark.models.attention import Layout, Prefill, failures, set_up
from trailmark.models.context_limit import text_config

LEAST = 30_000_000  # smallest number of weights of a model that is worth compiling
MOST = 24  # most shapes that are compiled
WORTH = 16384  # below this many tokens of a prefill, launches cost more than kernels


@dataclass(eq=False)
class CompiledLayers:
    """The compiled layers of one model. `wanted` None: compile if the model is large enough."""

    wanted: bool | None = None
    lengths: set[tuple[Any, ...]] = field(default_factory=set)
    shapes: set[tuple[int, ...]] = field(default_factory=set)  # shapes of prefills so far
    _calls: dict[int, Any] = field(default_factory=dict)

    def run(self, base: Any, layout: Any, forward: Callable[[], Tensor]) -> Tensor:
        """`forward` with compiled layers, if the layout is one line of a length that FlexAttention supports, or a large
        prefill."""
        if not self._use(base, layout):
            self._switch(base, False)
            return forward()
        self._switch(base, True)
        try:
            if type(layout) is Layout:
                for window in _windows(text_config(base.config)):
                    layout.block_mask(window)  # built here, because a compiled layer can only read it
            return forward()
        except failures() as problem:
            print(f"this torch cannot compile {type(base).__name__} ({type(problem).__name__}): it runs uncompiled",
                  file=sys.stderr)  # fmt: skip
            self.wanted = False
            self._switch(base, False)
            return forward()

    def worth(self, base: Any) -> bool:
        """Whether this model is compiled at all."""
        if self.wanted is None:
            said = os.environ.get("TRAILMARK_COMPILE", "")
            self.wanted = said == "1" or (said != "0" and sum(p.numel() for p in base.parameters()) >= LEAST)
        return self.wanted

    def off(self, base: Any) -> None:
        self._switch(base, False)

    def _use(self, base: Any, layout: Any) -> bool:
        if not self.worth(base):
            return False
        if type(layout) is Prefill:
            if layout.end.numel() < WORTH:
                return False
            shape = tuple(layout.end.shape)
            if shape not in self.shapes:  # a shape that occurs once is not worth compiling
                self.shapes.add(shape)
                return False
        elif type(layout) is not Layout or not layout.flexible or len(layout.end) != 1:
            return False
        key = (type(layout), tuple(layout.end.shape), torch.is_grad_enabled())
        if key not in self.lengths and len(self.lengths) >= MOST:
            return False
        if not self.lengths:
            print("compiling the model's layers for this GPU: a minute the first time, then kept", file=sys.stderr)
        self.lengths.add(key)
        return True

    def _switch(self, base: Any, on: bool) -> None:
        """Stays the same until the next pass: a checkpointed layer runs again in the backward pass and must be the
        same."""
        if on and not self._calls:
            set_up()
            self._calls = {id(x): torch.compile(x._call_impl, dynamic=False) for x in _layers(base)}
        if self._calls:
            for layer in _layers(base):
                layer._compiled_call_impl = self._calls[id(layer)] if on else None


def _layers(base: Any) -> list[Any]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [m for m in base.modules() if isinstance(m, GradientCheckpointingLayer)]


def _windows(config: Any) -> list[int | None]:
    """The attention windows that a family's layers use."""
    window = getattr(config, "sliding_window", None)
    if window is None or not getattr(config, "use_sliding_window", True):
        return [None]
    return [None, window] if getattr(config, "layer_types", None) else [window]


def whole(step: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Compile a step of constant shapes. If torch cannot, the step runs uncompiled, with a one-line warning."""
    set_up()
    made = torch.compile(step, dynamic=False)

    def call(*args: Any) -> Any:
        nonlocal made
        try:
            return made(*args)
        except failures() as problem:
            print(f"this torch cannot compile {name} ({type(problem).__name__}): it runs uncompiled", file=sys.stderr)
            if os.environ.get("TRAILMARK_COMPILE_ERRORS"):
                raise
            made = step
            return step(*args)

    return call


# --- the readout ---------------------------------------------------------------------------------------------------

CHUNK = 2048


def _numbers(logits: Tensor, target: Tensor, heat: Tensor, entropies: bool) -> tuple[Tensor, ...]:
    """log p(target) of softmax(logits / heat) and, if requested, its entropy."""
    x = logits.float() / heat[:, None]
    whole = torch.logsumexp(x, -1)
    logp = x.gather(1, target[:, None])[:, 0] - whole
    if not entropies:
        return (logp,)
    p = torch.exp(x - whole[:, None])
    return logp, whole - (p * x).sum(-1)


@functools.cache
def _compiled_numbers() -> Any:
    return whole(_numbers, "the readout of log-probs")


def readout(lm: Any, states: Tensor, target: Tensor, heat: Tensor, entropies: bool) -> tuple[Tensor, ...]:
    """`_numbers` of a chunk of exactly CHUNK states."""
    return _compiled_numbers()(lm.logits(states), target, heat, entropies)
