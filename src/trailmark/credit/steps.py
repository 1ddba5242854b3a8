"""Rewards at the ends of reasoning steps: what each step earns, and how the steps of a group are compared.

scores of the steps     0.9   0.5   0.8      what a process reward model says
running "product"       0.9   0.45  0.36     or "sum", "min"; "none" leaves each step its own
times alpha 0.5         0.45  0.225 0.18
outcome 1               0.45  0.225 1        what the whole is worth takes the place of the last one
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from trailmark.credit.shapes import mask_like, vectors

Running = Literal["none", "sum", "min", "product"]
_RUNNING = {"sum": np.cumsum, "min": np.minimum.accumulate, "product": np.cumprod}


def step_rewards(
    scores: ArrayLike,
    running: Running = "none",
    alpha: float = 1.0,
    outcome: float | None = None,
    clip: float | None = None,
) -> np.ndarray:
    """What each step earns: the running aggregate of the scores, times `alpha`; `outcome` then replaces the last one;
    `clip` bounds them all.

    scores: [K] -> [K]
    """
    (s,) = vectors(scores=scores)
    if running != "none" and running not in _RUNNING:
        raise ValueError(f"running must be none, sum, min or product, not {running!r}")
    out = alpha * (_RUNNING[running](s) if running != "none" and len(s) else s)
    if outcome is not None and len(out):
        out[-1] = outcome
    return out if clip is None else np.clip(out, -clip, clip)


def group_steps(
    rewards: Sequence[ArrayLike], groups: Sequence[str], eps: float = 1e-9, guard: float = 1e-6
) -> list[np.ndarray]:
    """The steps of plays of one start against each other: (r - mean) / (std + eps) over all steps of all plays of a
    group, std with n - 1. A group whose steps are all worth the same (within `guard`), or that has one step, gives 0.

    rewards: N plays of K_i steps, groups: [N] -> N arrays of K_i
    """
    each = [vectors(rewards=r)[0] for r in rewards]
    if len(each) != len(groups):
        raise ValueError(f"{len(each)} plays, but {len(groups)} groups")
    together: dict[str, list[np.ndarray]] = {}
    for r, g in zip(each, groups):
        together.setdefault(g, []).append(r)
    known = {g: np.concatenate(rs) for g, rs in together.items()}
    out = []
    for r, g in zip(each, groups):
        steps = known[g]
        if len(steps) < 2 or np.ptp(steps) < guard:
            out.append(np.zeros_like(r))
        else:
            out.append((r - steps.mean()) / (steps.std(ddof=1) + eps))
    return out


def against_greedy(
    reward: float, greedy: float, logp: ArrayLike, ref: ArrayLike, written: ArrayLike, gamma: float, coef: float
) -> np.ndarray:
    """ReMax: the credit of a written token is gamma^(tokens still to come) (reward - greedy) - coef (logp - ref), where
    `greedy` is what the policy earns when it always takes the likeliest token. 0 on other tokens.

    logp, ref: [T], written: [T] bool -> [T]
    """
    p, q = vectors(logp=logp, ref=ref)
    w = mask_like("written", written, len(p))
    ahead = np.zeros(len(p))
    ahead[w] = np.arange(w.sum())[::-1]
    return np.where(w, gamma**ahead * (reward - greedy) - coef * (np.where(w, p, 0.0) - np.where(w, q, 0.0)), 0.0)
