"""Turns that somebody marked as decisive, and an outcome: what each turn earns, and its weight in a loss.

marked turn 1, outcome .7      0      1      .7       `marked_rewards`
returns, gamma .99             1.676  1.693  .7       `discounted`
divided by the largest         .99    1      .4135    `turn_weights`, kind "trajectory"
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from .groups import leave_one_out_turns
from .returns import max_abs_normalise
from .shapes import vectors

Normaliser = Literal["trajectory", "dataset", "group", "baseline", "turns"]


def marked_rewards(
    turns: int, marked: Collection[int], outcome: float, add: bool = False, first: bool = False
) -> np.ndarray:
    """What each turn earns: r_t = 1 if it is marked; else the outcome, if it is the last one; else 0. With `add` the
    last turn earns the outcome besides its mark. With `first` the first turn earns 1, if it is not marked and not the
    last.

    marked: numbers of turns, from 0 -> [turns]
    """
    if turns < 1:
        raise ValueError("a trajectory without turns earns nothing")
    if not np.isfinite(outcome):
        raise ValueError(f"the outcome is {outcome}: it must be a finite number")
    if wrong := sorted(set(marked) - set(range(turns))):
        raise ValueError(f"turn {wrong[0]} is marked, and the turns are 0 to {turns - 1}")
    r = np.zeros(turns)
    if first:
        r[0] = 1.0
    r[-1] = outcome
    if marked:
        r[list(marked)] = 1.0
    if add and turns - 1 in marked:
        r[-1] = 1.0 + outcome
    return r


def turn_weights(
    returns: Sequence[ArrayLike], kind: Normaliser, groups: Sequence[str] = (), baseline: float | None = None
) -> list[np.ndarray]:
    """The weight of each turn, from the returns of all trajectories:

        trajectory  G_t / max_j |G_j|; a trajectory of zeros stays zero, and the size of an outcome is lost
        dataset     G_t / the largest |G_j| of all trajectories
        group       G_t - the mean of G_1 over the other trajectories of its group
        baseline    G_t - a given number; none: the mean of G_1 over all other trajectories
        turns       G_t - the mean of the others of its group at that turn (`leave_one_out_turns`)

    returns: N trajectories of T_i turns, groups: [N] -> N arrays of T_i
    """
    each = [vectors(returns=g)[0] for g in returns]
    if (empty := next((i for i, g in enumerate(each) if not len(g)), None)) is not None:
        raise ValueError(f"trajectory {empty} has no turn")
    if kind == "trajectory":
        return [max_abs_normalise(g) for g in each]
    if kind == "dataset":
        top = largest(each)
        return [g / top if top > 0 else np.zeros_like(g) for g in each]
    if kind == "baseline" and baseline is not None:
        return [g - baseline for g in each]
    of = ["all"] * len(each) if kind == "baseline" else list(groups)
    if len(of) != len(each):
        raise ValueError(f"{len(each)} trajectories, but {len(of)} groups")
    if (alone := next((g for g, n in Counter(of).items() if n < 2), None)) is not None:
        raise ValueError(
            f"group {alone!r} has one trajectory, so there is no other to compare it with: collect two or more of "
            "each start, or normalise by trajectory or dataset"
        )
    if kind == "turns":
        return leave_one_out_turns(each, of)
    total, size = dict.fromkeys(of, 0.0), Counter(of)
    for g, name in zip(each, of):
        total[name] += g[0]
    return [g - (total[name] - g[0]) / (size[name] - 1) for g, name in zip(each, of)]


def largest(returns: Sequence[ArrayLike]) -> float:
    """The largest |G_t| of all trajectories, by which `dataset` divides."""
    return max((float(np.abs(np.asarray(g)).max(initial=0.0)) for g in returns), default=0.0)
