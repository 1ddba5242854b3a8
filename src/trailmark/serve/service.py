"""Between the routes and the engine: who may wait, tokens as they are drawn, and what happens when a client goes away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from trailmark.engines.base import EngineError
from trailmark.engines.base import Request as Ask
from trailmark.engines.local import LocalEngine, Written
from trailmark.rollout.values import HeadValues
from trailmark.serve.answers import Mark, Reply
from trailmark.serve.body import ChatBody, CompletionBody, Sampling, ScoreBody, ValuesBody, listed, read
from trailmark.serve.errors import ApiError, api_error
from trailmark.serve.score import score_rows
from trailmark.serve.search import allow_search, search_all, told, value_rows
from trailmark.types import Tokens

MOST_BYTES = 8 << 20  # of a body; more is read away, so that the client hears why, up to
PATIENCE_BYTES = 64 << 20
PATIENCE_S = 60  # for a body to arrive

T = TypeVar("T")


class Room:
    """How many sequences are in the house. Those beyond the engine's slots wait; `queue` of them may."""

    def __init__(self, slots: int, queue: int):
        self.limit, self.taken = slots + queue, 0

    def enter(self, k: int) -> None:
        if k > self.limit:
            raise ApiError(400, f"this asks for {k} sequences at once, and {self.limit} are the most.", "n")
        if self.taken + k > self.limit:
            raise ApiError(429, "the queue is full: try again later.", code="queue_full", headers={"Retry-After": "1"})
        self.taken += k

    @contextlib.contextmanager
    def holding(self, k: int) -> Iterator[None]:
        self.enter(k)
        try:
            yield
        finally:
            self.taken -= k


class Stream(StreamingResponse):
    """Events of one request. However it ends, its generator is closed, which frees the slots, and its room is given back."""

    def __init__(self, events: AsyncGenerator[str, None], service: Service, size: int):
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.events, self.service, self.size = events, service, size

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await self.service.unless_gone(receive, self.stream_response(send))
        except ApiError as problem:  # the server is being stopped
            await send({"type": "http.response.body", "body": event(problem.body()).encode()})
        finally:
            self.service.room.taken -= self.size
            await self.events.aclose()


