"""Generalised advantage estimation over decisions: tokens, steps or turns, but never tokens of observations."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from trailmark.credit.shapes import vectors


def gae(
    rewards: ArrayLike, values: ArrayLike, gamma: float, lam: float, bootstrap: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and value targets of K decisions.

        delta_k = r_k + gamma V_{k+1} - V_k,   V_K = bootstrap
        A_k     = sum_{j>=k} (gamma lam)^(j-k) delta_j
        target  = A_k + V_k

    `bootstrap` is V of the state after the last decision: 0 when the world ended, the critic's value of the state
    reached when we stopped looking (`Episode.truncated`).
    rewards: [K], values: [K] -> [K], [K]
    """
    r, v = vectors(rewards=rewards, values=values)
    a = np.empty_like(r)
    ahead, after = 0.0, float(bootstrap)
    for k in range(len(r) - 1, -1, -1):
        ahead = a[k] = r[k] + gamma * after - v[k] + gamma * lam * ahead
        after = v[k]
    return a, a + v
