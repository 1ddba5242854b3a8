"""Evaluate with search: the same starts and random draws as in a plain evaluation, with a value that chooses.

`beam` and `actions` search every decision. `best_of:N` plays N whole episodes of each start and keeps the one whose
last state has the highest value. Its row also shows what the N are worth without a value (pass@k, maj@k). For the other
two, `--samples N` plays N plain episodes for this comparison.

A policy behind a server can be searched too (`AnswerSearch`), in worlds that are played as a conversation:

    --search actions:K --value URL   K answers of the policy's server. Each is added to the conversation and valued by
                                     the other server (`trailmark serve MODEL --value RUN`, route /v1/values); the
                                     best one is played
    --search actions:K               the policy's server chooses by its own value model (`serve --value`); beam:B
                                     works too
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trailmark.engines.base import Completion, Engine, EngineError, Request
from trailmark.engines.http import HttpEngine
from trailmark.errors import TrailmarkError
from trailmark.evaluate.run import evaluate, summarise
from trailmark.rollout.play import Seat
from trailmark.rollout.search import Plan, parse_plan
from trailmark.rollout.search_episodes import search_episodes
from trailmark.score.value_models import load_values
from trailmark.score.values import HttpValues, LogProb, Scorer
from trailmark.seats.model_names import is_address
from trailmark.tasks.base import draw_tasks
from trailmark.types import Episode

if TYPE_CHECKING:
    from trailmark.evaluate.options import PlayOptions
    from trailmark.evaluate.players import Played


class AnswerSearch(Engine):
    """An engine that returns the best of `k` answers of a server. Another server gives the values, or, with `search`,
    the server itself chooses."""

    by_chat = True

    def __init__(
        self, engine: HttpEngine, k: int = 1, values: HttpValues | None = None, search: Mapping[str, Any] | None = None
    ):
        self.engine, self.k, self.values, self.search = engine, k, values, search
        self.name, self.tokenizer, self.version = engine.name, engine.tokenizer, engine.version

    async def sample(self, request: Request) -> list[Completion]:
        raise EngineError(f"'{self.name}' is searched answer by answer, so it must get messages")

    async def score(self, tokens: Sequence[int], start: int = 1) -> list[float]:
        return await self.engine.score(tokens, start)

    async def chat(self, messages: Sequence[Mapping[str, Any]], *given: Any, **more: Any) -> list[Completion]:
        made = await self.engine.chat(messages, *given, n=self.k, search=self.search, **more)
        if self.values is None or len(made) == 1:
            return made[:1]
        begun = more.get("prefix", "")
        found = await self.values.ask([[*messages, {"role": "assistant", "content": begun + c.text}] for c in made])
        return [made[max(range(len(made)), key=lambda i: found[i])]]


def answer_search(seat: Seat, plan: Plan, value: str | None) -> Seat:
    """The seat of a server with search: by the values of the server at `value`, or by the policy's own server."""
    engine: Any = seat.engine
    must_differ(seat, plan)
    if value is None:
        kind = "beam" if plan.kind == "beam" else "best_of"
        ends = {"step_ends": list(plan.step_ends)} if plan.kind == "beam" else {}
        search = {kind: plan.width, **({} if plan.budget is None else {"budget": plan.budget}), **ends}
        return dataclasses.replace(seat, engine=AnswerSearch(engine, search=search))
    if plan.kind != "actions" or not is_address(value):
        raise TrailmarkError(
            "eval --search of a server needs actions:K and --value URL, the address of a server of values; without "
            "--value the server itself searches (serve --value)."
        )
    return dataclasses.replace(seat, engine=AnswerSearch(engine, plan.width, HttpValues(value)))


def play_searched(seat: Seat, wish: PlayOptions, made: Played) -> list[Episode]:
    """Fill in the chosen episodes, and the rows of plain ones beside them. Returns the plain ones."""
    source, about = made.source, made.about
    plan = parse_plan(wish.search or "", step_ends=tuple(source.step_ends), budget=wish.budget, tree=wish.tree)
    if wish.chat or seat.kind == "remote":
        raise TrailmarkError("eval --search needs a model here, and no --chat: a server searches with serve --value.")
    if plan.kind == "best_of" and (wish.budget or wish.tree):
        raise TrailmarkError(
            "eval --search best_of plays whole episodes: --budget and --tree belong to beam and actions."
        )
    must_differ(seat, plan)
    scorer = pick_scorer(wish.value, plan, seat, wish.device)
    tasks, seed = draw_tasks(source, about["split"], about["n"], about["seed"]), about["seed"]
    made.episodes, plain, spent = search_episodes(source, seat, plan, scorer, tasks, seed + 1)
    if plan.kind != "best_of" and wish.samples > 1:
        plain = evaluate(source, [seat], tasks=tasks, samples=wish.samples, seed=seed).episodes
    starts = max(1, len({e.task.id for e in made.episodes}))
    about |= {"search": wish.search, "value": wish.value, "budget": wish.budget, "searched_tokens": spent / starts}
    if plain and (plan.width > 1 or plan.kind != "best_of"):
        size = plan.width if plan.kind == "best_of" else wish.samples
        made.beside = [summarise(plain, f"{size} plain samples")]
    return plain


def must_differ(seat: Seat, plan: Plan) -> None:
    if plan.width > 1 and seat.law.temperature == 0:
        raise TrailmarkError(
            f"eval --search {plan.kind}:{plan.width} needs a temperature above 0: at 0 all candidates are the same."
        )


def pick_scorer(value: str | None, plan: Plan, seat: Seat, device: str = "auto") -> Scorer:
    if value is None and plan.width > 1:
        raise TrailmarkError(
            "eval --search needs a value to choose by: --value RUN, or --value logp for the policy's own log-prob."
        )
    if value is None or value == "logp":
        return LogProb()
    if is_address(value):
        return HttpValues(value)
    return load_values(value, seat.engine.tokenizer, device)
