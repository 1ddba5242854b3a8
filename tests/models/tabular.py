"""A language model that is a table: one row of logits and one value per prefix. Gradients and optima are exact.

It has the interface of a transformer (hidden states over a layout, logits, heads). So the whole learner can be checked
against problems that are solved by hand or by dynamic programming.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from trailmark.models.attention import Layout


class _Table(nn.Module):
    def __init__(self, states: int, vocab: int):
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(states, vocab, dtype=torch.float64))


class TabularLM:
    """`prefixes` are the token sequences that have a row; all other prefixes share one last row. Hidden states are
    one-hot rows of the table, so a head is a table of values."""

    adapted, name, revision, context, pad_multiple, sharing = False, "table", "", 1 << 30, 1, "tree"
    dtype, device = torch.float64, torch.device("cpu")

    def __init__(self, prefixes: Sequence[Sequence[int]], vocab: int):
        self.row = {tuple(p): i for i, p in enumerate(prefixes)}
        self.vocab, self.width = vocab, len(self.row) + 1
        self.model, self.heads, self.tokenizer = _Table(self.width, vocab), nn.ModuleDict(), None

    def hidden(self, ids: Tensor, layout: Layout, pos: Tensor) -> Tensor:
        """One-hot [B, L, width] of the prefix that ends at each position, found by the layout's attention rule."""
        visible = layout.mask(None)[:, 0]
        out = torch.zeros(*ids.shape, self.width, dtype=self.dtype)
        for b in range(ids.shape[0]):
            for i in range(ids.shape[1]):
                prefix = tuple(ids[b][visible[b, i]].tolist())
                out[b, i, self.row.get(prefix, self.width - 1)] = 1.0
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.model.logits

    def add_head(self, name: str, outputs: int = 1, zero: bool = True) -> nn.Linear:
        head = nn.Linear(self.width, outputs, bias=False, dtype=self.dtype)
        nn.init.zeros_(head.weight)
        self.heads[name] = head
        return head

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.model.named_parameters()
        yield from ((f"heads.{n}", p) for n, p in self.heads.named_parameters())

    def train(self, mode: bool = True) -> None:
        self.model.train(mode)

    def set_policy(self, table: dict[tuple[int, ...], Sequence[float]]) -> None:
        """Set the next-token probabilities of prefixes (0 becomes a very small number)."""
        with torch.no_grad():
            for prefix, p in table.items():
                self.model.logits[self.row[prefix]] = torch.log(torch.as_tensor(p, dtype=self.dtype).clamp(min=1e-300))
