"""Evaluate with search: the same starts and draws as a plain evaluation, with a value that chooses.

`beam` and `actions` search every decision. `best_of:N` plays N whole episodes of each start and keeps the one whose last state has the
highest value; what the N are worth without a value (pass@k, maj@k) stands beside it. For the other two, `--samples N` plays N plain
episodes for the same purpose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trailmark.errors import ModelError, TrailmarkError
from trailmark.evaluate.run import evaluate, summarise
from trailmark.rollout.play import Seat, stop_ids
from trailmark.rollout.search import Plan, Searcher, Text, parse_plan
from trailmark.run_async import wait
from trailmark.score.values import HeadValues, HttpValues, LogProb, Scorer
from trailmark.tasks.base import TaskSource
from trailmark.types import Episode, Failed, Invalid, Scored

if TYPE_CHECKING:
    from trailmark.evaluate.players import Wish


def play_searched(
    source: TaskSource, seat: Seat, wish: Wish, about: dict[str, Any]
) -> tuple[list[Episode], dict[str, Any]]:
    """The chosen episodes, and a record in which `beside` has the rows of plain ones."""
    ends = tuple(getattr(source, "step_ends", ("\n",)))
    plan = parse_plan(wish.search or "", step_ends=ends, budget=wish.budget, tree=wish.tree)
    if wish.chat or seat.kind == "remote":
        raise TrailmarkError("eval --search needs a model here, and no --chat: a server searches with serve --value.")
    if plan.kind == "best_of" and (wish.budget or wish.tree):
        raise TrailmarkError(
            "eval --search best_of plays whole episodes: --budget and --tree belong to beam and actions."
        )
    if plan.width > 1 and seat.law.temperature == 0:
        raise TrailmarkError(f"eval --search {wish.search} needs a temperature above 0: at 0 all candidates are one.")
    scorer = pick_scorer(wish.value, plan, seat, wish.device)
    how = {"split": about["split"], "n": about["n"], "seed": about["seed"]}
    chosen, plain, spent = search_episodes(source, seat, plan, scorer, **how)
    if plan.kind != "best_of" and wish.samples > 1:
        plain = evaluate(source, [seat], samples=wish.samples, **how).episodes
    starts = max(1, len({e.task.id for e in chosen}))
    record = {
        **about,
        "search": wish.search,
        "value": wish.value,
        "budget": wish.budget,
        "searched_tokens": spent / starts,
    }
    if plain and (plan.width > 1 or plan.kind != "best_of"):
        size = plan.width if plan.kind == "best_of" else wish.samples
        record["beside"] = [summarise(plain, f"{size} plain samples")]
    return chosen, record


def search_episodes(
    source: TaskSource, seat: Seat, plan: Plan, scorer: Scorer, **how: Any
) -> tuple[list[Episode], list[Episode], int]:
    """The chosen episodes; the plain ones they were chosen from (best_of); and how many tokens were drawn in all."""
    if plan.kind == "best_of":
        plain = evaluate(source, [seat], samples=plan.width, **how).episodes
        return best_by_value(plain, scorer, seat), plain, sum(map(written, plain))
    searcher = Searcher(seat.engine, scorer, plan, keep=True)
    played = evaluate(source, [dataclasses.replace(seat, engine=searcher)], **how).episodes
    return [noted(e, searcher) for e in played], [], sum(f.tokens for f in searcher.found.values())


def written(e: Episode) -> int:
    return sum(len(t.tokens) for t in e.turns)


def pick_scorer(value: str | None, plan: Plan, seat: Seat, device: str = "auto") -> Scorer:
    if value is None:
        if plan.width > 1:
            raise TrailmarkError(
                "eval --search: by what is it chosen? --value RUN, or --value logp for the policy's own."
            )
        return LogProb()
    if value == "logp":
        return LogProb()
    if value.startswith(("http://", "https://")):
        return HttpValues(value)
    return load_values(value, seat.engine.tokenizer, device)


def best_by_value(episodes: Sequence[Episode], scorer: Scorer, seat: Seat) -> list[Episode]:
    """One episode of each group: the first with the highest value at its last state. One that failed takes no part, unless all
    did; one that is invalid may be chosen, for nobody would know."""
    groups: dict[str, list[Episode]] = {}
    for e in episodes:
        groups.setdefault(e.group, []).append(e)
    can = {g: [e for e in es if e.turns and not isinstance(e.outcome, Failed)] for g, es in groups.items()}
    rows = [(g, e) for g, es in can.items() if len(groups[g]) > 1 for e in es]
    lines = [last_state(e, seat) for _, e in rows]
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


def last_state(e: Episode, seat: Seat) -> Any:
    """The last thing that the seat wrote, behind all it had seen."""
    turn = max(i for i, t in enumerate(e.turns) if t.seat == seat.name)
    t = e.turns[turn]
    stops = stop_ids(seat.engine.tokenizer, chat=True)
    return Text(t.tokens, t.logp, t.logq, (), t.stop).line(e.context(turn) + t.forced, stops)


def noted(e: Episode, searcher: Searcher) -> Episode:
    """With what was searched in its `info`. Where the last decision finished nothing, the answer is wrong, whatever a world makes of
    an empty one."""
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


def value_folder(name: str) -> Path:
    """The folder of a value model: of a run, the critic of its last checkpoint (or its policy, where that has the head)."""
    folder = Path(name)
    if not folder.is_dir():
        raise ModelError(f"--value {name}: there is no such run or folder.")
    if (folder / "checkpoints").is_dir():
        from trailmark.runs.checkpoints import listed

        found = listed(folder / "checkpoints")
        if not found:
            raise ModelError(f"{folder}: this run has no checkpoint yet.")
        folder = found[-1]
    if (folder / "heads.safetensors").is_file():
        return folder
    for part in ("critic", "value", "policy"):
        if (folder / part / "heads.safetensors").is_file():
            return folder / part
    raise ModelError(f"{folder} holds no value model: no heads.safetensors there or in critic/.")


def load_values(name: str, tokenizer: Any = None, device: str = "auto", dtype: str = "float32") -> HeadValues:
    """The value model of a run or folder, frozen. `tokenizer` is the policy's, whose tokens it will be shown."""
    from trailmark.config import ModelConfig
    from trailmark.models.load import load_model

    lm = load_model(
        ModelConfig.model_validate({"name": str(value_folder(name)), "device": device, "dtype": dtype})
    ).freeze()
    if tokenizer is not None and lm.tokenizer.get_vocab() != tokenizer.get_vocab():
        raise ModelError(
            f"the value model {name} has another tokenizer than the policy: it would not read what that writes."
        )
    return HeadValues(lm)
