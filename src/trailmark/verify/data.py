"""Checks across episodes: groups share a start, and rewards can teach something."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from trailmark.episodes import by_group, same_groups
from trailmark.types import Episode, Failed, Invalid, Scored
from trailmark.verify.evidence import Evidence, Missing
from trailmark.verify.report import Check, Findings

SATURATED = 0.99  # share of the last episodes with the best reward
LONG = 0.5  # a rank correlation with length that is reported


def check_groups(ev: Evidence) -> Check:
    """Members of a group play the same task and are shown the same first prompt."""
    found = Findings("groups")
    groups = by_group(ev.episodes)
    ids: dict[str, int] = {}
    for e in ev.episodes:
        ids[e.id] = ids.get(e.id, 0) + 1
    for name, n in ids.items():
        if n > 1:
            found.defect("two episodes have the same id", f"'{name}'")
    per_task = getattr(ev.config, "n", None)
    for name, members in groups.items():
        first = members[0]
        where = f"group '{name}'"
        if any(m.task.id != first.task.id for m in members):
            found.defect("wrong group: members play different tasks", where)
        elif any(m.task != first.task for m in members):
            found.defect("wrong group: members have the same task id but different starts", where)
        opened = [_opening(m) for m in members if m.turns]
        if any(o != opened[0] for o in opened[1:]):
            found.defect("wrong group: members were shown different first prompts", where)
        if any(m.parent != first.parent for m in members):
            found.defect("wrong group: members branched from different places", where)
        if isinstance(per_task, int) and len(members) % per_task and first.parent is None:
            found.defect(f"wrong group: its size is not a multiple of n={per_task}", f"{where} has {len(members)}")
    sizes = [len(m) for m in groups.values()]
    found.numbers = {"episodes": sum(sizes), "groups": len(groups), "smallest": min(sizes), "largest": max(sizes)}
    return found.result(f"{len(groups)} groups of {min(sizes)} to {max(sizes)}: one task and one first prompt each")


def _opening(e: Episode) -> Any:
    return e.turns[0].seat, e.turns[0].prompt


def check_rewards(ev: Evidence) -> Check:
    """Rewards are finite, vary, do not follow from length, and are sums of turn rewards where they should be."""
    found = Findings("rewards")
    episodes = ev.episodes
    good: list[tuple[Episode, float]] = []
    kinds = {"scored": 0, "invalid": 0, "failed": 0}
    for e in episodes:
        for side, outcome in e.outcomes.items():
            kinds[
                "failed" if isinstance(outcome, Failed) else "invalid" if isinstance(outcome, Invalid) else "scored"
            ] += 1
            if isinstance(outcome, Scored) and not math.isfinite(outcome.reward):
                found.defect("a reward is not finite", f"episode '{e.id}', side '{side}'")
        if isinstance(e.outcome, Scored) and math.isfinite(e.outcome.reward):
            good.append((e, e.outcome.reward))
        if any(not math.isfinite(t.reward) for t in e.turns):
            found.defect("the reward of a turn is not finite", f"episode '{e.id}'")
    found.numbers = {"episodes": len(episodes), **kinds}
    lost = 1 - kinds["scored"] / max(1, sum(kinds.values()))
    if lost > 0.5:
        found.defect(f"{lost:.0%} of the plays are invalid or failed")
    elif lost > 0:
        found.notes.append(f"{lost:.1%} of the plays are invalid or failed")
    if not good:
        return found.result("no play was scored")
    rewards = np.array([r for _, r in good])
    found.numbers |= {"mean": float(rewards.mean()), "least": float(rewards.min()), "most": float(rewards.max())}
    if len(good) > 1 and rewards.max() - rewards.min() < 1e-9:
        found.notes.append(
            f"the reward is constant: all {len(good)} plays got {rewards[0]:g}, so there is nothing to learn from"
        )
    last = rewards[-max(1, len(rewards) // 4) :]
    found.numbers["at_most_lately"] = float((last >= rewards.max() - 1e-9).mean())
    if found.numbers["at_most_lately"] >= SATURATED and np.ptp(rewards) > 0:
        found.notes.append("the reward is saturated: lately nearly all plays get the largest reward")
    same, several = same_groups(e for e, _ in good)
    found.numbers["equal_groups"] = same / several if several else 0.0
    _length(found, good, rewards)
    _sums(ev, found, good)
    return found.result(f"{len(good)} scored plays, rewards {rewards.min():g} to {rewards.max():g}")


def _length(found: Findings, good: list[tuple[Episode, float]], rewards: np.ndarray) -> None:
    lengths = np.array([sum(len(t.tokens) for t in e.turns) for e, _ in good], float)
    if len(good) < 10 or np.ptp(lengths) == 0 or np.ptp(rewards) == 0:
        return
    r, low, high = rank_correlation(lengths, rewards)
    found.numbers["length_correlation"] = [r, low, high]
    if low > LONG or high < -LONG:
        found.notes.append(
            f"the reward correlates with length: rank correlation {r:+.2f} [{low:+.2f}, {high:+.2f}]; is that intended?"
        )


def _sums(ev: Evidence, found: Findings, good: list[tuple[Episode, float]]) -> None:
    """A task's `additive` says whether an outcome is the sum of its rewards. Without it, nine plays in ten decide."""
    try:
        says = ev.source.additive
    except Missing:
        says = None
    off = [(e, r, sum(t.reward for t in e.turns)) for e, r in good]
    odd = [(e, r, s) for e, r, s in off if abs(r - s) > 1e-6 * max(1.0, abs(r))]
    found.numbers["sum_of_turns"] = 1 - len(odd) / len(good)
    if says or (says is None and len(good) >= 10 and len(odd) <= 0.1 * len(good)):
        for e, r, s in odd:
            found.defect(
                "a reward is not the sum of its turns' rewards (edited?)", f"episode '{e.id}': {r:g}, turns {s:g}"
            )


def rank_correlation(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """Spearman's rho with a 95 % interval (Fisher's z, with the variance (1 + rho^2 / 2) / (n - 3) of Bonett and
    Wright)."""
    a, b = _ranks(x), _ranks(y)
    rho = float(np.corrcoef(a, b)[0, 1])
    z, half = math.atanh(min(max(rho, -0.9999999), 0.9999999)), 1.96 * math.sqrt((1 + rho**2 / 2) / max(len(x) - 3, 1))
    return rho, math.tanh(z - half), math.tanh(z + half)


def _ranks(x: np.ndarray) -> np.ndarray:
    """Ranks from 0; ties share their mean."""
    _, inside, count = np.unique(x, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count + 1) / 2)[inside]
