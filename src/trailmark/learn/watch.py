"""Warnings during training: a run that learns nothing, or that learns from wrong numbers.

Methods that play write these metrics every step; `Watch` looks at them:

    reward_std       0 over several steps: all episodes have the same reward
    same_groups      share of groups in which all rewards are equal: their advantages are 0, and they teach nothing
    sampler_gap      mean |log-prob when sampled - log-prob under the learner| over the trained tokens. If it is large,
                     the engine has other weights than the learner, or sampled from another law (see sampler_gap_max)
    grad_norm        0 over several steps
    own_plan_gain    (VR-CLI, evaluations) by how much a row's own plan improves more than the plan of another row
    failed           episodes that could not be finished; training and averages leave them out
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from trailmark import registry
from trailmark.episodes import same_groups
from trailmark.types import Episode, Sample, Scored

PATIENCE = 5  # steps in a row before a warning
SAME = 0.9  # share of groups with equal rewards
GAP = 0.02  # mean difference in log-prob: float32 gives 1e-6 to 1e-4, bf16 up to 1e-2


def spread(episodes: Sequence[Episode]) -> dict[str, float]:
    """The variation of a step's rewards: over all episodes, and within groups of several."""
    every = [e.outcome.reward for e in episodes if isinstance(e.outcome, Scored)]
    if not every:
        return {}
    same, several = same_groups(episodes)
    # the mean of equal rewards of 0.1 is rounded, so their deviation would not be exactly 0
    out = {"reward_std": 0.0 if max(every) == min(every) else float(np.std(every))}
    return out if not several else {**out, "same_groups": same / several}


def summary(episodes: Sequence[Episode]) -> dict[str, float]:
    """Averages over episodes: reward, turns, success (if the world reports it), and the number of written tokens."""
    if not episodes:
        return {}
    outcomes = [e.outcome for e in episodes if isinstance(e.outcome, Scored)]
    wins = [o.success for o in outcomes if o.success is not None]
    out: dict[str, float] = {
        "reward": float(np.mean([o.reward for o in outcomes])),
        "turns": float(np.mean([len(e.turns) for e in episodes])),
        "written_tokens": sum(len(t.tokens) for e in episodes for t in e.turns),
    }
    out |= {f"reward/{name}": float(np.mean(values)) for name, values in reward_parts(outcomes).items()}
    return {**out, "success": float(np.mean(wins))} if wins else out


def reward_parts(outcomes: Sequence[Scored]) -> dict[str, list[float]]:
    """The values of each named reward or metric, over the outcomes that have it."""
    found: dict[str, list[float]] = {}
    for outcome in outcomes:
        for name, value in outcome.parts.items():
            found.setdefault(name, []).append(value)
    return found


def sampler_gap(drawn: Sequence[Sample], scored: Sequence[Sample]) -> dict[str, float]:
    """The difference between the learner's log-probs (`scored`) and those at sampling, over the trained tokens."""
    gaps = [
        np.abs(a.streams["old"] - b.streams["old"])[(a.streams["weight"] != 0) & np.isfinite(a.streams["old"])]
        for a, b in zip(drawn, scored)
    ]
    each = np.concatenate(gaps) if gaps else np.zeros(0)
    return {"sampler_gap": float(each.mean()), "sampler_gap_max": float(each.max())} if len(each) else {}


class Watch:
    """Looks at the metrics of each step. It warns once, when a problem has lasted `PATIENCE` steps, and again only
    after the problem has gone."""

    def __init__(self) -> None:
        self._since: dict[str, int] = {}

    def look(self, metrics: Mapping[str, float]) -> list[str]:
        found = {}
        same = metrics.get("reward_std") == 0
        if metrics.get("failed", 0) > 0:
            found["failed"] = (
                PATIENCE,
                f"episodes have failed in each of the last {PATIENCE} steps ({metrics['failed']:g} in this one). "
                "Training and averages leave them out. The episodes hold the reasons (see trailmark report, inspect).",
            )
        solved = metrics.get("success", 0.0) == 1 and metrics.get("failed", 0) == 0
        if same:
            found["reward"] = (
                PATIENCE,
                f"every episode of the last {PATIENCE} steps earned the reward {metrics.get('reward', 0.0):g}: there "
                "is nothing to learn from. "
                + ("All were successes, so the task is solved: stop, or choose harder starts." if solved else
                   "Look at the task's reward, at a few episodes (trailmark inspect), or start from another model."),
            )
        if metrics.get("same_groups", 0.0) >= SAME:
            found["groups"] = (
                PATIENCE,
                f"in {metrics['same_groups']:.0%} of the groups all episodes have had the same reward for {PATIENCE} "
                "steps: they teach nothing. Raise n, or choose starts that are neither solved nor out of reach.",
            )
        gap = max(metrics.get("sampler_gap", 0.0), metrics.get("rl/sampler_gap", 0.0))
        if gap > GAP:
            found["gap"] = (
                1,
                f"tokens were drawn with log-probs that differ from the learner's by {gap:.2g} on average: the "
                "ratio does not start at 1. Is the engine's dtype too coarse, or another model behind it?",
            )
        for name in registry.ours("warnings"):
            if f"eval/{name}" not in metrics:  # said again only if an evaluation in between was well
                found |= {name: (0, "")} if name in self._since else {}
            elif said := registry.load("warnings", name)({k.removeprefix("eval/"): v for k, v in metrics.items()}):
                found[name] = 1, f"{said}."
        for name, value in metrics.items():
            if name.split("/")[-1] == "grad_norm" and value == 0:
                found[name] = PATIENCE, f"{name} has been 0 for {PATIENCE} steps: the weights do not change."
        self._since = {key: self._since.get(key, 0) + 1 for key in found}
        told = [key for key, (patience, _) in found.items() if self._since[key] == patience]
        return [found[key][1] for key in told if not (key == "groups" and "reward" in told)]
