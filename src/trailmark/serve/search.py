"""Search on the server: with `search: {"beam": 3}` in a request (the `extra_body` of OpenAI's client) it returns the
best answer.

Each choice then has a field `search`: score, number of finished answers, tokens drawn, rounds, why it ended and, on
request, the tree of all candidates. /v1/values returns values without writing anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from trailmark.engines.base import Completion, Request
from trailmark.engines.local import LocalEngine
from trailmark.engines.running import Written
from trailmark.rollout.search import Found, Plan, Searcher
from trailmark.score.values import HeadValues, LogProb
from trailmark.serve.answers import Reply
from trailmark.serve.body import Message, Sampling, ValuesBody, encoded
from trailmark.serve.errors import ApiError
from trailmark.serve.prompt_format import PromptFormat
from trailmark.types import Tokens


def allow_search(body: Sampling, has_values: bool, echo: bool, most: int) -> Plan | None:
    """The search that a request asks for, or an error if it is not possible. It draws no more than `most` tokens."""
    asked = body.search
    if asked is None:
        return None
    if asked.by == "value" and not has_values:
        raise ApiError(400, "this server has no value model: start it with --value RUN, or search by 'logp'.", "search")
    for name, wrong in (
        ("stream", body.stream),
        ("n", body.n != 1),
        ("echo", echo),
        ("prompt_logprobs", body.prompt_logprobs is not None),
    ):
        if wrong:
            raise ApiError(400, f"a search gives one whole answer: '{name}' cannot be combined with it.", name)
    if body.top:
        raise ApiError(
            400, "a search reports no alternatives to its tokens: ask for log-probs without top ones.", "logprobs"
        )
    if body.max_tokens == 0:
        raise ApiError(400, "a search needs max_tokens of at least 1.", "max_tokens")
    width = asked.beam or asked.best_of or 1
    if width > 1 and body.temperature < 1e-5:
        raise ApiError(400, "a search needs a temperature above 0: at 0 all candidates are equal.", "temperature")
    budget = min(most, asked.budget or most)
    return Plan("beam" if asked.beam else "best_of", width, tuple(asked.step_ends), asked.rounds, budget, asked.tree)


def sequences(plan: Plan) -> int:
    """How many sequences a search draws at the same time: every beam has as many candidates as there are beams."""
    return plan.width**2 if plan.kind == "beam" else plan.width


class Party:
    """An engine that draws on behalf of one request, whose samples take turns with those of others."""

    def __init__(self, engine: LocalEngine):
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def sample(self, request: Request) -> list[Completion]:
        return await self.engine.sample(request, party=self)


async def search_all(
    engine: LocalEngine, values: HeadValues | None, plan: Plan, asks: Sequence[Request]
) -> list[Found]:
    party: Any = Party(engine)
    searcher = Searcher(party, values or LogProb(), plan)
    tasks = [asyncio.create_task(searcher.search(ask)) for ask in asks]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:  # a client that leaves frees its slots
            task.cancel()


def answer_of(reply: Reply, found: Sequence[Found]) -> dict[str, Any]:
    """The reply with the best answer of each search."""
    for i, f in enumerate(found):
        if f.best is None:
            reply.choices[i].finish = "length"  # no answer was finished
            continue
        done = f.best.completion()
        last = len(done.tokens) - 1
        for k, (token, logp, logq) in enumerate(zip(done.tokens, done.logp, done.logq)):
            reply.hear(i, Written(0, token, logp, logq, done=done if k == last else None))
    out = reply.whole([])
    for choice, f in zip(out["choices"], found):
        choice["search"] = f.plain()
    return out


def value_rows(body: ValuesBody, tokenizer: Any, prompt_format: PromptFormat) -> Iterator[Tokens]:
    """The tokens of every state. A conversation that ends with the assistant is valued where its turn could end; any
    other where the assistant would begin."""
    return (_row(state, tokenizer, body.add_special_tokens, prompt_format) for state in body.states)


def _row(state: str | Sequence[Any], tokenizer: Any, specials: bool, prompt_format: PromptFormat) -> Tokens:
    if isinstance(state, str) or not isinstance(state[0], Message):
        row = encoded(state, tokenizer, specials)
    else:
        messages = [m.plain() for m in state]
        if messages[-1]["role"] == "assistant" and len(messages) > 1:
            row = prompt_format.with_answer(tokenizer, messages[:-1], messages[-1]["content"])[0]
        else:
            row = prompt_format.prompt(tokenizer, messages)
    if not row:
        raise ApiError(400, "an empty state has no value: give at least one token (for example a BOS).", "states")
    return row
