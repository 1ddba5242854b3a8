"""Whole episodes by search: search every decision (beam, actions), or choose the best of several plays (best_of)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from trailmark.episodes import by_group
from trailmark.rollout.play import Seat, play, stop_ids
from trailmark.rollout.search import Plan, Searcher, Text, answer_ends
from trailmark.run_async import wait
from trailmark.score.values import LogProb, Scorer
from trailmark.steps import LINES
from trailmark.tasks.base import TaskSource
from trailmark.types import Episode, Failed, Invalid, Scored, Task


def search_episodes(
    source: TaskSource,
    seat: Seat,
    plan: Plan,
    scorer: Scorer,
    tasks: Sequence[Task],
    seed: int = 0,
    prefix: str = "eval:",
    failures: float = 1.0,
) -> tuple[list[Episode], list[Episode], int]:
    """Returns the chosen episodes, the plain ones that they were chosen from (best_of), and the number of all sampled
    tokens. Servers may fail to answer in at most a share `failures` of all."""
    how: dict[str, Any] = {"seed": seed, "prefix": prefix, "failures": failures}
    if plan.kind == "best_of":
        plain = play(source, tasks, [seat], n=plan.width, **how)
        return best_by_value(plain, scorer, seat, plan.step_ends), plain, sum(map(written, plain))
    searcher = Searcher(seat.engine, scorer, plan, keep=True)
    played = play(source, tasks, [dataclasses.replace(seat, engine=searcher)], **how)
    return [noted(e, searcher) for e in played], [], sum(f.tokens for f in searcher.found.values())


def written(e: Episode) -> int:
    return sum(len(t.tokens) for t in e.turns)


def best_by_value(
    episodes: Sequence[Episode], scorer: Scorer, seat: Seat, step_ends: Sequence[str] = LINES
) -> list[Episode]:
    """One episode of each group: the first with the highest value at its last state, or over its steps, as the scorer
    reads it. Failed episodes are only chosen if all failed. An invalid one may be chosen, because only the value is
    known when it is chosen."""
    groups = by_group(episodes)
    can = {g: [e for e in es if e.turns and not isinstance(e.outcome, Failed)] for g, es in groups.items()}
    rows = [(g, e) for g, es in can.items() if len(groups[g]) > 1 for e in es]
    lines = [last_state(e, seat, step_ends, scorer) for _, e in rows]
    values = wait(scorer.score(lines)) if lines else []
    best: dict[str, tuple[float, Episode]] = {}
    for (g, e), v in zip(rows, values):
        if g not in best or v > best[g][0]:
            best[g] = (v, e)
    out = []
    for g, es in groups.items():
        value, e = best.get(g, (None, es[0]))
        found = {"score": value, "of": len(es), "tokens": sum(map(written, es))}
        out.append(dataclasses.replace(e, info={**e.info, "search": found}) if value is not None else e)
    return out


def last_state(e: Episode, seat: Seat, step_ends: Sequence[str] = LINES, scorer: Scorer | None = None) -> Any:
    """The last text that the seat wrote, with everything before it, and where its steps end for a scorer."""
    turn = max(i for i, t in enumerate(e.turns) if t.seat == seat.name)
    t = e.turns[turn]
    stops = stop_ids(seat.engine.tokenizer, chat=True)
    prompt, ends = e.context(turn) + t.forced, tuple(end for _, end in t.steps)
    if not ends:
        ends = answer_ends(scorer or LogProb(), seat.engine.tokenizer, prompt, t.tokens, t.text, step_ends)
    return Text(t.tokens, t.logp, t.logq, ends, t.stop).line(prompt, stops)


def noted(e: Episode, searcher: Searcher) -> Episode:
    """The episode with its searches in `info`. If the last decision finished nothing, the answer is wrong, whatever the
    world makes of an empty one."""
    decisions = [searcher.found.get(f"{e.id}\0{i}") for i in range(len(e.turns))]
    known = [d for d in decisions if d is not None]
    if not known:
        return e
    empty = known[-1].best is None
    info: dict[str, Any] = {"tokens": sum(d.tokens for d in known), "empty": sum(d.best is None for d in known)}
    if searcher.plan.tree:
        info["decisions"] = [d.plain() for d in known]
    outcomes = dict(e.outcomes)
    if empty:
        outcomes = {s: Scored(0.0, False) if isinstance(o, Scored | Invalid) else o for s, o in outcomes.items()}
    return dataclasses.replace(e, outcomes=outcomes, info={**e.info, "search": info})
