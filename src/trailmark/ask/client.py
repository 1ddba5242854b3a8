"""Ask a language model: judges, teachers, writers and whoever else has a question.

    client = Client(engine, Store(path), law=SamplingLaw(0.7))
    answer = await client.ask("Which is better?", 200)                         an `Answer`: text, stop, tokens
    mark = await client.ask(question, 200, form=FORM, read=read_mark, again=2)
    answer = await client.ask(question, 200, schema={"type": "object", ...})   the text is JSON of this schema

An engine is a server or a model in this process. Every answer is stored by the content of its question as soon as it
arrives, so nothing is asked twice, and a killed process loses nothing. If `read` finds an answer `Unreadable`, the
model is told why and asked again. If there is no answer, it is `NoAnswer`: it is counted, and `settle` ends the work if
it happened too often. The next time only these questions are asked.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from trailmark.ask.store import Store, content_key
from trailmark.chat import end_of_turn, render
from trailmark.config import ServerConfig
from trailmark.engines.base import Completion, EngineError, Request, SchemaError
from trailmark.engines.http_client import EngineGarbage, EngineStatus
from trailmark.errors import TrailmarkError, Unfinished
from trailmark.failures import Tries
from trailmark.progress import Progress
from trailmark.run_async import wait
from trailmark.seats.open import connect
from trailmark.types import SamplingLaw, Tokens

T = TypeVar("T")
R = TypeVar("R")
Messages = Sequence[Mapping[str, str]]
REFUSALS = {401, 403, 404}  # the server would refuse every question, so the work stops
GARBAGE_TRIES = 3


class Unreadable(Exception):
    """An answer that does not have the right form. The text tells the model why."""


class Unusable(TrailmarkError):
    """One question has no usable answer. It is counted under `reason`."""

    def __init__(self, reason: str, message: str = ""):
        super().__init__(message or reason)
        self.reason = reason


class NoAnswer(Unusable):
    """The model did not answer one question."""


class Refused(Unfinished):
    """The server refuses every question."""


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    stop: str  # why it ended, as of a turn (`types.Stop`)
    tokens: int | None = None  # that were written; None: the server did not say
    prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """`draw` names the random draws; if it is empty, they depend on the whole question."""

    messages: Messages
    max_tokens: int
    law: SamplingLaw = SamplingLaw()
    stops: tuple[str, ...] = ()
    seed: int = 0
    draw: str = ""
    schema: Mapping[str, Any] | None = None

    def key(self, who: str) -> str:
        """The key of its answer, if `who` is asked."""
        law = self.law
        rest = {"top_p": law.top_p if law.top_p < 1 else 0, "top_k": law.top_k, "min_tokens": law.min_tokens,
                "stop": list(self.stops), "seed": self.seed, "draw": self.draw, "schema": self.schema}  # fmt: skip
        more = {k: v for k, v in rest.items() if v not in (0, "", [], None)}
        asked = [who, law.temperature, self.max_tokens, [dict(m) for m in self.messages]]
        return content_key([*asked, more] if more else asked)


@dataclass
class Used:
    """What a client has used. `price`: dollars for a million tokens of prompts, and of answers."""

    asked: int = 0  # questions that were sent; the answers to the others were stored
    prompt_tokens: int = 0
    tokens: int = 0
    price: tuple[float, float] | None = None

    def add(self, answer: Answer) -> None:
        self.prompt_tokens += answer.prompt_tokens or 0
        self.tokens += answer.tokens or 0

    @property
    def cost(self) -> float | None:
        """In dollars; None if the price is unknown."""
        return self.price and (self.prompt_tokens * self.price[0] + self.tokens * self.price[1]) / 1e6

    def as_dict(self) -> dict[str, Any]:
        return {**{k: v for k, v in asdict(self).items() if k != "price"}, "cost": self.cost}


@dataclass
class Client:
    """A model that is asked. `engine` is an open one, or a function that opens it for the first question. `who` is what
    answers depend on: the model's name, or a print of its weights. With `tries`, failures are counted, and a server
    that is gone ends the work. `empty`: an answer without words is an answer."""

    engine: Any
    store: Store = field(default_factory=Store)
    name: str = ""
    who: str = ""
    law: SamplingLaw = SamplingLaw()
    at_once: int = 32  # questions at the same time, for those who ask many
    tries: Tries | None = None
    empty: bool = True
    price: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        self.name = self.name or self.engine.name
        self.used = Used(price=self.price)
        self._asking: dict[str, asyncio.Lock] = {}
        self._unread: set[str] = set()  # answers of this process that could not be read

    async def ask(
        self, question: str | Messages, max_tokens: int, *, form: str = "", read: Callable[[str], T] | None = None,
        again: int = 0, law: SamplingLaw | None = None, stops: Sequence[str] = (), seed: int = 0, draw: str = "",
        schema: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        """What `read` finds in the answer; without `read`, the `Answer`. `form`, the form that the answer must have, is
        said after the question, and each of the `again` times that an answer is `Unreadable`."""
        talk = [{"role": "user", "content": question}] if isinstance(question, str) else [dict(m) for m in question]
        ask = "\n\n" + form if form else ""
        talk[-1] = {**talk[-1], "content": talk[-1]["content"] + ask}
        keys, problem = [], Unreadable()
        for _ in range(again + 1):
            q = Question(list(talk), max_tokens, law or self.law, tuple(stops), seed, draw, schema)
            answer = await self.answer(q)
            keys.append(self._key(q))
            try:
                return answer if read is None else read(answer.text)
            except Unreadable as why:
                problem = why
                talk += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": f"{why}.{ask}"}]
        self._unread.update(keys)
        for key in keys:  # a model that is mended is asked again by the next process
            self.store.add(key, {**self.store[key], "unread": True})
        raise problem

    async def answer(self, q: Question) -> Answer:
        """The stored answer to a question, or a new one."""
        key = self._key(q)
        if (kept := self.stored(q)) is not None:
            return self._count(kept)
        async with self._asking.setdefault(key, asyncio.Lock()):  # who asks the same meanwhile waits for the answer
            if (kept := self.stored(q)) is not None:
                return self._count(kept)
            try:
                answer = await self._ask(q, key)
                row = {k: v for k, v in asdict(answer).items() if v is not None}
                self.store.add(key, {"question": q.messages[-1]["content"][:1000], **row})
            except NoAnswer as problem:
                if self.tries is not None:
                    self.tries.failed(str(problem))
                raise
            finally:
                self._asking.pop(key, None)
        self.used.add(answer)
        return self._count(answer, new=True)

    def stored(self, q: Question) -> Answer | None:
        key = self._key(q)
        if key not in self.store or ("unread" in self.store[key] and key not in self._unread):
            return None
        row = self.store[key]
        return Answer(row["text"], row.get("stop", "stopped"), row.get("tokens"), row.get("prompt_tokens"))

    def settle(self, first: str = "") -> None:
        """Raise an error if too many questions were not answered since the last call. `first` names the first one."""
        if self.tries is not None:
            self.tries.settle(first)

    def _key(self, q: Question) -> str:
        return q.key(self.who or self.name)

    def _count(self, answer: Answer, new: bool = False) -> Answer:
        if self.tries is not None:
            self.tries.passed(new)
        return answer

    async def _ask(self, q: Question, key: str) -> Answer:
        problem: EngineError | None = None
        for _ in range(GARBAGE_TRIES):
            self.used.asked += 1
            try:
                done = await self.say(q, q.draw or key)
                text = done.text.encode("utf-8", "replace").decode()  # half a surrogate pair is not text
                if text.strip() or self.empty:
                    read, written = done.usage or (None, len(done.tokens) or None)
                    return Answer(text, done.stop, written, read)
                problem = EngineGarbage("the answer has no text")
            except EngineGarbage as garbage:
                problem = garbage
            except SchemaError:
                raise
            except EngineError as broken:
                status = broken.status if isinstance(broken, EngineStatus) else None
                if self.tries is not None and status in REFUSALS:
                    raise Refused(f"'{self.name}' refuses every question: {broken}") from broken
                what = "no answer" if status is None else f"status {status}"
                raise NoAnswer(f"{what} from the server", str(broken)) from broken
        raise NoAnswer("garbage from the server", str(problem)) from problem

    def open(self) -> Any:
        if callable(self.engine):
            self.engine = self.engine()
        return self.engine

    async def say(self, q: Question, draw: str) -> Completion:
        """The answer of the engine itself."""
        engine = self.open()
        schema = json.dumps(q.schema) if q.schema is not None else ""
        if hasattr(engine, "chat"):  # a server applies its own template
            how = {"schema": schema, "text_only": True}
            (done,) = await engine.chat(q.messages, q.law, q.max_tokens, q.stops, q.seed, draw, **how)
            return done
        ends = ends_of(engine.tokenizer)
        law = replace(q.law, stop_ids=ends) if q.law.min_tokens else q.law
        prompt = prompt_of(engine.tokenizer, q.messages)
        (done,) = await engine.sample(Request(prompt, law, 1, q.max_tokens, ends, q.stops, q.seed, draw, schema))
        return replace(done, usage=(len(prompt), len(done.tokens)))


def open_teacher(
    url: str, model: str, answers: Path | None = None, *, api_key: str | None = None, api_version: str | None = None,
    temperature: float = 0.7, top_p: float = 0.9, at_once: int = 8, deadline: float = 120.0, retries: int = 5,
    backoff: float = 0.5, failures: float = 0.0,
) -> Client:  # fmt: skip
    """A model behind `url`, which ends before /v1, or is Azure's .../deployments/NAME (see `http_client.address`)."""
    if not url.startswith(("http://", "https://")):
        raise TrailmarkError(f"teacher '{url}' is neither 'offline' nor an address: it must begin with http.")
    query = {"api-version": api_version} if api_version else {}
    server = ServerConfig(address=url, model=model, query=query, concurrency=at_once, deadline=deadline,
                          retries=retries, backoff=backoff)  # fmt: skip
    tries = Tries(f"questions to '{model}'", failures)
    law = SamplingLaw(temperature, top_p)
    engine = connect(server, api_key=api_key)
    return Client(engine, Store(answers, text="text"), law=law, at_once=at_once, tries=tries, empty=False)


