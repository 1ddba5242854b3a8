"""Teachers: rules that need no model, or a model behind a server.

A teacher does three things, the same in every world:

    tasks(excerpt)            questions that one file answers, with the answers
    reflect(moment)           some sentences on a moment of play: where we are, was the last step any good, what next
    choose(moment, thought)   one of the listed labels, after a reflection

`Offline` answers from what the caller knows: a moment carries the reflection by rule (`rule`) and the best label
(`best`). `Server` asks any server with OpenAI's protocol, also Azure's (`api-key` and `api-version`). It may be told
the best action as a spoiler, and is asked not to mention it. A reflection that mentions it is refused. States never
hold it.

If an answer cannot be used, it is `TeacherFailed`: the question is counted and left out. If there is none, it is
`NoAnswer`, and `settle` ends the stage if that happened too often: the next time only these questions are asked. If the
server is gone, or refuses the key or the model, it is `TeacherGone`: the work stops and can be resumed.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from trailmark.data.answers import Answers, request_key
from trailmark.data.decisions import fits
from trailmark.data.queries import Excerpt, queries
from trailmark.engines.base import EngineError
from trailmark.engines.http_client import EngineGarbage, EngineStatus, Wire, address
from trailmark.errors import TrailmarkError, Unfinished
from trailmark.failures import PATIENCE, must_be_few
from trailmark.formats.reflect import ACTION
from trailmark.tasks.base import Observation

T = TypeVar("T")
R = TypeVar("R")
REFUSALS = {401, 403, 404}  # the server would refuse every question, so the work stops
GARBAGE_TRIES = 3
LONGEST_THOUGHT = 300  # most tokens of a reflection


class TeacherFailed(TrailmarkError):
    """One question has no usable answer. It is counted under `reason`."""

    def __init__(self, reason: str, message: str = ""):
        super().__init__(message or reason)
        self.reason = reason


class NoAnswer(TeacherFailed):
    """The server did not answer one question."""


class TeacherGone(Unfinished):
    """The teacher does not answer any more."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """An earlier decision of the same play: what was seen, thought and done."""

    state: str
    thought: str
    command: str


@dataclass(frozen=True, slots=True)
class Moment:
    """One decision to make. `about` describes the world in a few sentences; `request` is what is asked for."""

    about: str
    request: str
    seen: Observation
    best: str
    rule: str
    past: tuple[Exchange, ...] = ()
    spoiler: str = ""


class Teacher(Protocol):
    name: str
    at_once: int

    async def tasks(self, excerpt: Excerpt) -> list[tuple[str, str]]: ...

    async def reflect(self, moment: Moment) -> str: ...

    async def choose(self, moment: Moment, thought: str) -> str: ...

    def settle(self) -> None:
        """Called at the end of a stage. Raises an error if too many of its questions were not answered."""


class Offline:
    """Rules: questions from docstrings and documentation, the rule's words, the best label."""

    name = "offline"
    at_once = 1

    async def tasks(self, excerpt: Excerpt) -> list[tuple[str, str]]:
        return queries(excerpt)

    async def reflect(self, moment: Moment) -> str:
        return moment.rule

    async def choose(self, moment: Moment, thought: str) -> str:
        return moment.best

    def settle(self) -> None:
        pass


CHOOSE = "Which of these do you do? Answer with its label and nothing else."
SECRET = "This is a spoiler for you alone, and must not be mentioned: "
ASK_TASKS = {
    "code": "a source file",
    "shell": "a shell script",
    "text": "a page of its documentation",
    "data": "the beginning of a data file",
}


class Server:
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

    async def tasks(self, excerpt: Excerpt) -> list[tuple[str, str]]:
        said = await self.say([{"role": "user", "content": _task_prompt(excerpt)}], 1000)
        found = read_tasks(said)
        if not found:
            raise TeacherFailed("answer without a question", f"'{self.name}' gave no QUERY and ANSWER: {said[:80]!r}")
        return found

    async def reflect(self, moment: Moment) -> str:
        said = (await self.say(_dialogue(moment), LONGEST_THOUGHT)).split(ACTION.strip())[0].strip()
        if not fits(said):
            raise TeacherFailed("reflection that is empty or holds a marker")
        if moment.spoiler and ("spoiler" in said.lower() or moment.spoiler in said):
            raise TeacherFailed("reflection that mentions the spoiler")
        return said

    async def choose(self, moment: Moment, thought: str) -> str:
        asked = [{"role": "assistant", "content": thought}, {"role": "user", "content": moment.seen.menu + CHOOSE}]
        said = await self.say([*_dialogue(moment), *asked], 16)
        label = read_choice(said, moment.seen)
        if label is None:
            raise TeacherFailed("choice that is not listed", f"'{self.name}' chose {said[:80]!r}, which is not listed")
        return label

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


def _dialogue(moment: Moment) -> list[dict[str, str]]:
    """A system message, then what was seen, thought and done so far (without old lists of actions), then the present
    state."""
    messages = [{"role": "system", "content": moment.about}]
    for old in moment.past:
        messages += [
            {"role": "user", "content": old.state + moment.request},
            {"role": "assistant", "content": old.thought},
            {"role": "user", "content": "What do you do?"},
            {"role": "assistant", "content": old.command},
        ]
    secret = f"\n{SECRET}{moment.spoiler}" if moment.spoiler else ""
    return [*messages, {"role": "user", "content": moment.seen.state + moment.request + secret}]


def read_choice(said: str, seen: Observation) -> str | None:
    """The label that an answer means: the label itself, the whole command, the first number after "action", or the
    first word that is a label."""
    text = said.strip()
    if text in seen.actions:
        return seen.labels[seen.actions.index(text)]
    if text.strip(".").split(".")[0].strip() in seen.labels:
        return text.strip(".").split(".")[0].strip()
    after = re.search(r"action\W*(\w+)", text, re.IGNORECASE)
    words = ([after[1]] if after else []) + [w for w in re.findall(r"\w+", text) if w.isdigit()]
    return next((w for w in words if w in seen.labels), None)


def _task_prompt(excerpt: Excerpt) -> str:
    what = ASK_TASKS[excerpt.kind]
    return (
        f"The repository '{excerpt.repo}' runs as a service that people use. Below is {what}, '{excerpt.path}'.\n\n"
        f"{excerpt.window}\n\n"
        "First say in a few sentences what it holds. Then write questions that a user of the service could ask and "
        "that this file answers, without naming the file, each with its answer, in exactly this form:\n"
        "QUERY1: ...\nANSWER1: ...\nQUERY2: ...\nANSWER2: ...\n"
    )


_MARK = re.compile(r"^.{0,10}?(QUERY|ANSWER)\s*\d*\W*")


def read_tasks(said: str) -> list[tuple[str, str]]:
    """Questions and answers of a QUERYk / ANSWERk list. The word stands within a line's first ten characters. Lines
    without one continue the part before, and a question without an answer is left out."""
    pairs: list[list[str]] = []
    part = None
    for line in said.splitlines():
        mark = _MARK.match(line)
        if mark and mark[1] == "QUERY":
            pairs.append([line[mark.end() :].strip(), ""])
            part = 0
        elif mark and pairs:
            pairs[-1][1], part = line[mark.end() :].strip(), 1
        elif part is not None and line.strip():
            pairs[-1][part] = f"{pairs[-1][part]} {line.strip()}".strip()
    return [(_plain(q), _plain(a)) for q, a in pairs if _plain(q) and _plain(a)]


def _plain(text: str) -> str:
    return text.strip().strip("*").strip()


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
