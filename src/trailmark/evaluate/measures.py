"""The measures of a study's runs, read only from their files, at the point where a run had spent the study's budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from trailmark.config import Config
from trailmark.errors import DataError, RunError, nearest
from trailmark.evaluate.claims import Claim, RunMeasure, arm_interval, difference, holm, p_value, verdict
from trailmark.evaluate.run import FailedAs
from trailmark.evaluate.stored_episodes import by_start
from trailmark.plain_files import read_json
from trailmark.runs.annotations import named_episodes
from trailmark.runs.store import read_metrics, read_recipe, read_segment, segments
from trailmark.samples import scored

if TYPE_CHECKING:
    from trailmark.evaluate.study import Spec


class Budget(Config):
    """What every arm may spend; exactly one of these keys. Steps are set in every recipe. The others cut: a run is read
    at the last step at which it had spent no more. A run that never reaches the budget is refused."""

    steps: PositiveInt | None = Field(None, description="steps, as the method counts them")
    updates: PositiveInt | None = Field(None, description="optimiser updates: steps x passes x minibatches")
    tokens: PositiveInt | None = Field(None, description="tokens written in training episodes")
    seconds: PositiveFloat | None = Field(None, description="time of the steps, which differs between machines")

    @model_validator(mode="after")
    def _one(self) -> Budget:
        if sum(v is not None for v in self.model_dump().values()) != 1:
            raise ValueError("a budget is one of steps, updates, tokens or seconds")
        return self

    def keys(self, extra: int = 0) -> dict[str, int]:
        return {} if self.steps is None else {"steps": self.steps + extra}


class Measure(Config):
    """One number of a run: of metrics.jsonl, of a file of episodes, or of results.json."""

    metric: str = Field(
        "success", description="a key of metrics.jsonl; of episodes: success, reward, cost, turns, tokens, drawn, sound"
    )
    last: PositiveInt = Field(1, description="mean of this many last values (of metrics.jsonl)")
    episodes: str | None = Field(
        None, description="file in the run, unless the arm names its own; 'evaluation': the last one during training"
    )
    stage: str | None = Field(None, description="only the starts of this stage (of episodes)")
    results: bool = Field(False, description="read results.json: rows with arm, metric and value")
    failed: FailedAs = Field("apart", description="a failed episode is in no average (apart), or no success (lost)")
    side: str | None = Field(None, description="whose outcome counts")
    seat: str | None = Field(None, description="the seat whose turns and tokens count")


def spent(run: Path, budget: Budget) -> list[tuple[int, float]]:
    """(step, amount spent up to it) for every step of a run."""
    steps = [int(row["step"]) for row in read_metrics(run)]
    if budget.tokens is not None:
        each = {int(p.stem): float(sum(len(t.tokens) for e in read_segment(p) for t in e.turns))
                for p in segments(run / "episodes")}  # fmt: skip
    elif budget.seconds is not None:
        each = {int(r["step"]): float(r.get("seconds", 0.0)) for r in read_metrics(run / "timings.jsonl")}
    elif budget.updates is not None:

        recipe = read_recipe(run)
        each = dict.fromkeys(steps, float(recipe.get("passes", 1) * recipe.get("minibatches", 1)))
    else:
        return [(s, float(s)) for s in steps]
    return list(zip(steps, np.cumsum([each.get(s, 0.0) for s in steps]).tolist()))


def last_step_within(run: Path, budget: Budget, name: str) -> int | None:
    """The last step that counts; None: all of them (a budget of steps ends the run itself)."""
    if budget.steps is not None:
        return None
    (kind, limit), way = next(iter(budget.model_dump(exclude_none=True).items())), spent(run, budget)
    if not way or way[-1][1] < limit:
        raise RunError(
            f"{name} spent {way[-1][1] if way else 0:.6g} of {limit:.6g} {kind} in all its steps: give its recipe more "
            "steps, or the study a smaller budget."
        )
    inside = [step for step, total in way if total <= limit]
    if not inside:
        raise RunError(f"{name} spent more than {limit:.6g} {kind} in its first step: give the study a larger budget.")
    return inside[-1]


def measure_run(run: Path, measure: Measure, spec: Spec, last: int | None, name: str) -> RunMeasure:
    """One measure of one run."""
    if measure.results:
        return _result(run, measure.metric, spec.reads.result or spec.name, name)
    file = measure.episodes and (spec.reads.episodes or measure.episodes)
    if file is None:
        rows = [r for r in read_metrics(run) if last is None or r["step"] <= last]
        values = [r[measure.metric] for r in rows if isinstance(r.get(measure.metric), int | float)]
        if not values:
            known = {k for r in rows for k in r} - {"step"}
            hint = nearest(measure.metric, known) if known else " It logged nothing."
            raise DataError(f"{name} logged no '{measure.metric}'.{hint}")
        return RunMeasure(float(np.mean(values[-measure.last :])))
    path = run / file
    if path.is_dir():
        numbered = [p for p in segments(path) if last is None or int(p.stem) <= last]
        if not numbered:
            raise DataError(f"{name} has no evaluation in {file}: set eval.every in its recipe.")
        path = numbered[-1]
    elif last is not None:
        raise DataError(
            f"{name}: {file} was made at the end of the run, past the budget: measure 'evaluation' instead."
        )
    if not path.is_file():
        folder = run / "evaluation"
        found = [*segments(folder), *named_episodes(folder)] if folder.is_dir() else []
        there = [str(p.relative_to(run)) for p in found]
        raise DataError(f"{name} has no {file}.{nearest(file, there) if there else ''}")
    every = read_segment(path)
    episodes = [e for e in every if measure.stage in (None, e.task.meta.get("stage"))]
    if measure.stage is not None and not episodes:
        known = {str(e.task.meta["stage"]) for e in every if "stage" in e.task.meta}
        hint = nearest(measure.stage, known) if known else " Its episodes name no stage."
        raise DataError(f"{name}: no episode of {file} is of stage '{measure.stage}'.{hint}")
    starts = by_start(episodes, measure.metric, measure.side, measure.seat, measure.failed)
    if not starts:
        raise DataError(f"{name}: no episode of {file} has a {measure.metric}.")
    lost = {(e.task.id, e.task.seed, e.seed) for e in episodes} - starts.keys()
    failed = scored(episodes, measure.side)[1]["failed"]
    return RunMeasure(
        float(np.mean(list(starts.values()))), starts, measure.metric == "success", frozenset(lost), failed
    )


def _failures(name: str, m: str, measure: Measure, seen: RunMeasure) -> str:
    apart = f"are in no average (measures.{m}.failed=lost counts them as lost)"
    how = "count as lost" if measure.failed == "lost" else apart
    return f"{name}: {seen.failed} failed episodes {how} in {m}."


def _result(run: Path, metric: str, arm: str, name: str) -> RunMeasure:
    path = run / "results.json"
    try:
        rows = read_json(path)
        found = [r["value"] for r in rows if r["metric"] == metric and r.get("arm", arm) == arm]
    except (OSError, ValueError, TypeError, KeyError) as e:
        raise DataError(f"{name}: cannot be read as a list of rows with arm, metric and value ({e}).", path) from None
    if len(found) != 1:
        raise DataError(f"{name}: {len(found)} rows have arm '{arm}' and metric '{metric}'; there must be one.", path)
    return RunMeasure(float(found[0]))


def collect(
    measures: Mapping[str, Measure], budget: Budget, specs: Sequence[Spec], claims: Sequence[Claim],
    seeds: Sequence[int], out: Path, correct: str = "none",
) -> dict[str, Any]:  # fmt: skip
    """Every arm's numbers with intervals, every claim's verdict, and notes for the reader. An arm that reads the runs
    of another arm names it (`of`) and the file to read (`episodes`)."""
    owners = {spec.runs: spec.name for spec in specs if spec.reads.of is None}
    seen: dict[tuple[str, str], list[RunMeasure]] = {}
    arms, notes = [], []
    for spec in specs:
        runs = [(f"arm '{spec.name}', seed {seed}", spec.folder(out, seed)) for seed in seeds]
        cuts = [last_step_within(run, budget, name) for name, run in runs]
        for m, measure in measures.items():
            seen[spec.name, m] = [measure_run(run, measure, spec, at, name) for (name, run), at in zip(runs, cuts)]
            notes += [f"{name}: {len(s.lost)} of {len(s.played)} starts have no {m} and are left out."
                      for (name, _), s in zip(runs, seen[spec.name, m]) if s.lost]  # fmt: skip
            notes += [_failures(name, m, measure, s) for (name, _), s in zip(runs, seen[spec.name, m]) if s.failed]
        values = {m: {**arm_interval(s).plain(), "seeds": [x.value for x in s],
                      **({"failed": n} if (n := sum(x.failed for x in s)) else {})}
                  for m in measures for s in [seen[spec.name, m]]}  # fmt: skip
        ends = [at or max((int(r["step"]) for r in read_metrics(run)), default=0) for at, (_, run) in zip(cuts, runs)]
        if budget.steps is not None:
            whole = budget.steps + spec.extra
            notes += [f"{name} ended at step {end} of {whole}." for end, (name, _) in zip(ends, runs) if end < whole]
            if spec.extra and spec.reads.of is None:
                notes.append(f"Arm '{spec.name}' had {spec.extra} steps beside the budget.")
        reads = {} if spec.reads.of is None else {"of": owners[spec.runs], "episodes": spec.reads.episodes}
        arms.append({"name": spec.name, "recipe": spec.recipe.name, "set": list(spec.overrides), "runs": spec.runs,
                     **reads, "steps": ends, "values": values})  # fmt: skip
    judged = []
    for c in claims:
        found = difference(c, seen[c.a, c.measure], seen[c.b, c.measure], seeds)
        judged.append({"claim": str(c), "a": c.a, "b": c.b, "measure": c.measure, **found.plain(),
                       "verdict": verdict(found, len(seeds))})  # fmt: skip
    if correct == "holm" and len(seeds) > 1:
        given = [(c, seen[c.a, c.measure], seen[c.b, c.measure], seeds) for c in claims]
        for row, p in zip(judged, holm([p_value(*g) for g in given])):
            row |= {"p": p, "alone": row["verdict"], "verdict": row["verdict"] if p <= 0.05 else "unclear"}
    if len(seeds) == 1:
        notes.append("One seed: the intervals say nothing about other seeds.")
    described = {
        m: measure.model_dump(exclude_defaults=True) | {"metric": measure.metric} for m, measure in measures.items()
    }
    return {"measures": described, "arms": arms, "claims": judged, "notes": notes}
