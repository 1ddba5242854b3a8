"""Returns of one trajectory of T decisions (turns or steps, never tokens of observations)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from trailmark.credit.shapes import vectors


def discounted(rewards: ArrayLike, gamma: float) -> np.ndarray:
    """The reward still to come: G_t = sum_{k>=t} gamma^(k-t) r_k.

    rewards: [T] -> [T]
    """
    (r,) = vectors(rewards=rewards)
    g = np.empty_like(r)
    ahead = 0.0
    for t in range(len(r) - 1, -1, -1):
        ahead = g[t] = r[t] + gamma * ahead
    return g


def max_abs_normalise(returns: ArrayLike) -> np.ndarray:
    """EPO's weights of one trajectory: w_t = G_t / max_j |G_j|; a trajectory of zeros stays zero.

    The size of the outcome is lost: an outcome of 0.1 alone and one of 0.7 alone give the same weights.
    returns: [T] -> [T]
    """
    (g,) = vectors(returns=returns)
    top = np.abs(g).max(initial=0.0)
    return g / top if top > 0 else np.zeros_like(g)
