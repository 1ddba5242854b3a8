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


def gae_on_clock(
    reward_stream: ArrayLike,
    value_stream: ArrayLike,
    clock_id: ArrayLike,
    gamma: float,
    lam: float,
    bootstrap: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """`gae` on token streams. `clock_id[t]` is the decision that token t belongs to, and time advances once per
    decision.

    For a clock of tokens, give every written token its own id. For slower clocks, give one id per step or per turn.
    Tokens that were not written have id -1: they are no time steps, decay nothing and get 0. The rewards of one
    decision are added. Its value is that of its first token (the state in which the decision began). Its advantage and
    target go to all its tokens. Train a critic at the first token of a decision.
    reward_stream, value_stream, clock_id: [T] -> [T], [T]
    """
    r, v, ids = vectors(reward_stream=reward_stream, value_stream=value_stream, clock_id=clock_id)
    written = ids != -1
    if (ids[written] < 0).any() or (np.diff(ids[written]) < 0).any():
        raise ValueError("clock_id must be -1 on tokens not written and never go down on the others")
    lost = ~written & (r != 0)
    if lost.any():
        where = f"the reward {r[lost][0]:g} at token {int(lost.argmax())}"
        raise ValueError(
            f"{where} is on a token that was not written; put it on a token of the decision that earned it"
        )
    _, first, tick = np.unique(ids[written], return_index=True, return_inverse=True)
    a, target = gae(np.bincount(tick, r[written], minlength=len(first)), v[written][first], gamma, lam, bootstrap)
    out_a, out_target = np.zeros_like(r), np.zeros_like(r)
    out_a[written], out_target[written] = a[tick], target[tick]
    return out_a, out_target
