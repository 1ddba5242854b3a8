"""Find what a person should look at first: a list of {level, text}. `warn`: a result may be wrong or training may be
stuck. `info`: worth knowing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any

from trailmark import registry
from trailmark.episodes import same_groups
from trailmark.types import Episode

Points = list[list[float]]
FAR = 0.2  # a success in training that is so much above that of the evaluation is a concern
LIMITS = ("thought", "collect.sampling.max_tokens", "sampling.max_tokens")  # keys of a recipe that limit a turn


def concerns(
    curves: Sequence[Mapping[str, Any]],
    episodes: Sequence[Episode],
    recipe: Mapping[str, Any],
    state: str,
    last: int,
    broken: Mapping[str, int],
) -> list[dict[str, str]]:
    train: dict[str, Points] = {c["name"]: c["train"] for c in curves}
    evals: dict[str, Points] = {c["name"]: c["eval"] for c in curves}
    found = [*_end(state, last, recipe.get("steps")), *_dropped(train), *_dropped(evals, "evaluation ")]
    found += [*_of_methods(evals), *_held_out(train, evals), *_flat(train), *_spikes(train), *_entropy(train)]
    found += _plays(episodes, recipe)
    for file, n in broken.items():
        found.append(_info(f"{file}: {n} unfinished or unreadable {_s(n, 'line')} left out."))
    return found


def _warn(text: str) -> dict[str, str]:
    return {"level": "warn", "text": text}


def _info(text: str) -> dict[str, str]:
    return {"level": "info", "text": text}


def _s(n: float, word: str) -> str:
    return word if n == 1 else word + "s"


def _end(state: str, last: int, steps: Any) -> list[dict[str, str]]:
    of = f" of {steps}" if steps else ""
    if state == "running":
        return [_info(f"The run is still going: step {last}{of}.")]
    if state == "early":
        return [_info(f"The run stopped early at step {last}{of}: the evaluation got no better.")]
    if state == "stopped":
        return [_warn(f"The run ended at step {last}{of}, and no process works on it: continue it with --resume.")]
    return []


def _dropped(points: Mapping[str, Points], where: str = "") -> list[dict[str, str]]:
    out = []
    for name, what in (
        ("failed", "failed (a crash of a world, an engine or a judge)"),
        ("invalid", "without a valid result"),
    ):
        bad = [(int(s), v) for s, v in points.get(name, []) if v > 0]
        if bad:
            total = sum(v for _, v in bad)
            steps = f"{len(bad)} {_s(len(bad), 'step')}, the first {bad[0][0]}"
            text = f"{total:g} {where}{_s(total, 'episode')} {what}, in no average: {steps}."
            out.append(_warn(text))
    return out


def _of_methods(evals: Mapping[str, Points]) -> list[dict[str, str]]:
    """What methods warn of in the numbers of the last evaluation."""
    last, found = {name: points[-1] for name, points in evals.items() if points}, []
    for name in registry.ours("warnings"):
        if name in last:
            step = last[name][0]
            warning = registry.load("warnings", name)({n: value for n, (at, value) in last.items() if at == step})
            found += [_warn(f"Step {step:g}: {warning}.")] if warning else []
    return found


def _held_out(train: Mapping[str, Points], evals: Mapping[str, Points]) -> list[dict[str, str]]:
    """Training and evaluation may differ a little: other starts, another temperature."""
    at, b = (evals.get("success") or [[-1, 0.0]])[-1]
    seen = [v for step, v in train.get("success", []) if step <= at]
    if not seen or (a := fmean(seen[-max(1, len(seen) // 5) :])) - b <= FAR:
        return []
    text = f"Success is {a:.1%} over the last training steps and {b:.1%} in the last evaluation: what was learnt does "
    return [_warn(text + "not hold on other starts, or evaluations draw in another way (eval.split, sampling).")]


def _flat(train: Mapping[str, Points]) -> list[dict[str, str]]:
    values = [v for _, v in train.get("success", [])]
    k = len(values) // 5
    if k < 4:
        return []
    first, last = values[:k], values[-k:]
    noise = 2 * ((stdev(first) ** 2 + stdev(last) ** 2) / k) ** 0.5
    a, b = fmean(first), fmean(last)
    if b >= 0.95 or b - a > noise:
        return []
    how = "has fallen" if a - b > noise else "has not moved"
    return [_warn(f"Success {how}: {a:.1%} over the first {k} steps, {b:.1%} over the last {k}.")]


def _spikes(train: Mapping[str, Points]) -> list[dict[str, str]]:
    """A value ten times the median of the fifty before it. Tiny KLs are ignored."""
    out = []
    for name, points in train.items():
        last = name.split("/")[-1]
        kl = last == "kl" or last.startswith("kl_")
        if not kl and not last.startswith("grad_norm"):
            continue
        values, floor = [abs(v) for _, v in points], 0.05 if kl else 0.0
        hits = [
            i for i in range(10, len(values)) if values[i] > max(10 * median(values[max(0, i - 50) : i]), floor) > 0
        ]
        if hits:
            worst = max(hits, key=lambda i: values[i])
            before = median(values[max(0, worst - 50) : worst])
            text = (
                f"{name} spikes in {len(hits)} {_s(len(hits), 'step')}: {values[worst]:.3g} at step "
                f"{int(points[worst][0])}, against a median of {before:.3g} before."
            )
            out.append(_warn(text))
    return out


def _entropy(train: Mapping[str, Points]) -> list[dict[str, str]]:
    values = [v for _, v in train.get("entropy", [])]
    if len(values) < 10 or values[0] <= 0 or fmean(values[-3:]) >= 0.05 * values[0]:
        return []
    return [_warn(f"Entropy has collapsed from {values[0]:.3g} to {values[-1]:.3g}: the policy no longer explores.")]


def _plays(episodes: Sequence[Episode], recipe: Mapping[str, Any]) -> list[dict[str, str]]:
    """Concerns about the episodes on this page."""
    out = []
    free = [t for e in episodes for t in e.turns if t.tokens and t.law.allowed is None and t.stop]
    cut = sum(t.cut_off for t in free)
    if free and cut > 0.1 * len(free):
        share, key = cut / len(free), _limit(recipe)
        out.append(_warn(f"{share:.0%} of the turns were cut off at their length limit: raise the recipe's '{key}'?"))
    truncated = sum(e.truncated for e in episodes)
    if episodes and truncated > 0.5 * len(episodes):
        out.append(
            _info(f"{truncated / len(episodes):.0%} of the episodes ended at the limit of turns, not by the world.")
        )
    same, several = same_groups(episodes)
    if recipe.get("credit") in ("group", "leave_one_out") and several and same > 0.8 * several:
        text = f"In {same} of {several} groups on this page all episodes earned the same reward: they teach nothing."
        out.append(_warn(text))
    return out


def _limit(recipe: Mapping[str, Any]) -> str:
    """The key that limits the length of a training turn: the first of LIMITS that the recipe has. In rounds of OREO
    `sampling` belongs to evaluations, so `collect.sampling` comes first."""
    return next((key for key in LIMITS if _has(recipe, key)), "max_tokens")


def _has(value: Any, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return False
        value = value[part]
    return True
