"""The winner of logits + Gumbel noise on a CPU, without most of the noise.

A token wins by a large noise or by a large logit. So all tokens are hashed, but only those whose hash is among the
largest 1 in 2^k get their noise. The best of them scores L. The noise of every other token is at most `rest`, the
noise at the smallest such hash. So another token can only win if its logit is at least L - rest, and about 2^k are.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from trailmark.models.sampling import gumbel, noise_of, small_bits

BLOCK = 1 << 16  # tokens of some rows that are hashed together: they stay in the CPU's cache
SLACK = 2.0**-20  # more than the relative rounding error of a float32 sum and of the logarithms


def winners(logits: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """`(logits + gumbel(keys, positions, all ids)).argmax(-1)` of [N, V] logits, bit for bit."""
    rows, vocab = logits.shape
    ids, height = torch.arange(vocab), max(1, BLOCK // vocab)
    words = [x.numpy().astype(np.uint32) for x in (keys, positions, ids)]
    found = []
    for first in range(0, rows, height):
        part = slice(first, first + height)
        token = _winners(logits[part].numpy(), small_bits(words[0][part], words[1][part], words[2]))
        if token is None:
            token = (logits[part] + gumbel(keys[part], positions[part], ids, logits.dtype)).argmax(-1).numpy()
        found.append(token)
    return torch.from_numpy(np.concatenate(found))


def _winners(logits: np.ndarray, bits: np.ndarray) -> np.ndarray | None:
    """The winner of each row of [N, V], or None if a row has nan, or no finite logit."""
    rows, vocab = logits.shape
    k = round(math.log2(vocab) / 2)  # as many tokens by their noise as by their logits
    least = 2**32 - (2**32 >> k)
    rest = -math.log(-math.log((least + 0.5) / 2.0**32))
    rest += SLACK * abs(rest)

    def scores(at: np.ndarray) -> np.ndarray:
        return logits.take(at) + noise_of(bits.take(at)).astype(logits.dtype, copy=False)

    top = np.arange(rows) * vocab + logits.argmax(1)
    best = scores(top)
    if not np.isfinite(best).all():
        return None
    loud = np.flatnonzero(bits >= np.uint32(least))
    at = np.concatenate([top, loud])
    score = np.concatenate([best, scores(loud)])
    np.maximum.at(best, at // vocab, score)
    needed = best - rest - SLACK * (np.abs(best) + abs(rest))
    high = np.flatnonzero(logits >= needed[:, None].astype(logits.dtype))
    more = scores(high)
    at, score = np.concatenate([at, high]), np.concatenate([score, more])
    np.maximum.at(best, high // vocab, more)
    won = at[score == best[at // vocab]]
    token = np.full(rows, vocab)
    np.minimum.at(token, won // vocab, won % vocab)  # of equal scores the first, as argmax
    return token
