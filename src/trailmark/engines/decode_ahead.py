"""Decoding one step ahead of the host. On a GPU a step samples its tokens on the device, and the host reads them while
the next step runs.

The state of every slot (its length, last token, draw keys, temperature) is on the device. A step has constant shapes.
It is compiled if the model is large enough, and recorded once as a graph; replaying the graph is one launch. A draw
depends on (key, position) only, so running ahead changes no token. What a slot samples after its sample has ended is
discarded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trailmark.models import compiled
from trailmark.models.attention import Slots
from trailmark.models.lm import LM
from trailmark.models.sampling import gumbel, working


def draw(logits: Tensor, keys: Tensor, written: Tensor, heat: Tensor, ids: Tensor) -> Tensor:
    """[N, V] logits -> [N, 3]: a token sampled at temperature `heat` (0: the most likely one), its log-prob under the
    model and under the law. `ids` are the tokens 0 to V - 1 as a tensor: inside the function a compiler would count
    them in 32 bits."""
    own = working(logits)
    warm = heat > 0
    under = own / torch.where(warm, heat, torch.ones_like(heat)).to(own.dtype)[:, None]
    noise = gumbel(keys, written, ids, own.dtype)
    token = torch.where(warm[:, None], under + noise, under).argmax(-1, keepdim=True)
    logp = own.gather(1, token) - own.logsumexp(-1, keepdim=True)
    logq = under.gather(1, token) - under.logsumexp(-1, keepdim=True)
    logq = torch.where(warm[:, None], torch.where(heat[:, None] == 1, logp, logq), torch.zeros_like(logp))
    real = torch.float32 if logits.device.type == "mps" else torch.float64
    return torch.cat([token.to(real), logp.to(real), logq.to(real)], 1)


class Ahead:
    """The state of an engine's slots on the device."""

    def __init__(self, lm: LM, cache: Slots):
        self.lm, self.cache = lm, cache
        rows, device = cache.rows, lm.device
        self.index, self.last, self.written = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(3))
        self.keys = torch.zeros(rows, 2, dtype=torch.int64, device=device)
        # a temperature is rounded as a model's logits are, so that the learner divides by the same number
        self.heat = torch.ones(rows, dtype=torch.promote_types(lm.dtype, torch.float32), device=device)
        self.ids = torch.arange(lm.vocab, device=device)
        self._top = min(cache.capacity, lm.context) - 1  # largest position
        self.logits: Tensor | None = None  # of the newest step
        self.found: Tensor | None = None
        self._play: Callable[[], None] | None = None
        self._here = [torch.zeros(rows, 3, dtype=torch.float64, pin_memory=device.type == "cuda") for _ in range(2)]
        self._read: list[Any] = [None, None]
        self._steps = 0

    def seat(self, rows: Sequence[int], state: Sequence[tuple[int, int, int, int, int]], heat: Sequence[float]) -> None:
        """Put samples into slots: for each its length, last token, number of written tokens, two draw keys, and a
        temperature."""
        device = self.lm.device
        at = torch.as_tensor(rows, device=device)
        whole = torch.as_tensor(state, device=device)
        for column, mine in enumerate((self.index, self.last, self.written)):
            mine[at] = whole[:, column]
        self.keys[at] = whole[:, 3:]
        self.heat[at] = torch.as_tensor(heat, dtype=self.heat.dtype, device=device)

    def correct(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Set the tokens of some slots in the newest step, if the host sampled them."""
        self.last[torch.as_tensor(rows, device=self.lm.device)] = torch.as_tensor(tokens, device=self.lm.device)

    @torch.inference_mode()
    def launch(self) -> int:
        """Start a step of all slots. Returns its number, for `read`."""
        if self._play is None:
            self._play = self._recorded()
        self._play()
        assert self.found is not None
        number = self._steps
        self._here[number % 2].copy_(self.found, non_blocking=True)
        if self.lm.device.type == "cuda":
            self._read[number % 2] = torch.cuda.current_stream().record_event()
        self._steps += 1
        return number

    def read(self, number: int) -> np.ndarray:
        """[slots, 3]: tokens and their two log-probs. Waits for this step only."""
        event = self._read[number % 2]
        if event is not None:
            event.synchronize()
        return self._here[number % 2].numpy().copy()

    def _step(self) -> tuple[Tensor, Tensor]:
        hidden = self.lm.body(self.last[:, None], self.cache.at(self.index), self.index[:, None])
        logits = self.lm.logits(hidden[:, 0])
        found = draw(logits, self.keys, self.written, self.heat, self.ids)
        self.last.copy_(found[:, 0])
        self.written.add_(1)
        # A free slot goes on. Its position stays inside the context: `dynamic` rotary positions depend on the largest.
        self.index.copy_((self.index + 1).clamp(max=self._top))
        return logits, found

    def _recorded(self) -> Callable[[], None]:
        """The step as a function: a recorded graph on a GPU, plain code elsewhere."""

        def plain() -> None:
            self.logits, self.found = self._step()

        if self.lm.device.type != "cuda":
            return plain
        self.lm.compiled.off(self.lm.base)
        kept = [x.clone() for x in (self.index, self.last, self.written)]
        step: Callable[[], tuple[Tensor, Tensor]] = self._step
        if self.lm.compiled.worth(self.lm.base):
            step = compiled.whole(self._step, "a decoding step")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # libraries must initialise before the recording
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # a learner may work in another thread
            self.logits, self.found = step()
        for mine, before in zip((self.index, self.last, self.written), kept):
            mine.copy_(before)
        return graph.replay
