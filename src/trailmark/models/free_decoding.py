"""One decoding step with free shapes in float32 on a CPU: attention as a batched product and a weighted sum of rows.

SDPA with a mask computes each head of each row by itself. Here the heads that share keys are rows of one product, and
values are summed by `embedding_bag`, which reads them about twice as fast as a product of so few rows. Sums are taken
in another order, so numbers differ from those of fixed shapes by rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trailmark.models.attention import Decoding, How, Slots, number_of


class FreeDecoding(Decoding):
    """One token of the first len(index) rows of some slots."""

    def __init__(self, slots: Slots, index: Tensor):
        self.most = int(index.max()) + 1  # columns in use
        super().__init__(slots, index, self.most)
        self._added: dict[tuple[int | None, int], Tensor | None] = {}
        self._lists: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def attend(self, module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, how: How) -> Tensor:
        if how.softcap is not None or q.dtype is not torch.float32:
            return super().attend(module, q, k, v, how)
        layer, (rows, heads, _, size) = number_of(module), q.shape
        keys, values = self.slots.keys[layer], self.slots.values[layer]
        self._write(k, keys)
        self._write(v, values)
        shared = keys.shape[1]
        q = q.reshape(rows * shared, -1, size) * (size**-0.5 if how.scale is None else how.scale)
        weights = self._scores(q, keys, how.window).softmax(-1)
        places, begins = self._bags(heads, shared)
        flat = values.view(-1, values.shape[3])
        out = torch.embedding_bag(flat, places, begins, False, 0, False, weights.view(-1))[0]
        return out.view(rows, heads, 1, -1)

    def _scores(self, q: Tensor, keys: Tensor, window: int | None) -> Tensor:
        """[rows * shared heads, heads that share them, columns], -inf where a row has no key."""
        shared = keys.shape[1]
        hidden = self._hidden(window, shared)
        k = keys.view(-1, *keys.shape[2:])[: len(q), : self.most].transpose(1, 2)
        return torch.bmm(q, k) if hidden is None else torch.baddbmm(hidden, q, k)

    def _hidden(self, window: int | None, shared: int) -> Tensor | None:
        """-inf where a row has no key, else 0, [rows * shared heads, 1, columns]; None if it is 0 everywhere."""
        if (window, shared) not in self._added:
            gap = self.index[:, None] - torch.arange(self.most)
            outside = gap < 0 if window is None else (gap < 0) | (gap >= window)
            added = torch.zeros(gap.shape).masked_fill_(outside, -torch.inf).repeat_interleave(shared, 0)[:, None]
            self._added[window, shared] = added if bool(outside.any()) else None
        return self._added[window, shared]

    def _bags(self, heads: int, shared: int) -> tuple[Tensor, Tensor]:
        """Where the values of each head of each row are among all of a layer, and where each of these lists begins."""
        if (heads, shared) not in self._lists:
            first = self.slots.heads(shared)[: len(self.index)].view(-1, shared, 1, 1)
            places = (first + torch.arange(self.most)).to(torch.int32).expand(-1, -1, heads // shared, -1).reshape(-1)
            self._lists[heads, shared] = places, torch.arange(0, len(places), self.most, dtype=torch.int32)
        return self._lists[heads, shared]
