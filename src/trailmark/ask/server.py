"""Ask a model behind a server, each question once: the answers are kept in a file (`answers.py`).

If an answer cannot be used, it is `TeacherFailed`: the question is counted and left out. If there is none, it is
`NoAnswer`, and `settle` ends the stage if that happened too often: the next time only these questions are asked. If the
server is gone, or refuses the key or the model, it is `TeacherGone`: the work stops and can be resumed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from trailmark.ask.answers import Answers, request_key
from trailmark.engines.base import EngineError
from trailmark.engines.http_client import EngineGarbage, EngineStatus, Wire, address
from trailmark.errors import TrailmarkError, Unfinished
from trailmark.failures import PATIENCE, must_be_few

T = TypeVar("T")
R = TypeVar("R")
REFUSALS = {401, 403, 404}  # the server would refuse every question, so the work stops
GARBAGE_TRIES = 3


class TeacherFailed(TrailmarkError):
    """One question has no usable answer. It is counted under `reason`."""

    def __init__(self, reason: str, message: str = ""):
        super().__init__(message or reason)
        self.reason = reason


class NoAnswer(TeacherFailed):
    """The server did not answer one question."""


class TeacherGone(Unfinished):
    """The teacher does not answer any more."""


class Asked:
    """A model behind `url`, which ends before /v1, or is Azure's .../deployments/NAME (see `http_client.address`)."""

    def __init__(
        self,
        url: str,
        model: str,
        answers: Answers | None = None,
        *,
        api_key: str | None = None,
        api_version: str | None = None,
        headers: Mapping[str, str] | None = None,
        temperature: float = 0.7,
        top_p: float = 0.9,
        at_once: int = 8,
        deadline: float = 120.0,
        retries: int = 5,
        backoff: float = 0.5,
        failures: float = 0.0,
    ):
        if not url.startswith(("http://", "https://")):
            raise TrailmarkError(f"teacher '{url}' is neither 'offline' nor an address: it must begin with http.")
        self.name, self.at_once, self.answers = model, at_once, answers or Answers()
        self.law = {"temperature": temperature, "top_p": top_p}
        at = address(url)
        own = at.key(api_key, api_version is not None)
        query = {**at.query, **({"api-version": api_version} if api_version else {})}
        self.wire = Wire(at.base, {**own, **(headers or {})}, query, at_once, deadline, retries, backoff)
        self.path = at.chat
        self._asking: dict[str, asyncio.Lock] = {}
        self.asked = self.failed = 0
        self.failures, self.questions, self.unanswered = failures, 0, list[str]()

    async def say(
        self, messages: Sequence[Mapping[str, str]], tokens: int, law: Mapping[str, Any] | None = None
    ) -> str:
        """The answer to messages: the stored one, or a new one, which is then stored. `law` replaces or adds settings
        of the sampling."""
        body = {"model": self.name, "messages": list(messages), "max_tokens": tokens, **self.law, **(law or {})}
        key = request_key(body)
        self.questions += 1
        if (kept := self.answers.get(key)) is not None:
            return kept
        async with self._asking.setdefault(key, asyncio.Lock()):  # who asks the same meanwhile waits for the answer
            if (kept := self.answers.get(key)) is not None:
                return kept
            try:
                text = await self._ask(body, key)
                self.answers.put(key, text)
            except NoAnswer as problem:
                self.unanswered.append(str(problem))
                raise
            finally:
                self._asking.pop(key, None)
        self.failed = 0
        return text

    async def _ask(self, body: dict[str, Any], key: str) -> str:
        problem: EngineError | None = None
        for _ in range(GARBAGE_TRIES):
            self.asked += 1
            try:
                return _content(await self.wire.post(self.path, body, key))
            except EngineGarbage as garbage:
                problem = garbage
            except EngineError as broken:
                self._count(broken)
                status = f"status {broken.status}" if isinstance(broken, EngineStatus) else "no answer"
                raise NoAnswer(f"{status} from the server", str(broken)) from broken
        raise NoAnswer("garbage from the server", str(problem)) from problem

    def settle(self) -> None:
        asked, reasons = self.questions, self.unanswered
        self.questions, self.unanswered = 0, []
        must_be_few(f"questions to '{self.name}'", reasons, asked, self.failures, "--failures")

    def _count(self, problem: EngineError) -> None:
        self.failed += 1
        if isinstance(problem, EngineStatus) and problem.status in REFUSALS:
            raise TeacherGone(f"the teacher refuses every question: {problem}") from problem
        if self.failed >= PATIENCE and not self.failures:
            raise TeacherGone(
                f"the teacher has failed {self.failed} times in a row, the last time with: {problem}. What it answered "
                "is kept: run the same command again when it is back."
            ) from problem


def _content(answer: Any) -> str:
    try:
        text = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        text = None
    if not isinstance(text, str) or not text.strip():
        raise EngineGarbage(f"the answer has no text: {str(answer)[:80]!r}")
    return text.encode("utf-8", "replace").decode()  # half a surrogate pair is not text


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
