"""Evaluate with search: the same starts and draws as a plain evaluation, with a value that chooses.

`beam` and `actions` search every decision. `best_of:N` plays N whole episodes of each start and keeps the one whose last state has the
highest value; what the N are worth without a value (pass@k, maj@k) stands beside it. For the other two, `--samples N` plays N plain
episodes for the same purpose.

A server that holds the policy is searched too (`AnswerSearch`), where a world is talked to:

    --search actions:K --value URL   K answers of the policy's server, each put behind the conversation and valued by the other server
                                     (`trailmark serve MODEL --value RUN`, route /v1/values); the best one is played
    --search actions:K               the policy's server chooses by its own value model (`serve --value`); beam:B works so too
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trailmark.engines.base import Completion, EngineError, Request
from trailmark.engines.http import HttpEngine
from trailmark.engines.wire import EngineGarbage, Wire
from trailmark.errors import ModelError, TrailmarkError
from trailmark.evaluate.run import evaluate, summarise
from trailmark.rollout.play import Seat, stop_ids
from trailmark.rollout.search import Plan, Searcher, Text, parse_plan
from trailmark.run_async import wait
from trailmark.score.values import HeadValues, HttpValues, LogProb, Scorer
from trailmark.seats.locate import is_address, locate_value
from trailmark.tasks.base import TaskSource
from trailmark.types import Episode, Failed, Invalid, Scored

if TYPE_CHECKING:
    from trailmark.evaluate.players import Wish


class AnswerSearch:
    """A server in whose place the best of `k` answers is given: by the values of another server, or, with `search`, as it chooses
    itself."""

    by_chat = True

    def __init__(self, engine: HttpEngine, k: int = 1, values: Wire | None = None, search: Mapping[str, Any] | None = None):
        self.engine, self.k, self.values, self.search = engine, k, values, search
        self.name, self.tokenizer, self.version = engine.name, engine.tokenizer, engine.version

    async def sample(self, request: Request) -> list[Completion]:
        raise EngineError(f"'{self.name}' is searched answer by answer: it is asked in messages")

    async def score(self, tokens: Sequence[int], start: int = 1) -> list[float]:
        return await self.engine.score(tokens, start)

    async def chat(self, messages: Sequence[Mapping[str, Any]], *given: Any, **more: Any) -> list[Completion]:
        made = await self.engine.chat(messages, *given, n=self.k, search=self.search, **more)
        if self.values is None or len(made) == 1:
            return made[:1]
        begun = more.get("prefix", "")
        found = await valued(self.values, [[*messages, {"role": "assistant", "content": begun + c.text}] for c in made])
        return [made[max(range(len(made)), key=lambda i: found[i])]]


def answer_search(seat: Seat, plan: Plan, value: str | None) -> Seat:
    """The seat of a server, searched: by the values of the server at `value`, or by the policy's own server."""
    engine: Any = seat.engine
    if plan.width > 1 and seat.law.temperature == 0:
        raise TrailmarkError(f"eval --search {plan.kind}:{plan.width} needs a temperature above 0: at 0 all candidates are one.")
    if value is None:
        kind = "beam" if plan.kind == "beam" else "best_of"
        ends = {"step_ends": list(plan.step_ends)} if plan.kind == "beam" else {}
        search = {kind: plan.width, **({} if plan.budget is None else {"budget": plan.budget}), **ends}
        return dataclasses.replace(seat, engine=AnswerSearch(engine, search=search))
    if plan.kind != "actions" or not is_address(value):
        raise TrailmarkError(
            "eval of a server chooses here by actions:K and --value URL, the address of a server of values; without --value "
            "the server itself searches (serve --value)."
        )
    return dataclasses.replace(seat, engine=AnswerSearch(engine, plan.width, Wire(value, {}, {}, deadline=120.0)))


async def valued(wire: Wire, states: Sequence[Sequence[Mapping[str, Any]]]) -> list[float]:
    """The values of conversations that end with an answer, each read where that answer ends."""
    said = await wire.post("/v1/values", {"states": list(states)})
    found = said.get("values") if isinstance(said, dict) else said
    good = isinstance(found, list) and len(found) == len(states) and all(isinstance(v, int | float) for v in found)
    if not good:
        raise EngineGarbage(f"{wire.base_url} was asked for {len(states)} values and answered {str(said)[:80]}")
    return [float(v) for v in found]


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
    if is_address(value):
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


def load_values(name: str | Path, tokenizer: Any = None, device: str = "auto", dtype: str = "float32") -> HeadValues:
    """The value model of a run or folder, frozen. `tokenizer` is the policy's, whose tokens it will be shown."""
    from trailmark.config import ModelConfig
    from trailmark.models.load import load_model

    lm = load_model(
        ModelConfig.model_validate({"name": str(locate_value(name)), "device": device, "dtype": dtype})
    ).freeze()
    if tokenizer is not None and lm.tokenizer.get_vocab() != tokenizer.get_vocab():
        raise ModelError(
            f"the value model {name} has another tokenizer than the policy: it would not read what that writes."
        )
    return HeadValues(lm)
