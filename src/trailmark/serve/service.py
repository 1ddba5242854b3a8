"""Between the routes and the engine: the queue, tokens as they are drawn, and clients that disconnect."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import logging
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from trailmark.engines.base import EngineError
from trailmark.engines.base import Request as Ask
from trailmark.engines.local import LocalEngine
from trailmark.engines.running import Listener, Written
from trailmark.errors import TrailmarkError
from trailmark.rollout.encode import encode
from trailmark.rollout.play import stop_ids
from trailmark.score.values import HeadValues
from trailmark.serve.answers import Mark, Names, Reply, Whole, json_response
from trailmark.serve.body import (
    Body,
    ChatBody,
    CompletionBody,
    Message,
    Sampling,
    ScoreBody,
    ValuesBody,
    listed,
    read,
)
from trailmark.serve.capacity import ANSWER, Capacity, Queue, answer_size, client_of, holding_answer
from trailmark.serve.errors import ApiError, api_error
from trailmark.serve.prompt_format import PromptFormat, plain_format
from trailmark.serve.received import received
from trailmark.serve.score import score_rows
from trailmark.serve.search import allow_search, answer_of, search_all, sequences, value_rows
from trailmark.serve.threads import Lane, WorkerThreads
from trailmark.types import Tokens

IN_HAND = 256 << 20  # most bytes of bodies in work, over all requests
ALTERNATIVES = 1 << 19  # most alternative tokens (top_logprobs) of one request; four times that for all
ROWS_AT_ONCE = 16  # rows of a request that are encoded, scored or valued before those of another
UNREAD = 1 << 20  # most tokens of streams, over all clients, that wait to be read
LARGE = 1 << 16  # bytes of a body from which on its texts are read in a thread of their own; the same of an answer
CHOICE = 100  # bytes of an answer for each of its texts
RENDERED = 1 << 18  # most messages to render for one request: a score renders each turn with its past
BREAKS = re.compile("[\x7f-\x9f\u2028\u2029]")

log = logging.getLogger("uvicorn.error")
T = TypeVar("T")
B = TypeVar("B", bound=Body)


class Stream(StreamingResponse):
    """The events of one request. However it ends, its generator is closed (which frees the slots) and its share of the
    limits is returned."""

    def __init__(self, events: AsyncGenerator[str, None], service: Service, held: contextlib.ExitStack):
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.events, self.service, self.held = events, service, held

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await self.service.unless_disconnected(receive, self.stream_response(send))
        except ApiError as problem:  # the server is stopping
            await send({"type": "http.response.body", "body": event(problem.body()).encode()})
        finally:
            self.held.close()
            await self.events.aclose()


class Service:
    """The engine behind the routes."""

    def __init__(
        self,
        engine: LocalEngine,
        name: str,
        queue: int = 512,
        values: HeadValues | None = None,
        prompt_format: PromptFormat | None = None,
        stop: Sequence[str] = (),
    ):
        self.values, self.stop_texts = values, tuple(stop)
        self.engine, self.name, self.names = engine, name, Names(engine.tokenizer)
        self.tokenizer = copy.deepcopy(engine.tokenizer)  # for the reading thread: other threads decode meanwhile
        self.prompt_format = prompt_format or plain_format(self.tokenizer)
        self.capacity, self.started = Queue(engine.slots + queue), int(time.time())
        self.tops, self.bytes = Capacity(4 * ALTERNATIVES, "alternatives"), Capacity(IN_HAND, "bytes")
        self.answers = Capacity(4 * ANSWER, "bytes of answers")
        self.threads = WorkerThreads()
        self.working: set[asyncio.Task] = set()
        self.unread = 0  # tokens of streams that clients have not read
        self.scoring = asyncio.Lock()  # of the engine's loop: between two passes over rows every slot draws a token
        self.most_letters = engine.max_len * max(map(len, self.tokenizer.get_vocab()))

    @contextlib.asynccontextmanager
    async def asked(self, kind: type[B], request: Request) -> AsyncIterator[tuple[B, Lane]]:
        """A request's body, parsed outside the event loop, and the thread in which to read its texts. Its bytes count
        against the limit while it is in work."""
        client = client_of(request)
        with contextlib.ExitStack() as held:
            data = await received(request, lambda n: held.enter_context(self.bytes.holding(n, client)))
            large = len(data) > LARGE
            body = await self.threads.run("large" if large else "texts", read, kind, data)
            self.check_model_name(body.model)
            talks = isinstance(body, ChatBody | ValuesBody) or (isinstance(body, ScoreBody) and body.messages)
            yield body, "large" if large else "chats" if talks else "texts"

    async def complete(self, request: Request) -> Response:
        async with self.asked(CompletionBody, request) as (body, lane):
            texts = listed(body.prompt)
            self.capacity.check_room(len(texts) * body.n, client_of(request))
            self.check_length(texts)
            check = lambda p: self.check_size(p, "prompt", self.engine.max_len - 1)
            lane = "large" if len(texts) > ROWS_AT_ONCE else lane
            prompts = await self.read_rows(lane, body.prompts(self.tokenizer), check)
            budget = 16 if body.max_tokens is None else body.max_tokens
            if budget == 0 and not body.echo:
                raise ApiError(400, "max_tokens 0 is allowed only with 'echo'.", "max_tokens")
            return await self.answer(request, body, prompts, budget, stop_ids(self.tokenizer), lane)

    async def chat(self, request: Request) -> Response:
        async with self.asked(ChatBody, request) as (body, lane):
            if body.top_logprobs and not body.logprobs:
                raise ApiError(400, "top_logprobs needs logprobs: true.", "top_logprobs")
            self.check_conversation(body.messages)
            prompt, ends = await self.threads.run(lane, self.prompt, body)
            budget = body.max_completion_tokens or body.max_tokens
            if budget == 0:
                raise ApiError(400, "max_tokens must be at least 1.", "max_tokens")
            budget = budget or max(1, self.engine.max_len - len(prompt))
            return await self.answer(request, body, [prompt], budget, ends, lane)

    def prompt(self, body: ChatBody) -> tuple[Tokens, Tokens]:
        """The prompt, and the tokens that end the answer."""
        messages = [m.plain() for m in body.messages]
        begun = messages.pop()["content"] if body.continue_final_message else ""
        prompt = self.prompt_format.prompt(self.tokenizer, messages, body.chat_template_kwargs)
        return prompt + tuple(encode(self.tokenizer, begun)), self.prompt_format.stops(self.tokenizer)

    async def score(self, request: Request) -> Response:
        """Log-probs of given tokens: whole sequences, or completions after a prompt or a conversation."""
        async with self.asked(ScoreBody, request) as (body, lane):
            texts = [] if body.completion is None else listed(body.completion)
            if body.messages is not None:
                self.check_conversation(body.messages, len(texts))
            given = listed(body.tokens if body.tokens is not None else body.prompt or "")
            self.capacity.check_room(max(len(given), len(texts)), client_of(request))
            self.check_length([*given, *texts])
            made = score_rows(body, self.tokenizer, self.prompt_format)
            rows = await self.read_rows(lane, made, lambda row: self.check(row[0], "tokens"))
            size = 70 * sum(len(tokens) - start for tokens, start in rows)
            sending = contextlib.ExitStack()
            with self.capacity.place(len(rows), client_of(request)), sending:
                sending.enter_context(holding_answer(self.answers, size, client_of(request)))
                scored = await self.unless_disconnected(request.receive, self.threads.engine(self.scored(rows)))
                if scored is None:
                    return Response(status_code=499)
                told = await self.threads.run("large answers" if size > LARGE else "answers", self.scores, rows, scored)
                return Whole(told, sending.pop_all())

    def scores(self, rows: Sequence[tuple[Tokens, int]], scored: Sequence[Sequence[float]]) -> Response:
        data = [
            {"index": i, "token_ids": tokens[start:], "token_logprobs": logp, "sum": sum(logp), "count": len(logp)}
            for i, ((tokens, start), logp) in enumerate(zip(rows, scored))
        ]
        used = sum(len(tokens) for tokens, _ in rows)
        usage = {"prompt_tokens": used, "completion_tokens": 0, "total_tokens": used}
        return json_response({"object": "score", "model": self.name, "data": data, "usage": usage})

    async def scored(self, rows: Sequence[tuple[Tokens, int]]) -> list[list[float]]:
        """With fixed shapes each row is scored alone, so its numbers do not depend on the others. Otherwise rows share
        their prefixes."""
        out, each = [], 1 if self.engine.fixed else ROWS_AT_ONCE
        for k in range(0, len(rows), each):
            async with self.scoring:
                out += self.engine.score_rows(*zip(*rows[k : k + each]))
                await asyncio.sleep(0)
        return out

    async def value(self, request: Request) -> list[float] | None:
        """Values of texts, tokens or conversations, each at its last token. None if the client has left."""
        async with self.asked(ValuesBody, request) as (body, lane):
            if self.values is None:
                raise ApiError(404, "this server has no value model: start it with --value RUN.", code="no_value_model")
            self.capacity.check_room(len(body.states), client_of(request))
            self.check_length([s for s in body.states if isinstance(s, str)])
            talks: list[Any] = [s for s in body.states if not isinstance(s, str) and isinstance(s[0], Message)]
            for talk in talks:
                self.check_conversation(talk, len(talks))
            made = value_rows(body, self.tokenizer, self.prompt_format)
            rows = await self.read_rows(lane, made, lambda row: self.check(row, "states"))
            with self.capacity.place(len(rows), client_of(request)):
                return await self.unless_disconnected(request.receive, self.threads.engine(self.valued(rows)))

    async def valued(self, rows: Sequence[Tokens]) -> list[float]:
        """A few rows at a time, so that requests take turns, and that nothing more is computed for a client that has
        left."""
        assert self.values is not None
        out: list[float] = []
        for k in range(0, len(rows), ROWS_AT_ONCE):
            async with self.scoring:
                out += await self.values.values(rows[k : k + ROWS_AT_ONCE])
        return out

    async def answer(
        self, request: Request, body: Sampling, prompts: Sequence[Tokens], budget: int, ends: Tokens, reading: Lane
    ) -> Response:
        if body.stream and body.prompt_logprobs is not None:
            raise ApiError(400, "prompt_logprobs cannot be streamed.", "prompt_logprobs")
        # thousands of prompts would hold up the event loop, and a schema any thread
        reading = "large" if body.response_format is not None else reading
        asks, reply = await self.threads.run(reading, self.asks, body, prompts, ends, budget)
        echo = None
        if isinstance(body, CompletionBody) and body.echo:
            given = listed(body.prompt)
            texts = (p if isinstance(p, str) else self.tokenizer.decode(p) for p in given)
            echo = await self.read_rows(reading, texts, lambda _: None)
        plan = allow_search(body, self.values is not None, echo is not None, self.capacity.limit * self.engine.max_len)
        size = len(prompts) * (body.n if plan is None else sequences(plan))
        rooms = [min(budget, self.engine.max_len - len(p)) for p in prompts]
        bytes_ = answer_size(reply, prompts, rooms, echo is not None, plan)
        lane: Lane = "large answers" if bytes_ + CHOICE * size > LARGE else "answers"
        client = client_of(request)
        with contextlib.ExitStack() as held, contextlib.ExitStack() as sending:
            held.enter_context(self.capacity.place(size, client, slots=budget > 1))
            tops = self.alternatives(reply, prompts, budget, echo is not None)
            sending.enter_context(holding_answer(self.answers, bytes_, client))
            held.enter_context(self.tops.holding(tops, client))
            if body.stream:
                held.enter_context(sending.pop_all())
                return Stream(self.events(reply, asks if budget else [], echo), self, held.pop_all())
            if plan is not None:
                by = self.values if body.search and body.search.by == "value" else None
                work = self.threads.engine(search_all(self.engine, by, plan, asks))
                found = await self.unless_disconnected(request.receive, work)
                if found is not None:
                    made = await self.threads.run(lane, lambda: json_response(answer_of(reply, found)))
                    return Whole(made, sending.pop_all())
            elif done := await self.unless_disconnected(
                request.receive, self.whole(reply, asks if budget else [], echo, lane)
            ):
                return Whole(done, sending.pop_all())
            return Response(status_code=499)  # the client has left

    def asks(self, body: Sampling, prompts: Sequence[Tokens], ends: Tokens, budget: int) -> tuple[list[Ask], Reply]:
        """What the engine is asked, checked, and the answer to be filled."""
        asks = body.requests(prompts, ends, max(budget, 1), self.stop_texts)
        for ask in asks:
            self.check(ask.prompt, "messages" if isinstance(body, ChatBody) else "prompt", ask)
        return asks, Reply(body, self.names, self.name, prompts, asks[0].stop_strings)

    def alternatives(self, reply: Reply, prompts: Sequence[Tokens], budget: int, echo: bool) -> int:
        """The largest number of alternative tokens that the answer can hold."""
        n, given = reply.body.n, sum(map(len, prompts))
        room = sum(min(budget, self.engine.max_len - len(p)) for p in prompts)
        asked = (reply.body.prompt_logprobs or 0) * (1 if reply.chat else n)  # each choice repeats them
        wanted = reply.top * n * room + given * (reply.top * n * echo + asked)
        if wanted > ALTERNATIVES:
            raise ApiError(
                400,
                f"this asks for {wanted} alternatives to tokens; the limit is {ALTERNATIVES}: ask for fewer top "
                "log-probs, samples or tokens (max_tokens).",
                "top_logprobs" if reply.chat else "logprobs",
            )
        return wanted

    async def whole(self, reply: Reply, asks: Sequence[Ask], echo: Sequence[str] | None, lane: Lane) -> Response:
        marks = await self.threads.engine(self.prompt_marks(reply, echo is not None))
        self.echo(reply, marks, echo, bool(asks))
        await self.threads.engine(self.drawn(reply, asks))
        return await self.threads.run(lane, lambda: json_response(reply.whole(marks)))

    async def drawn(self, reply: Reply, asks: Sequence[Ask]) -> None:
        """In the engine's loop: draw all samples and pass on their tokens as they come."""

        def ear(first: int) -> Listener:
            def listen(w: Written) -> None:
                reply.hear(first + w.sample, w, grow=False)

            return listen

        tasks, some = [], max(ROWS_AT_ONCE, self.engine.slots)
        try:
            for i, a in enumerate(asks):
                tasks.append(asyncio.create_task(self.engine.sample(a, ear(i * a.n), reply.top, reply)))
                if i % some == some - 1:  # to start thousands takes long: others come in between
                    await asyncio.sleep(0)
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # one has failed, or the client has left
                task.cancel()

    async def events(self, reply: Reply, asks: Sequence[Ask], echo: Sequence[str] | None) -> AsyncGenerator[str, None]:
        try:
            marks = await self.threads.engine(self.prompt_marks(reply, echo is not None))
            self.echo(reply, marks, echo, bool(asks))
            for choice in reply.choices:
                if first := await self.threads.run("answers", reply.opening, choice):
                    yield event(first)
            async with contextlib.aclosing(self.write(asks, reply)) as heard:
                async for index, written in heard:
                    if chunk := reply.chunk(reply.hear(index, written)):
                        yield event(chunk)
            if reply.body.stream_options.include_usage:
                yield event(reply.closing())
        except Exception as problem:  # the status was already sent, so an error is one more event
            if not isinstance(problem, ApiError | TrailmarkError):
                log.exception("an answer failed")
            yield event(api_error(problem).body())
        yield "data: [DONE]\n\n"

    async def write(self, asks: Sequence[Ask], reply: Reply) -> AsyncGenerator[tuple[int, Written], None]:
        """The tokens of all samples as they are drawn, numbered over all requests. Leaving early frees their slots."""
        heard: asyncio.Queue[tuple[int, Written] | asyncio.Task] = asyncio.Queue()
        here = asyncio.get_running_loop()
        tasks: list[asyncio.Task] = []
        slow = False

        def put(item: tuple[int, Written] | asyncio.Task) -> None:
            """Keep what the client has not read yet. If all clients together leave too much, one that leaves much is
            given up."""
            nonlocal slow
            if slow and not isinstance(item, asyncio.Task):
                return
            self.unread += 1
            heard.put_nowait(item)
            if self.unread > UNREAD and heard.qsize() > UNREAD // 64 and not slow:
                slow = True
                for task in tasks:
                    task.cancel()
                while not heard.empty():  # it may be long until it reads again
                    heard.get_nowait()
                    self.unread -= 1

        def ear(first: int) -> Listener:
            def listen(w: Written) -> None:
                with contextlib.suppress(RuntimeError):  # the server has ended
                    here.call_soon_threadsafe(put, (first + w.sample, w))

            return listen

        left = sum(ask.n for ask in asks)
        try:
            for i, ask in enumerate(asks):
                work = self.engine.sample(ask, ear(i * ask.n), reply.top, reply)
                tasks.append(asyncio.create_task(self.threads.engine(work)))
                tasks[-1].add_done_callback(put)
                if i % ROWS_AT_ONCE == ROWS_AT_ONCE - 1:  # to start thousands takes long: others come in between
                    await asyncio.sleep(0)
            while left:
                item = await heard.get()
                self.unread -= 1
                if slow:
                    raise ApiError(503, "too much of the answers was not read: read faster.")
                if isinstance(item, asyncio.Task):
                    item.result()  # raises if the engine failed
                else:
                    yield item
                    left -= item[1].done is not None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.unread -= heard.qsize()

    async def prompt_marks(self, reply: Reply, echo: bool) -> list[list[Mark]]:
        """Log-probs of the prompts, if they are wanted."""
        asked = reply.body.prompt_logprobs
        if asked is None and not (echo and reply.wants_logprobs):
            return []
        top, out = max(asked or 0, reply.top), []
        for p in reply.prompts:
            async with self.scoring:
                scored = [
                    Mark(t, lp, None, tuple(best), rank)
                    for t, (lp, rank, best) in zip(p[1:], self.engine.score_top(p, top))
                ]
                out.append([Mark(p[0], None), *scored])
                await asyncio.sleep(0)
        return out

    def echo(self, reply: Reply, marks: Sequence[Sequence[Mark]], texts: Sequence[str] | None, more: bool) -> None:
        """Put the prompt before the text that will be written, if any will."""
        for choice in reply.choices if texts is not None else ():
            at = choice.index // reply.body.n
            choice.text, choice.finish = (texts or [])[at], None if more else "length"
            if reply.wants_logprobs:
                choice.marks = [Mark(m.token, m.logp, None, m.top[: reply.top]) for m in marks[at]]

    async def unless_disconnected(
        self, receive: Callable[[], Awaitable[Any]], work: Coroutine[Any, Any, T]
    ) -> T | None:
        """Do the work; drop it if the client disconnects first. (The framework's own way waits for a moment in which no
        token has arrived, and such a moment may never come.)"""

        async def gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        task, left = asyncio.create_task(work), asyncio.create_task(gone())
        self.working.add(task)
        task.add_done_callback(self.working.discard)
        try:
            await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
            if task.cancelled():
                raise ApiError(503, "the server is stopping.")
            return task.result() if task.done() else None
        finally:
            task.cancel()
            left.cancel()
            await asyncio.gather(task, left, return_exceptions=True)

    def stop(self) -> None:
        """Tell all waiting clients that the server is stopping."""
        for task in self.working:
            task.cancel()

    def close(self) -> bool:
        """End the threads. Returns whether they have ended: one may be in a long computation."""
        return self.threads.close()

    def check_model_name(self, model: str | None) -> None:
        if model is not None and model != self.name:
            raise ApiError(404, f"there is no model '{model}' here, only '{self.name}'.", "model", "model_not_found")

    def check_length(self, texts: Sequence[Any]) -> None:
        """Refuse a text that is too long for any tokenizer: encoding megabytes would delay everyone."""
        for text in texts:
            if isinstance(text, str) and len(text) > self.most_letters:
                raise ApiError(400, f"{len(text)} characters are too many.", code="context_length_exceeded")

    def check_conversation(self, messages: Sequence[Message], times: int = 1) -> None:
        """Refuse a conversation that is too long, or that must be rendered too often (`times`: completions)."""
        if sum(m.letters for m in messages) > self.most_letters:
            raise ApiError(400, "the messages have too many characters.", "messages", "context_length_exceeded")
        turns = 1 + sum(m.role == "assistant" for m in messages)
        if times > 1 and turns * len(messages) * times > RENDERED:
            raise ApiError(400, "the conversation is too long for so many completions: ask for fewer.", "messages")

    async def read_rows(self, lane: Lane, rows: Iterator[T], check: Callable[[T], None]) -> list[T]:
        """All rows of a request. After a few, others get the thread. The first wrong row ends it."""

        def some() -> list[T]:
            return [row for row in islice(rows, ROWS_AT_ONCE) if check(row) is None]

        out: list[T] = []
        while part := await self.threads.run(lane, some):
            out += part
        return out

    def check_size(self, tokens: Tokens, param: str, most: int) -> None:
        if len(tokens) > most:
            raise ApiError(
                400,
                f"this is {len(tokens)} tokens long; '{self.name}' holds {self.engine.max_len}, its answer included.",
                param,
                "context_length_exceeded",
            )

    def check(self, tokens: Tokens, param: str, ask: Ask | None = None) -> None:
        self.check_size(tokens, param, self.engine.max_len - (ask is not None))
        try:
            self.engine.check(ask or Ask(tokens[:1]))
            if tokens and max(tokens) >= self.engine.vocab:
                raise EngineError(f"token {max(tokens)} is unknown: '{self.name}' has {self.engine.lm.vocab}")
        except EngineError as problem:
            raise ApiError(400, str(problem), param) from None


def event(data: dict[str, Any]) -> str:
    """A server-sent event. Some clients break lines wherever `str.splitlines` does, so those characters are escaped.
    `json.dumps` escapes the others of that kind."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    text = BREAKS.sub(lambda m: f"\\u{ord(m[0]):04x}", text)
    return f"data: {text}\n\n"
