r"""Search at test time: a value chooses among what the policy writes. It works with any engine, world and scorer.

    beam:B     step by step: sample B continuations of each of the (at most B) texts, score them, keep the B best
               unfinished ones; finished texts go to a pool, and the answer is the best of the pool
    best_of:N  N whole answers, of which the best is kept
    actions:K  the same for one turn of many: K actions, of which the best is played

`Searcher` is used in place of an engine: every decision of a protocol is searched. Episodes are played at the same
time, so they are also searched at the same time, and engine and scorer see all requests together. With one candidate
there is no choice: `best_of:1` and `actions:1` give exactly the tokens of a plain run.

What differs from the published search: the scorer sees the last token of a step. A text that is already kept is not
kept twice. Tokens are kept as they were sampled, so a token that extends over the end of a step stays whole.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trailmark.engines.base import Completion, Engine, EngineError, Request
from trailmark.errors import TrailmarkError
from trailmark.run_async import wait
from trailmark.score.values import Line, Scorer
from trailmark.steps import LINES, cut_tokens
from trailmark.types import CUT_OFF, ENDED, Stop, Tokens

Kind = Literal["beam", "best_of", "actions"]
State = Literal["kept", "dropped", "double", "finished", "cut"]


@dataclass(frozen=True)
class Plan:
    """How to search. `rounds`: most steps of a beam. `budget`: most tokens that one decision may sample, over all
    candidates. `tree`: store every candidate, for people to look at."""

    kind: Kind
    width: int
    step_ends: tuple[str, ...] = LINES
    rounds: int = 20
    budget: int | None = None
    tree: bool = False

    def __post_init__(self) -> None:
        if min(self.width, self.rounds, 1 if self.budget is None else self.budget) < 1:
            raise TrailmarkError("a search needs a width, rounds and a budget of at least 1.")
        if self.kind == "beam" and (not self.step_ends or "" in self.step_ends):
            raise TrailmarkError("a beam needs texts that end a step, such as a newline.")

    def check(self, temperature: float) -> None:
        """Raise an error at temperature 0: all candidates would be the same."""
        if self.width > 1 and temperature == 0:
            raise EngineError(
                f"{self.kind}:{self.width} needs a temperature above 0: at 0 all candidates are the same."
            )


def parse_plan(text: str, **more: Any) -> Plan:
    """Parse `beam:3`, `best_of:8` or `actions:5`."""
    m = re.fullmatch(r"(beam|best_of|actions):([1-9]\d{0,3})", text.strip())
    if not m:
        raise TrailmarkError(f"search '{text}': expected beam:B, best_of:N or actions:K, such as beam:3.")
    kind: Any = m[1]
    return Plan(kind, int(m[2]), **more)


@dataclass(frozen=True)
class Node:
    """One candidate: the text it added to its parent (None: to the prompt), and its result."""

    id: int
    parent: int | None
    round: int
    text: str
    tokens: int
    score: float | None
    state: State

    def plain(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(eq=False)
class Text:
    """The text of one decision so far."""

    tokens: Tokens = ()
    logp: tuple[float, ...] = ()
    logq: tuple[float, ...] = ()
    ends: tuple[int, ...] = ()  # where its steps end
    stop: Stop = ""  # "": not finished
    text: str = ""
    node: int | None = None
    score: float | None = None

    def line(self, prompt: Tokens, stops: Tokens) -> Line:
        ended = self.stop in ENDED and self.tokens and self.tokens[-1] in stops
        kept = len(self.tokens) - bool(ended)
        ends = sorted({min(e, kept) for e in self.ends})  # the last step ends where its text ends
        return Line(prompt, self.tokens[:kept], self.logp[:kept], tuple(ends))

    def completion(self) -> Completion:
        return Completion(self.tokens, self.logp, self.logq, self.text, self.stop or "forced_end")


@dataclass(eq=False)
class Found:
    """`best` is None if nothing was finished: such a decision counts as wrong. `why` the search ended: "finished" (no
    unfinished text is left), "rounds" or "budget"."""

    best: Text | None
    pool: list[Text]
    tokens: int
    rounds: int
    why: Literal["finished", "rounds", "budget"]
    tree: list[Node] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        out: dict[str, Any] = {"score": self.best and self.best.score, "finished": len(self.pool)}
        out |= {"tokens": self.tokens, "rounds": self.rounds, "why": self.why}
        if self.tree:
            out["tree"] = [n.plain() for n in self.tree]
            out["best"] = self.best and self.best.node
        return out


class Searcher(Engine):
    """An engine that searches. While `keep` is set, `found` stores the result of each search by the request's key."""

    def __init__(self, engine: Engine, scorer: Scorer, plan: Plan, keep: bool = False):
        self.engine, self.scorer, self.plan, self.keep = engine, scorer, plan, keep
        self.tokenizer, self.name, self.version = engine.tokenizer, engine.name, engine.version
        self.lm = getattr(engine, "lm", None)
        self.found: dict[str, Found] = {}

    async def sample(self, request: Request) -> list[Completion]:
        """`n` searches of one prompt, each with its own random draws. A search that finished nothing gives an empty
        text."""
        keys = [request.key if k == 0 else f"{request.key}\0search {k}" for k in range(request.n)]
        found = await asyncio.gather(*(self.search(dataclasses.replace(request, n=1, key=key)) for key in keys))
        if self.keep:
            self.found.update(zip(keys, found))
        return [(f.best or Text()).completion() for f in found]

    async def score(self, tokens: Sequence[int], start: int = 1) -> list[float]:
        return await self.engine.score(tokens, start)

    async def search(self, request: Request) -> Found:
        self.plan.check(request.law.temperature)
        searched = _Search(self.engine, self.scorer, self.plan, request)
        return await (searched.beam() if self.plan.kind == "beam" else searched.best_of())


