"""Texts as vectors, and texts that say the same: the mean of a language model's last hidden states, of length 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from trailmark.models.lm import LM


def text_vectors(lm: LM, texts: Sequence[str]) -> np.ndarray:
    """[texts, width]: the mean over the tokens of each text. An empty text is a vector of zeros."""
    import numpy as np
    import torch

    from trailmark.models.attention import Layout
    from trailmark.texts import encode

    out = np.zeros((len(texts), lm.width))
    lm.train(False)
    for i, text in enumerate(texts):
        if tokens := encode(lm.tokenizer, text)[: lm.context]:
            ids: Any = torch.tensor([tokens], device=lm.device)
            pos = torch.arange(len(tokens), device=lm.device)[None]
            with torch.no_grad():
                states = lm.hidden(ids, Layout(torch.full_like(ids, len(tokens)), pos), pos)
            mean = states[0].double().mean(0).cpu().numpy()
            out[i] = mean / max(float(np.linalg.norm(mean)), 1e-12)
    return out


def same_groups(vectors: np.ndarray, least: float) -> list[int]:
    """A number for each vector: those whose cosine is `least` or more have the same, and so have those between which
    such vectors lead."""
    parent = list(range(len(vectors)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    near = vectors @ vectors.T >= least
    for i in range(len(vectors)):
        for j in range(i):
            if near[i, j]:
                parent[max(root(i), root(j))] = min(root(i), root(j))
    return [root(i) for i in range(len(vectors))]
