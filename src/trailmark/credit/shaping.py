"""Rewards on tokens: where step values go, the KL penalty, whitening."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from trailmark.credit.shapes import mask_like, vectors


def place(values: ArrayLike, spans: Sequence[tuple[int, int]], length: int) -> np.ndarray:
    """Step values on tokens: out[end_k - 1] = values[k] for the k-th span [start_k, end_k), 0 elsewhere.

    values: [K], spans: K pairs in order -> [length]
    """
    (x,) = vectors(values=values)
    if len(spans) != len(x):
        raise ValueError(f"{len(x)} values for {len(spans)} spans")
    out = np.zeros(length)
    before = 0
    for value, (start, end) in zip(x, spans):
        if not before <= start < end <= length:
            raise ValueError(f"span [{start}, {end}) is empty, overlaps the one before it, or leaves [0, {length})")
        out[end - 1] = value
        before = end
    return out


def kl_shaped(reward: ArrayLike, logp: ArrayLike, ref: ArrayLike, written: ArrayLike, coef: float) -> np.ndarray:
    """A KL penalty in the reward: r_t = reward_t - coef (logp_t - ref_t) on written tokens, 0 elsewhere.

    Log-probs are those of the policy that wrote the tokens, so the penalty is part of the reward and has no gradient.
    The values of logp and ref on other tokens are ignored (NaN at token 0 is fine).
    reward, logp, ref: [T], written: [T] bool -> [T]
    """
    r, p, q = vectors(reward=reward, logp=logp, ref=ref)
    w = mask_like("written", written, len(r))
    lost = ~w & (r != 0)
    if lost.any():
        raise ValueError(f"the reward {r[lost][0]:g} at token {int(lost.argmax())} is on a token that was not written")
    return np.where(w, r - coef * (p - q), 0.0)


def whiten(x: ArrayLike, mask: ArrayLike, guard: float = 1e-6) -> np.ndarray:
    """Mean 0 and standard deviation 1 over the mask: (x - mean) / std with std over n; 0 outside the mask.

    Pass the whole batch at once: if each micro-batch is whitened by itself, the gradient depends on the split. If the
    range of the values is below `guard`, they become exactly 0.
    x: [T], mask: [T] bool -> [T]
    """
    (v,) = vectors(x=x)
    m = mask_like("mask", mask, len(v))
    inside = v[m]
    out = np.zeros_like(v)
    if len(inside) and not np.ptp(inside) < guard:
        out[m] = (inside - inside.mean()) / inside.std()
    return out