class Service:
    """The engine behind the routes."""

    def __init__(self, engine: LocalEngine, name: str, queue: int = 512, values: HeadValues | None = None):
        self.values = values
        self.engine, self.name, self.tokenizer = engine, name, engine.tokenizer
        self.room, self.started = Room(engine.slots, queue), int(time.time())
        self.working: set[asyncio.Task] = set()
        self.most_letters = engine.max_len * max(map(len, self.tokenizer.get_vocab()))

    async def complete(self, request: Request) -> Response:
        body = read(CompletionBody, await received(request))
        self.known(body.model)
        self.readable(listed(body.prompt))
        prompts = body.prompts(self.tokenizer)
        budget = 16 if body.max_tokens is None else body.max_tokens
        if budget == 0 and not body.echo:
            raise ApiError(400, "max_tokens 0 has a meaning only with 'echo'.", "max_tokens")
        return await self.answer(request, body, prompts, budget)

    async def chat(self, request: Request) -> Response:
        body = read(ChatBody, await received(request))
        self.known(body.model)
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true.", "top_logprobs")
        self.readable(["".join(m.plain()["content"] for m in body.messages)])
        prompt = body.prompt(self.tokenizer)
        budget = body.max_completion_tokens or body.max_tokens
        if budget == 0:
            raise ApiError(400, "max_tokens must be at least 1.", "max_tokens")
        return await self.answer(request, body, [prompt], budget or max(1, self.engine.max_len - len(prompt)))

    async def score(self, request: Request) -> Response:
        """Log-probs of tokens that are given: whole sequences, or completions behind a prompt or a conversation."""
        body = read(ScoreBody, await received(request))
        self.known(body.model)
        self.readable(["".join(m.plain()["content"] for m in body.messages or ())])
        self.readable([*listed(body.prompt or ""), *listed(body.completion or "")])
        rows = score_rows(body, self.tokenizer)
        for tokens, _ in rows:
            self.check(tokens, "tokens")
        data = []
        with self.room.holding(len(rows)):
            for i, (tokens, start) in enumerate(rows):
                logp = self.engine.score_rows([tokens], [start])[0]
                row = {"index": i, "token_ids": tokens[start:], "token_logprobs": logp}
                data.append({**row, "sum": sum(logp), "count": len(logp)})
                await asyncio.sleep(0)
        used = sum(len(tokens) for tokens, _ in rows)
        usage = {"prompt_tokens": used, "completion_tokens": 0, "total_tokens": used}
        return JSONResponse({"object": "score", "model": self.name, "data": data, "usage": usage})

    async def value(self, request: Request) -> list[float]:
        """Values of texts, tokens or conversations, each at its last token."""
        body = read(ValuesBody, await received(request))
        self.known(body.model)
        if self.values is None:
            raise ApiError(404, "this server has no value model: start it with --value RUN.", code="no_value_model")
        self.readable([s for s in body.states if isinstance(s, str)])
        rows = value_rows(body, self.tokenizer)
        for tokens in rows:
            self.check(tokens, "states")
        with self.room.holding(len(rows)):
            return await self.values.values(rows)

    async def answer(self, request: Request, body: Sampling, prompts: Sequence[Tokens], budget: int) -> Response:
        if body.stream and body.prompt_logprobs is not None:
            raise ApiError(400, "prompt_logprobs cannot be streamed.", "prompt_logprobs")
        asks = body.requests(prompts, self.tokenizer, max(budget, 1), isinstance(body, ChatBody))
        for ask in asks:
            self.check(ask.prompt, "prompt" if isinstance(body, CompletionBody) else "messages", ask)
        echo = None
        if isinstance(body, CompletionBody) and body.echo:
            echo = [p if isinstance(p, str) else self.tokenizer.decode(p) for p in listed(body.prompt)]
        reply = Reply(body, self.tokenizer, self.name, prompts)
        plan = allow_search(body, self.values is not None, echo is not None)
        size = len(prompts) * (body.n if plan is None else plan.width)
        self.room.enter(size)
        if body.stream:
            return Stream(self.events(reply, asks if budget else [], echo), self, size)
        try:
            if plan is not None:
                work = search_all(
                    self.engine, self.values if body.search and body.search.by == "value" else None, plan, asks
                )
                found = await self.unless_gone(request.receive, work)
                return Response(status_code=499) if found is None else JSONResponse(told(reply, found))
            done = await self.unless_gone(request.receive, self.whole(reply, asks if budget else [], echo))
            return done or Response(status_code=499)  # nobody will read it
        finally:
            self.room.taken -= size

    async def whole(self, reply: Reply, asks: Sequence[Ask], echo: Sequence[str] | None) -> Response:
        marks = await self.prompt_marks(reply, echo is not None)
        self.echo(reply, marks, echo, bool(asks))
        async with contextlib.aclosing(self.write(asks, reply.top)) as heard:
            async for index, written in heard:
                reply.hear(index, written)
        return JSONResponse(reply.whole(marks))

    async def events(self, reply: Reply, asks: Sequence[Ask], echo: Sequence[str] | None) -> AsyncGenerator[str, None]:
        try:
            self.echo(reply, await self.prompt_marks(reply, echo is not None), echo, bool(asks))
            for choice in reply.choices:
                if first := reply.opening(choice):
                    yield event(first)
            async with contextlib.aclosing(self.write(asks, reply.top)) as heard:
                async for index, written in heard:
                    if chunk := reply.chunk(reply.hear(index, written)):
                        yield event(chunk)
            if reply.body.stream_options.include_usage:
                yield event(reply.closing())
        except Exception as problem:  # the status is long sent: an error is one more event
            yield event(api_error(problem).body())
        yield "data: [DONE]\n\n"

    async def write(self, asks: Sequence[Ask], top: int) -> AsyncGenerator[tuple[int, Written], None]:
        """The tokens of all samples as they are drawn, numbered over all requests. Leaving early frees their slots."""
        heard: asyncio.Queue[tuple[int, Written] | asyncio.Task] = asyncio.Queue()
        tasks = []
        for i, ask in enumerate(asks):

            def listen(w: Written, first: int = i * ask.n) -> None:
                heard.put_nowait((first + w.sample, w))

            tasks.append(asyncio.create_task(self.engine.sample(ask, listen, top)))
            tasks[-1].add_done_callback(heard.put_nowait)
        left = sum(ask.n for ask in asks)
        try:
            while left:
                item = await heard.get()
                if isinstance(item, asyncio.Task):
                    item.result()  # an engine that failed
                else:
                    yield item
                    left -= item[1].done is not None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def prompt_marks(self, reply: Reply, echo: bool) -> list[list[Mark]]:
        """Log-probs of the prompts, where they are wanted."""
        asked = reply.body.prompt_logprobs
        if asked is None and not (echo and reply.wants_logprobs):
            return []
        top, out = max(asked or 0, reply.top), []
        for p in reply.prompts:
            scored = [
                Mark(t, lp, None, tuple(best), rank)
                for t, (lp, rank, best) in zip(p[1:], self.engine.score_top(p, top))
            ]
            out.append([Mark(p[0], None), *scored])
            await asyncio.sleep(0)
        return out

    def echo(self, reply: Reply, marks: Sequence[Sequence[Mark]], texts: Sequence[str] | None, more: bool) -> None:
        """Put the prompt in front of what will be written, if anything will."""
        for choice in reply.choices if texts is not None else ():
            at = choice.index // reply.body.n
            choice.text, choice.finish = (texts or [])[at], None if more else "length"
            if reply.wants_logprobs:
                choice.marks = [Mark(m.token, m.logp, None, m.top[: reply.top]) for m in marks[at]]

    async def unless_gone(self, receive: Callable[[], Awaitable[Any]], work: Coroutine[Any, Any, T]) -> T | None:
        """Do the work; if the client hangs up before it is done, drop it. (The framework's own way waits for a moment in
        which no token has arrived, and such a moment may never come.)"""

        async def gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        task, left = asyncio.create_task(work), asyncio.create_task(gone())
        self.working.add(task)
        task.add_done_callback(self.working.discard)
        try:
            await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
            if task.cancelled():
                raise ApiError(503, "the server is being stopped.")
            return task.result() if task.done() else None
        finally:
            task.cancel()
            left.cancel()
            await asyncio.gather(task, left, return_exceptions=True)

    def stop(self) -> None:
        """Whoever is still waiting hears that the server is being stopped."""
        for task in self.working:
            task.cancel()

    def known(self, model: str | None) -> None:
        if model is not None and model != self.name:
            raise ApiError(404, f"there is no model '{model}' here, only '{self.name}'.", "model", "model_not_found")

    def readable(self, texts: Sequence[Any]) -> None:
        """Refuse a text that cannot fit whatever its tokens are: to encode megabytes would hold up everyone."""
        for text in texts:
            if isinstance(text, str) and len(text) > self.most_letters:
                raise ApiError(400, f"{len(text)} characters are too many.", code="context_length_exceeded")

    def check(self, tokens: Tokens, param: str, ask: Ask | None = None) -> None:
        if len(tokens) > self.engine.max_len - (ask is not None):
            raise ApiError(
                400,
                f"this is {len(tokens)} tokens long; '{self.name}' holds {self.engine.max_len}, what it writes included.",
                param,
                "context_length_exceeded",
            )
        try:
            self.engine.check(ask or Ask(tokens[:1]))
            if tokens and max(tokens) >= self.engine.lm.vocab:
                raise EngineError(f"token {max(tokens)} is unknown: '{self.name}' has {self.engine.lm.vocab}")
        except EngineError as problem:
            raise ApiError(400, str(problem), param) from None


def event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(',', ':'))}\n\n"


async def received(request: Request) -> bytes:
    """The body, if it is not too large and arrives in time."""
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(PATIENCE_S):
            async for part in request.stream():
                size += len(part)
                if size <= MOST_BYTES:
                    parts.append(part)
                elif size > PATIENCE_BYTES:
                    break
    except ClientDisconnect:
        raise ApiError(400, "the client left before its request was whole.") from None
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {PATIENCE_S} s.") from None
    if size > MOST_BYTES:
        raise ApiError(413, f"the body is larger than {MOST_BYTES >> 20} MB.", code="request_too_large")
    return b"".join(parts)