def _template(tokenizer: Any) -> str | None:
    return "own" if getattr(tokenizer, "chat_template", None) else None


def prompt_of(tokenizer: Any, messages: Messages) -> Tokens:
    """The prompt of a question to a model in this process: by its template, or as plain text."""
    return render(tokenizer, messages, generation_prompt=True, template=_template(tokenizer)).tokens


def ends_of(tokenizer: Any) -> Tokens:
    """The tokens that end an answer."""
    return tuple(sorted({end_of_turn(tokenizer, template=_template(tokenizer)), tokenizer.eos_token_id} - {None}))


def ask_each(name: str, items: Sequence[T], work: Callable[[T], Awaitable[R]], at_once: int) -> list[R]:
    """The results of `work`, which asks about one item, under a progress bar."""
    with Progress(max(1, len(items)), name=name) as bar:
        return wait(run_limited(items, work, at_once, lambda n: bar.update(n, {})))


async def run_limited(
    items: Sequence[T], work: Callable[[T], Awaitable[R]], limit: int, done: Callable[[int], None] = lambda n: None
) -> list[R]:
    """The results of `work` for each item, in order, with at most `limit` at the same time. The first error ends it
    all. `done` is called with the number of finished items."""
    made: dict[int, R] = {}
    waiting = iter(enumerate(items))

    async def worker() -> None:
        for index, item in waiting:
            made[index] = await work(item)
            done(len(made))

    workers = [asyncio.ensure_future(worker()) for _ in range(max(1, min(limit, len(items))))]
    try:
        await asyncio.gather(*workers)
    finally:
        for w in workers:
            w.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [made[i] for i in range(len(items))]
