"""Advantages relative to the other plays of the same start.

Not offered: normalising the k-th turn of a play against the k-th turns of those plays of its group that have one. A
policy that chooses when to stop also chooses whom it is compared with, so the gradient is biased (verl#7244).
`leave_one_out_turns` compares with all others, of which those that have stopped earn 0 from there on: a number that
the play itself cannot change, so it is unbiased.

A play without a score (`Invalid`, `Failed`) has reward NaN, gets advantage NaN, and is left out of every mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from trailmark.credit.shapes import vectors


class _Groups:
    """For each play: the count, mean and range of its group, over scored plays."""

    def __init__(self, rewards: ArrayLike, groups: Sequence | np.ndarray):
        (self.r,) = vectors(rewards=rewards)
        names, inside = np.unique(np.asarray(groups), return_inverse=True)
        if inside.shape != self.r.shape:
            raise ValueError(f"groups has shape {inside.shape}, but rewards has {len(self.r)} entries")
        if np.isinf(self.r).any():
            raise ValueError(f"reward {int(np.isinf(self.r).argmax())} is infinite; a play without a score is NaN")
        self.inside, self.size, scored = inside, len(names), ~np.isnan(self.r)
        self.n = self.sum(scored.astype(np.float64))
        self.centred = self.r - self.sum(np.where(scored, self.r, 0.0)) / np.maximum(self.n, 1)
        high, low = np.full(self.size, -np.inf), np.full(self.size, np.inf)
        np.fmax.at(high, inside, self.r)
        np.fmin.at(low, inside, self.r)
        self.range = np.where(self.n > 0, high[inside] - low[inside], 0.0)

    def sum(self, x: np.ndarray) -> np.ndarray:
        return np.bincount(self.inside, x, minlength=self.size)[self.inside]


def group_relative(
    rewards: ArrayLike,
    groups: Sequence | np.ndarray,
    scale: Literal["std", "none"] = "std",
    eps: float = 1e-9,
    guard: float = 1e-6,
    clip: float | None = None,
) -> np.ndarray:
    """GRPO: A_i = (R_i - mean_g) / (std_g + eps) with the unbiased std (n - 1), or R_i - mean_g with scale "none".

    A group whose max - min is below `guard`, and a group of one, gives exactly 0: dividing rounding residue by `eps`
    would make advantages near 1 out of equal rewards. `clip` then bounds |A|.
    rewards: [N], groups: [N] keys -> [N]
    """
    if scale not in ("std", "none"):
        raise ValueError(f"scale must be 'std' or 'none', not {scale!r}")
    g = _Groups(rewards, groups)
    a = g.centred
    if scale == "std":
        squares = g.sum(np.nan_to_num(g.centred) ** 2)
        a = a / np.maximum(np.sqrt(squares / np.maximum(g.n - 1, 1)) + eps, np.finfo(np.float64).tiny)
    a = np.where(((g.range < guard) | (g.n < 2)) & ~np.isnan(g.r), 0.0, a)
    return a if clip is None else np.clip(a, -clip, clip)


def leave_one_out(rewards: ArrayLike, groups: Sequence | np.ndarray, guard: float = 0.0) -> np.ndarray:
    """RLOO: A_i = R_i - mean of the others in its group = n/(n-1) (R_i - mean_g).

    A group whose max - min is below `guard`, or 0, and a play alone in its group give exactly 0.
    rewards: [N], groups: [N] keys -> [N]
    """
    g = _Groups(rewards, groups)
    a = g.centred * g.n / np.maximum(g.n - 1, 1)
    return np.where(((g.range < guard) | (g.range == 0)) & ~np.isnan(g.r), 0.0, a)


def leave_one_out_turns(returns: Sequence[ArrayLike], groups: Sequence | np.ndarray) -> list[np.ndarray]:
    """The return at each turn against the others of its group at that turn: A_ik = G_ik - mean_{j != i} G_jk, where
    G_jk is 0 if play j had stopped before turn k. A play alone in its group gives exactly 0.

    With the sum over turns and tokens, divided by a constant and the number of plays (mean "constant"), the expected
    gradient is that of the expected reward, also if the policy decides when to stop.
    returns: N plays of T_i turns, groups: [N] keys -> N arrays of T_i
    """
    each = [vectors(returns=g)[0] for g in returns]
    if len(each) != len(groups):
        raise ValueError(f"{len(each)} plays, but {len(groups)} groups")
    together: dict[object, list[int]] = {}
    for i, g in enumerate(groups):
        together.setdefault(g, []).append(i)
    out = [np.zeros_like(g) for g in each]
    for members in together.values():
        if len(members) > 1:
            table = np.zeros((len(members), max(len(each[i]) for i in members)))
            for row, i in zip(table, members):
                row[: len(each[i])] = each[i]
            others = (table.sum(0) - table) / (len(members) - 1)
            for row, mean, i in zip(table, others, members):
                out[i] = (row - mean)[: len(each[i])]
    return out
