"""Evaluate: play a split with the task code, prompts and sampler of training, and report results with intervals.

`summarise` makes the same table from stored episodes, so every number of a table can be recomputed from disk. A row of
a table is a plain dict:

    {"name": …, "episodes": 300, "scored": 298, "invalid": 1, "failed": 1, "failed_as": "apart", "tasks": 300,
     "metrics": {"success": {"value": 0.71, "low": 0.66, "high": 0.76, "n": 298, "method": "wilson",
                             "failed": 1, …}, …},
     "warning": "1 of 300 episodes failed …"}

An episode that failed (a world crashed, a server went away, a prompt did not fit) has no score. By default it is
counted *apart* and left out of every average, and the row says so. If every crash is the model's own fault, count
failed episodes as *lost*: then they are no successes, and are still left out of the other averages (reward, turns,
tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trailmark import registry
from trailmark.errors import DataError, nearest, shorten
from trailmark.evaluate.votes import majority_at_k, pass_at_k, powers_of_two
from trailmark.methods.collect import play_left
from trailmark.rollout.play import Protocol, Seat, must_show, play, start_all
from trailmark.runs.collect import Collection
from trailmark.samples import scored
from trailmark.stats.intervals import mean_of, proportion
from trailmark.tasks.base import TaskSource, declared, draw_tasks
from trailmark.types import Episode, Failed, Invalid, Outcome, Scored, Task

Answer = Callable[[Episode], str | None]
FailedAs = Literal["apart", "lost"]


@dataclass(frozen=True)
class Report:
    """The results, and their episodes."""

    row: dict[str, Any]
    episodes: list[Episode]


@dataclass(frozen=True)
class Kept:
    """Where the plays of an evaluation are kept until it is done, and the share of them that may fail."""

    path: Path
    failures: float = 0.0
    what: str = "plays"
    noted: Callable[[Episode], Episode] = lambda e: e


def evaluate(
    source: TaskSource,
    seats: Sequence[Seat],
    protocol: Protocol | None = None,
    split: str = "test",
    tasks: Sequence[Task] | None = None,
    n: int | None = None,
    samples: int = 1,
    seed: int = 0,
    name: str = "",
    prefix: str = "eval:",
    answer: Answer | None = None,
    kept: Kept | None = None,
) -> Report:
    """`samples` plays of each of `n` starts of a split (or of `tasks`). `seed` gives the starts, and `seed` + 1 the
    random draws, as in the evaluations during training. So the same seed gives the same episodes. With `kept`, plays
    are stored as they finish, and those that an earlier process finished are not played again."""
    starts = draw_tasks(source, split, n, seed) if tasks is None else tasks
    if kept is None:
        must_show(source, starts, seats)
        episodes = play(source, starts, seats, protocol, n=samples, seed=seed + 1, prefix=prefix)
    else:
        each = start_all(starts, samples, seed + 1, prefix)
        held = Collection(kept.path)
        episodes = play_left(
            held, source, each, seats, protocol, None, kept.failures, "--failures", kept.noted, kept.what
        )
        if notes := held.notes_of(episodes):
            declared(source).judge_notes.extend(notes)
    return Report(summarise(episodes, name or seats[0].engine.name, answer=answer), episodes)


def summarise(
    episodes: Sequence[Episode],
    name: str = "",
    side: str | None = None,
    seat: str | None = None,
    answer: Answer | None = None,
    failed: FailedAs = "apart",
    tokenizer: Any = None,
    commands: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """One row: success, reward, cost (-reward), turns and written tokens (of `seat`, or of all seats) over the episodes
    that have a score. Invalid episodes are counted apart and are never zeros; so are failed ones, unless they count as
    `lost`. With several episodes of each start: pass@k and, if answers can be read, maj@k. With a `tokenizer`, and if
    another seat advises the actor: `followed`, the share of decisions that follow the advice. `commands` says what
    labels mean that no prompt lists."""
    check_sides(episodes, side, seat)
    good, dropped = scored(episodes, side)
    row: dict[str, Any] = {"name": name, "episodes": len(episodes), "scored": len(good), **dropped, "failed_as": failed}
    if hidden := sum(_is_hidden(e, side) for e in episodes):
        row |= {"invalid": row["invalid"] - hidden, "hidden": hidden}
    row["tasks"] = len({e.task.id for e in episodes})
    if asked := [e for e in episodes if "guessed" in e.info]:
        row["decisions"] = sum(t.action is not None for e in asked for t in e.turns)
        row["guessed"] = sum(int(e.info["guessed"]) for e in asked)
    metrics: dict[str, Any] = {}
    if won := successes(episodes, side, failed):  # there may be no other number, if every play failed and is lost
        left = {kind: row[kind] for kind in dropped if row[kind]}
        metrics["success"] = proportion([v for _, v in won], [start for start, _ in won]).plain() | left
    if good:
        starts = [e.task.id for e in good]
        reward = mean_of([_score(e, side).reward for e in good], starts)
        metrics["reward"] = reward.plain()
        low, high = reward.low, reward.high
        metrics["cost"] = {**reward.plain(), "value": 0.0 - reward.value, "low": None if high is None else 0.0 - high,
                           "high": None if low is None else 0.0 - low}  # fmt: skip
        parts = dict.fromkeys(f"reward/{name}" for e in good for name in _score(e, side).parts)
        for name in parts:
            values = [(e.task.id, v) for e in good if (v := value_of(e, name, side)) is not None]
            metrics[name] = mean_of([v for _, v in values], [start for start, _ in values]).plain()
        for length in ("turns", "tokens"):
            metrics[length] = mean_of([value_of(e, length, side, seat) or 0.0 for e in good], starts).plain()
        for more in registry.ours("metrics"):
            if values := [(e.task.id, v) for e in good if (v := value_of(e, more, side)) is not None]:
                metrics[more] = mean_of([v for _, v in values], [start for start, _ in values]).plain()
        metrics |= _tries(episodes, side, answer or read_answer, failed)
        for more in registry.ours("advice") if tokenizer is not None else ():
            if (share := registry.load("advice", more)(good, tokenizer, commands)) is not None:
                metrics[more] = share
    warned = warning(episodes, row, side)
    return {**row, "metrics": metrics, **({"warning": warned} if warned else {})}


def successes(episodes: Sequence[Episode], side: str | None, failed: FailedAs) -> list[tuple[str, float]]:
    """(start, 1 or 0) for every episode that counts. Empty if the world does not report success. If all failed, nobody
    knows whether it does; as lost they count 0."""
    won = [(e.task.id, v) for e in episodes if (v := value_of(e, "success", side, failed=failed)) is not None]
    reported = any(value_of(e, "success", side) is not None for e in episodes)
    return won if reported or all(isinstance(_outcome(e, side), Failed) for e in episodes) else []


def warning(episodes: Sequence[Episode], row: Mapping[str, Any], side: str | None = None) -> str:
    """What the reader of a row must know: how many episodes failed, why the first one failed, and how they are counted;
    how many are invalid; how many answers were not understood. Empty if all is well."""
    parts = []
    if n := row["failed"]:
        why = next(o.error for e in episodes if isinstance(o := _outcome(e, side), Failed))
        how = "counted as lost" if row["failed_as"] == "lost" else "in no average; --failed lost counts them as lost"
        parts.append(f"{n} of {row['episodes']} episodes failed ({how}); the first: {_short(why)}")
    if n := row.get("hidden"):
        parts.append(f"{n} of {row['episodes']} questions have a hidden label (played, not scored)")
    if n := row["invalid"]:
        parts.append(f"{n} of {row['episodes']} episodes are invalid (in no average)")
    if row.get("guessed"):
        parts.append(f"{row['guessed']} of {row['decisions']} answers named no action: one was drawn at random")
    return ". ".join(parts)


def _short(text: str) -> str:
    return shorten(" ".join(text.split()), 200)


def stage_rows(
    episodes: Sequence[Episode],
    name: str = "",
    side: str | None = None,
    seat: str | None = None,
    failed: FailedAs = "apart",
    tokenizer: Any = None,
    commands: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """The row of all episodes and, if their starts belong to several stages (`task.meta["stage"]`), one row per
    stage."""
    stages = list(dict.fromkeys(str(e.task.meta["stage"]) for e in episodes if "stage" in e.task.meta))
    how: dict[str, Any] = {"failed": failed, "tokenizer": tokenizer, "commands": commands}
    rows = [summarise(episodes, name, side, seat, **how)]
    for stage in stages if len(stages) > 1 else []:
        part = [e for e in episodes if e.task.meta.get("stage") == stage]
        rows.append(summarise(part, f"{name}, {stage}", side, seat, **how))
    return rows


def check_sides(episodes: Sequence[Episode], side: str | None, seat: str | None = None) -> None:
    """Raise an error for a side or a seat that does not exist: it would count as zeros."""
    for e in episodes:
        if side is not None and side not in e.outcomes:
            raise DataError(f"episode '{e.id}' has no side '{side}'.{nearest(side, e.outcomes)}")
    known = {t.seat for e in episodes for t in e.turns}
    if seat is not None and known and seat not in known:
        raise DataError(f"no episode has a seat '{seat}'.{nearest(seat, known)}")


def _outcome(e: Episode, side: str | None) -> Outcome:
    return e.outcome if side is None else e.outcomes[side]


def _is_hidden(e: Episode, side: str | None) -> bool:
    """Whether a question was played whose label is not told."""
    return isinstance(_outcome(e, side), Invalid) and e.task.data.get("label") == -1


def _score(e: Episode, side: str | None) -> Scored:
    outcome = _outcome(e, side)
    assert isinstance(outcome, Scored)
    return outcome


def value_of(
    e: Episode, metric: str, side: str | None = None, seat: str | None = None, failed: FailedAs = "apart"
) -> float | None:
    """One number of one episode. None if it has no such number (it failed, or success is not reported)."""
    outcome = _outcome(e, side)
    if not isinstance(outcome, Scored):
        lost = metric == "success" and failed == "lost" and isinstance(outcome, Failed)
        return 0.0 if lost else None
    if metric == "success":
        return None if outcome.success is None else float(outcome.success)
    if metric in ("reward", "cost"):
        return outcome.reward if metric == "reward" else 0.0 - outcome.reward
    if metric.startswith("reward/"):
        return outcome.parts.get(metric.removeprefix("reward/"))
    mine = [t for t in e.turns if seat in (None, t.seat)]
    if metric == "turns":
        return float(len(mine))
    if metric == "tokens":
        return float(sum(len(t.tokens) for t in mine))
    if metric in registry.ours("metrics"):
        return registry.load("metrics", metric)(e)
    if metric == "drawn":  # includes what a search sampled but did not keep
        searched = e.info.get("search") or {}
        return float(searched.get("tokens", sum(len(t.tokens) for t in mine)))
    raise DataError(f"episodes have no metric '{metric}'.{nearest(metric, METRICS)}")


METRICS = ("success", "reward", "cost", "turns", "tokens")  # and "drawn" and those of worlds, on request


def read_answer(episode: Episode) -> str | None:
    """The answer of an episode: `info["answer"]` if a protocol stored it, else what a world finds in the last turn
    (`PROVIDES["answers"]`): the letter of a question with options, the number of a last line `#### N`, what a maths
    response marks. The first that is no None counts."""
    if "answer" in episode.info:
        found = episode.info["answer"]
        return None if found is None or not str(found).strip() else str(found)
    answers = (registry.load("answers", name)(episode) for name in registry.ours("answers"))
    return next((answer for answer in answers if answer is not None), None) or None


def _tries(episodes: Sequence[Episode], side: str | None, answer: Answer, failed_as: FailedAs) -> dict[str, Any]:
    """pass@k and maj@k over starts with equally many tries. An invalid try counts as wrong and without an answer. A
    failed try does not count, and its start is left out, unless failures count as lost."""
    by_start: dict[str, list[tuple[str | None, bool]]] = {}
    failed: set[str] = set()
    for e in episodes:
        outcome = _outcome(e, side)
        if isinstance(outcome, Scored) and outcome.success is None:
            return {}
        if isinstance(outcome, Failed) and failed_as == "apart":
            failed.add(e.group)
            continue
        right = isinstance(outcome, Scored) and bool(outcome.success)
        by_start.setdefault(e.group, []).append((answer(e) if isinstance(outcome, Scored) else None, right))
    tries = [v for start, v in by_start.items() if start not in failed]
    sizes = {len(v) for v in tries}
    if len(sizes) != 1 or sizes == {1}:
        return {}
    found: dict[str, Any] = {}
    (n,) = sizes
    for k in powers_of_two(n):
        found[f"pass@{k}"] = mean_of([pass_at_k(n, sum(right for _, right in v), k) for v in tries]).plain()
    if any(given is not None for v in tries for given, _ in v):
        rights = [{given: right for given, right in v if given is not None} for v in tries]
        for k in powers_of_two(n):
            values = [majority_at_k([given for given, _ in v], right, k) for v, right in zip(tries, rights)]
            found[f"maj@{k}"] = mean_of(values).plain()
        if all("options" in e.task.data for e in episodes):  # the one vote of all n, as the paper counts it
            from trailmark.answers import most_common

            firsts = [right.get(most_common(given or "" for given, _ in v), False) for v, right in zip(tries, rights)]
            found[f"sc@{n}"] = proportion([float(x) for x in firsts]).plain()
    return found
