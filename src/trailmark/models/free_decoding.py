"""One decoding step with free shapes in float32 on a CPU: attention as a batched product and a weighted sum of rows.

SDPA with a mask computes each head of each row by itself. Here the heads that share keys are rows of one product, and
values are summed by `embedding_bag`, which reads them about twice as fast as a product of so few rows. Sums are taken
in another order, so numbers differ from those of fixed shapes by rounding.

Samples of one prompt read its keys and values once: `Groups` says which rows begin alike.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trailmark.models.attention import Decoding, How, Slots, number_of


class Groups:
    """Rows that begin with the same `prefix[row]` tokens have the same number in `group`. A free row has -1."""

    LEAST = 32  # columns in common: with fewer there is little to save

    def __init__(self, group: np.ndarray, prefix: np.ndarray):
        live = np.flatnonzero(group >= 0)
        group = np.where(group < 0, group[live[0]], group)  # nobody reads what a free row computes
        _, first, self.of, sizes = np.unique(group, return_index=True, return_inverse=True, return_counts=True)
        self.number, self.largest = len(sizes), int(sizes.max())
        self.first = live[[int(np.argmax(group[live] == group[k])) for k in first]]  # a row of each group
        self.shared = int(prefix[self.first].min())  # columns that all rows have in common with their group
        self.length = torch.from_numpy(prefix[self.first][self.of])
        padded = self.number * self.largest
        self.worth = 2 * self.number <= len(group) and 4 * padded <= 5 * len(group) and self.shared >= self.LEAST
        if not self.worth:
            return
        order = np.argsort(self.of, kind="stable")
        place = np.arange(len(group)) - (np.cumsum(sizes) - sizes)[self.of[order]]
        at = np.empty(len(group), np.int64)
        at[order] = self.of[order] * self.largest + place
        rows = np.zeros(padded, np.int64)
        rows[at] = np.arange(len(group))
        same = padded == len(group) and bool((at == np.arange(padded)).all())
        self.reps = torch.from_numpy(self.first)
        self.rows, self.at = (None, None) if same else (torch.from_numpy(rows), torch.from_numpy(at))

    def products(self, q: Tensor, keys: Tensor) -> Tensor:
        """The scores of q [rows, shared heads, heads that share them, D] at the columns that groups have in common."""
        _, shared, heads, size = q.shape
        number, largest, columns = self.number, self.largest, self.shared
        q = q if self.rows is None else q[self.rows]
        q = q.reshape(number, largest, shared, heads, size).transpose(1, 2).reshape(number * shared, -1, size)
        k = keys[:, :, :columns].index_select(0, self.reps).view(-1, columns, size)
        scores = torch.bmm(q, k.transpose(1, 2)).view(number, shared, largest, heads, columns).transpose(1, 2)
        scores = scores.reshape(number * largest, shared, heads, columns)
        return scores if self.at is None else scores[self.at]


class FreeDecoding(Decoding):
    """One token of the first len(index) rows of some slots."""

    def __init__(self, slots: Slots, index: Tensor, groups: Groups | None = None):
        self.most = int(index.max()) + 1  # columns in use
        super().__init__(slots, index, self.most)
        self.groups = groups if groups is not None and groups.worth else None
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
        out = torch.embedding_bag(flat, places, begins, False, 0, False, weights.reshape(-1))[0]
        return out.view(rows, heads, 1, -1)

    def _scores(self, q: Tensor, keys: Tensor, window: int | None) -> Tensor:
        """[rows * shared heads, heads that share them, columns], -inf where a row has no key."""
        shared, groups = keys.shape[1], self.groups if window is None else None
        begin = 0 if groups is None else groups.shared
        hidden = self._hidden(window, shared)
        k = keys.view(-1, *keys.shape[2:])[: len(q), begin : self.most].transpose(1, 2)
        scores = torch.bmm(q, k) if hidden is None else torch.baddbmm(hidden[..., begin:], q, k)
        if groups is None:
            return scores
        both = q.new_empty(*q.shape[:2], self.most)
        both[..., begin:] = scores
        both[..., :begin] = groups.products(q.reshape(-1, shared, *q.shape[1:]), keys).reshape(*q.shape[:2], begin)
        return both

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
            columns = torch.arange(self.most)
            if self.groups is not None:
                common = columns < self.groups.length[:, None, None, None]
                first = torch.where(common, first[self.groups.first[self.groups.of]], first)
            places = (first + columns).to(torch.int32).expand(-1, -1, heads // shared, -1).reshape(-1)
            self._lists[heads, shared] = places, torch.arange(0, len(places), self.most, dtype=torch.int32)
        return self._lists[heads, shared]