class _Search:
    """The search of one decision."""

    def __init__(self, engine: Engine, scorer: Scorer, plan: Plan, request: Request):
        self.engine, self.scorer, self.plan, self.request = engine, scorer, plan, request
        self.spent, self.nodes, self.short = 0, 0, False  # short: the budget cut a candidate
        held = getattr(engine, "max_len", None)  # an engine may end an answer before the request does
        self.room = request.max_tokens if held is None else min(request.max_tokens, held - len(request.prompt))
        self.tree: list[Node] = []

    async def best_of(self) -> Found:
        plan, request = self.plan, self.request
        most = request.max_tokens
        if plan.budget is not None:
            most = min(most, plan.budget // plan.width)
        if most < 1:
            return Found(None, [], 0, 0, "budget")
        drawn = await self.engine.sample(dataclasses.replace(request, n=plan.width, max_tokens=most))
        texts = [self._grown(Text(), c) for c in drawn]
        for t in texts if hasattr(self.scorer, "over") else ():
            args = self.request.prompt, t.tokens, t.text, plan.step_ends
            t.ends = answer_ends(self.scorer, self.engine.tokenizer, *args)
        # A candidate that the budget cuts off is no answer.
        pool = [t for t in texts if t.stop not in CUT_OFF or most == request.max_tokens]
        await self._score(pool if plan.width > 1 else [])
        for t in texts:
            self._note(t, None, 0, t.text, len(t.tokens), "finished" if t in pool else "cut")
        return self._found(pool, 1, "finished" if len(pool) == len(texts) else "budget")

    async def beam(self) -> Found:
        """In each round: sample from every open text, score the results, keep the best."""
        plan, open_, pool = self.plan, [Text()], []
        why: Literal["finished", "rounds", "budget"] = "rounds"
        done = 0
        while open_ and done < plan.rounds:
            most = self._most(len(open_))
            if most < 1:
                why = "budget"
                break
            grown = await self._expand(open_, done, most)
            if plan.width > 1:
                for _, t, _ in grown if getattr(self.scorer, "picks", False) else ():
                    args = self.request.prompt, t.tokens, t.text, plan.step_ends
                    t.ends = answer_ends(self.scorer, self.engine.tokenizer, *args, whole=t.stop != "")
                await self._score([t for _, t, _ in grown])
            open_ = self._sorted(grown, done, pool)
            done += 1
        return self._found(pool, done, why if open_ else "budget" if self.short else "finished")

    def _most(self, beams: int) -> int:
        """The most tokens of each candidate of this round."""
        most, budget = self.request.max_tokens, self.plan.budget
        return most if budget is None else min(most, (budget - self.spent) // (beams * self.plan.width))

    async def _expand(self, open_: Sequence[Text], done: int, most: int) -> list[tuple[Text, Text, bool]]:
        """(parent, text, whether it may go on) for every candidate of a round."""
        asks, request = [], self.request
        for i, text in enumerate(open_):
            left = self.room - len(text.tokens)
            law = dataclasses.replace(request.law, min_tokens=max(0, request.law.min_tokens - len(text.tokens)))
            asks.append(
                dataclasses.replace(
                    request,
                    prompt=request.prompt + text.tokens,
                    law=law,
                    n=self.plan.width,
                    max_tokens=min(most, left),
                    stop_strings=(*request.stop_strings, *self.plan.step_ends),
                    key=request.key if not done else f"{request.key}\0step {done}.{i}",
                )
            )
        drawn = await asyncio.gather(*(self.engine.sample(a) for a in asks))
        out = []
        for text, ask, samples in zip(open_, asks, drawn):
            await asyncio.sleep(0)  # other requests of a server go on
            left = self.room - len(text.tokens)
            for c in samples:
                grown = self._grown(text, c)
                # cut off by the budget: no answer
                short = c.cut_off and len(c.tokens) == ask.max_tokens < left
                self.short |= short
                out.append((text, dataclasses.replace(grown, stop="") if short else grown, not short))
        return out

    def _grown(self, text: Text, c: Completion) -> Text:
        """`text` with one completion added. It is finished if the completion ended with a stop token, a stop text, or
        at its length limit."""
        tokens = text.tokens + c.tokens
        self.spent += len(c.tokens)
        stops, strings = self.request.stop_ids, self.request.stop_strings
        ended = bool(c.tokens) and c.tokens[-1] in stops
        whole = self.engine.tokenizer.decode(tokens[:-1] if ended else tokens) if text.tokens else ""
        if not text.tokens:
            step = c.ended and not ended and self.plan.kind == "beam"
            whole = self.engine.tokenizer.decode(c.tokens) if step else c.text
        found = [at for s in strings if (at := whole.find(s)) >= 0]
        said = whole[: min(found)] if found else whole
        stop: Stop = ""
        if ended or found or (c.ended and self.plan.kind != "beam"):
            stop = "stopped" if ended else "stop_string"
        elif len(tokens) >= self.room:
            stop = "length" if self.room == self.request.max_tokens else "context_full"
        elif c.cut_off:
            stop = c.stop
        return Text(tokens, text.logp + c.logp, text.logq + c.logq, (*text.ends, len(tokens)), stop, said, text.node)

    async def _score(self, texts: Sequence[Text]) -> None:
        lines = [t.line(self.request.prompt, self.request.stop_ids) for t in texts]
        for t, value in zip(texts, await self.scorer.score(lines) if lines else ()):
            if not math.isfinite(value):
                raise EngineError(f"the scorer of a search answered {value}, which is no number to choose by.")
            t.score = float(value)

    def _sorted(self, grown: Sequence[tuple[Text, Text, bool]], done: int, pool: list[Text]) -> list[Text]:
        """The open texts of the next round. Finished texts go to the pool, whatever their score."""
        going = [(i, t) for i, (_, t, whole) in enumerate(grown) if not t.stop and whole]
        best: list[int] = []
        seen: set[Tokens] = set()
        states: dict[int, State] = {}
        for i, t in sorted(going, key=lambda it: -(it[1].score or 0.0)):  # ties: the earlier one
            states[i] = "double" if t.tokens in seen else "kept" if len(best) < self.plan.width else "dropped"
            seen.add(t.tokens)
            best += [i] if states[i] == "kept" else []
        for i, (parent, t, _) in enumerate(grown):
            new = t.text[len(parent.text) :]
            self._note(
                t,
                parent.node,
                done,
                new,
                len(t.tokens) - len(parent.tokens),
                states.get(i, "finished" if t.stop else "cut"),
            )
            if t.stop:
                pool.append(t)
        return [grown[i][1] for i in best]

    def _note(self, t: Text, parent: int | None, done: int, text: str, tokens: int, state: State) -> None:
        t.node = self.nodes
        self.nodes += 1
        if self.plan.tree:
            self.tree.append(Node(t.node, parent, done, text, tokens, t.score, state))

    def _found(self, pool: list[Text], rounds: int, why: Literal["finished", "rounds", "budget"]) -> Found:
        best = max(pool, key=lambda t: t.score or 0.0) if pool else None
        return Found(best, pool, self.spent, rounds, why, self.tree)


def answer_ends(
    scorer: Scorer,
    tokenizer: Any,
    prompt: Tokens,
    tokens: Tokens,
    text: str,
    delimiters: Sequence[str],
    whole: bool = True,
) -> tuple[int, ...]:
    """Where the steps of an answer end that a scorer reads: cut as its model has learnt it (`split`), without the kinds
    that take no part (`skip`), and of a whole answer without its last steps (`offset`). A scorer that reads the end
    alone needs none of this."""
    if getattr(scorer, "over", None) == "last" and not getattr(scorer, "picks", False):
        return (len(tokens),)
    split: Any = getattr(scorer, "split", "newline")
    skip = getattr(scorer, "skip", ())
    shown = tokenizer.decode(prompt) if split not in ("newline", "sentence", "turn") else ""
    spans, kinds = cut_tokens(tokenizer, tokens, text, split, shown, delimiters)
    taking = [(end, kind) for (_, end), kind in zip(spans, kinds)]
    taking = taking[: max(0, len(taking) - getattr(scorer, "offset", 0))] if whole else taking
    return tuple(end for end, kind in taking if kind not in skip) or (len(tokens),)


def search(engine: Engine, requests: Sequence[Request], scorer: Scorer, plan: Plan) -> list[Found]:
    """Search many prompts at the same time, from synchronous code."""

    async def together() -> list[Found]:
        searcher = Searcher(engine, scorer, plan)
        done = await asyncio.gather(*(searcher.search(r) for r in requests), return_exceptions=True)
        for d in done:
            if isinstance(d, BaseException):
                raise d
        return [d for d in done if not isinstance(d, BaseException)]

    return wait(together())
