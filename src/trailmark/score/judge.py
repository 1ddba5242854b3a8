"""A language model as judge: it sees a play and answers with a mark as JSON.

Every answer is stored by its question as soon as it arrives (`cache.py`). So a run that is killed loses nothing and
asks nothing twice. If no mark can be read, the judge is told why and asked again, a limited number of times. An answer
for another play is refused. If there is no mark in the end, the play *failed*: it has no reward, which is not a reward
of zero.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from trailmark.chat import end_of_turn, render
from trailmark.engines.base import EngineError, Request
from trailmark.engines.http_client import EngineRefused, EngineStatus, EngineTimeout
from trailmark.errors import JudgeError, JudgeGone, ModelError
from trailmark.run_async import wait
from trailmark.score.base import Judge, Play, Verdict, digest, filled, scored
from trailmark.score.cache import Cache
from trailmark.score.config import ModelJudgeConfig
from trailmark.types import Annotation, Failed, SamplingLaw

T = TypeVar("T")
ASK = (
    "Reply with one JSON object and nothing else:\n"
    '{{"id": "{id}", "score": a number from {low:g} to {high:g}, "reason": "one sentence"}}'
)


class Unreadable(Exception):
    """An answer without a readable mark. The text says why."""


class ModelJudge(Judge):
    """`engine` gives the answers; if it is not given, it is opened from the settings when it is first needed. A judge
    that asks for something other than a mark, such as the turns that decided a play, derives from this class. It
    defines the form of the answer in `form` and its meaning in `read`. Asking, asking again and caching stay the
    same."""

    def __init__(self, config: ModelJudgeConfig, engine: Any = None, cache: str | Path | None = None):
        self.config, self._engine, self._shared = config, engine, cache or config.cache
        self.cache = Cache(self._shared)
        named = config.server.model if config.server else config.model.name if config.model else "judge"
        self.name = named if engine is None else engine.name
        self.source = f"judge {self.name}"
        self.law = SamplingLaw(config.temperature)
        rest = [config.rubric, config.low, config.high, config.temperature, config.max_tokens, config.again]
        if type(self) is not ModelJudge:  # a subclass may ask for something else
            rest += [type(self).__name__, self.form("")]
        self.fingerprint = digest(json.dumps([self.name, *rest]))
        self._weights = ""
        if engine is None and config.model is not None and Path(config.model.name).is_dir():
            from trailmark.models.adapters import weights_print

            self._weights = digest(weights_print(config.model))  # the weights in a folder may change
            self.fingerprint = digest(json.dumps([self._weights, *rest]))
        self.asked = 0  # questions that were sent; the others were in the cache
        self._open: dict[str, asyncio.Future[str]] = {}
        self._unread: set[str] = set()  # answers of this process that could not be read

    @property
    def engine(self) -> Any:
        if self._engine is None:
            if self.config.server is not None:
                from trailmark.engines.http import http_engine

                self._engine = http_engine(self.config.server, key="reward.server")
            else:
                from trailmark.config import EngineConfig
                from trailmark.engines.local import local_engine
                from trailmark.models.load import load_model

                assert self.config.model is not None
                try:
                    self._engine = local_engine(load_model(self.config.model).freeze(), EngineConfig())
                except ModelError as problem:
                    raise ModelError(f"reward.model: {problem}") from problem
        return self._engine

    def keep(self, folder: str | Path) -> None:
        if self._engine is None and self.config.server is not None:
            self._must_serve()
        super().keep(folder)
        if self._shared is None:
            self.cache = Cache(Path(folder) / "answers.jsonl")

    def _must_serve(self) -> None:
        """Before anything is played, raise an error if the server does not answer or serves another model."""
        try:
            wait(self.engine.must_serve())
        except EngineError as problem:
            kind = JudgeGone if isinstance(problem, EngineRefused | EngineStatus | EngineTimeout) else JudgeError
            raise kind(f"reward.server: {problem}.") from None

    async def judge(self, plays: Sequence[Play]) -> list[Verdict]:
        gate = asyncio.Semaphore(self.config.at_once)

        async def one(play: Play) -> Verdict:
            async with gate:
                return await self._verdict(play)

        return list(await asyncio.gather(*map(one, plays)))

    def question(self, play: Play) -> str:
        """The question about a play, without the form of the answer."""
        return filled(self.config.rubric, play) + shown(self.config.rubric, play)

    def form(self, name: str) -> str:
        """The form that the answer must have. `name` identifies the question: an answer that repeats another name is
        refused."""
        return ASK.format(id=name, low=self.config.low, high=self.config.high)

    def read(self, text: str, name: str, play: Play) -> Verdict:
        """The meaning of an answer. Raises `Unreadable` if the answer does not have the right form."""
        c = self.config
        score = read_mark(text, name, c.low, c.high)
        mark = Annotation(play.episode.id, "judge_score", "episode", (score,), None, self.stamp)
        return Verdict(scored((score - c.low) / (c.high - c.low), c.success), (mark,))

    async def _verdict(self, play: Play) -> Verdict:
        question = self.question(play)
        name = digest(question)
        found = await self.ask_for(question, self.form(name), lambda text: self.read(text, name, play))
        return Verdict(found) if isinstance(found, Failed) else found

    async def ask_for(self, question: str, form: str, read: Callable[[str], T]) -> T | Failed:
        """What `read` finds in the answer to a question; asked again, with the reason, if it is `Unreadable`."""
        c, why = self.config, ""
        ask = "\n\n" + form
        talk: list[dict[str, str]] = [{"role": "user", "content": question + ask}]
        keys = []
        for _ in range(c.again + 1):
            try:
                text, key = await self._answer(talk)
                keys.append(key)
            except EngineError as problem:
                return Failed(f"judge '{self.name}': {problem}")
            try:
                return read(text)
            except Unreadable as problem:
                why = str(problem)
                talk += [{"role": "assistant", "content": text}, {"role": "user", "content": f"{why}.{ask}"}]
        self._unread.update(keys)
        for key in keys:  # a judge that is mended is asked again when the run goes on
            self.cache.add(key, {**self.cache[key], "unread": True})
        return Failed(f"judge '{self.name}' gave no mark when asked {c.again + 1} times: {why}")

    async def _answer(self, talk: Sequence[Mapping[str, str]]) -> tuple[str, str]:
        """The model's answer to these messages: from the cache, from an equal question in progress, or from the
        model. Also returns its key in the cache."""
        c = self.config
        key = digest(json.dumps([self._weights or self.name, c.temperature, c.max_tokens, list(talk)]))
        if key in self.cache and (key in self._unread or "unread" not in self.cache[key]):
            return self.cache[key]["text"], key
        if key in self._open:
            return await asyncio.shield(self._open[key]), key
        future = self._open[key] = asyncio.get_running_loop().create_future()
        try:
            self.asked += 1
            text = await self._ask(talk, key)
            self.cache.add(key, {"question": talk[-1]["content"], "text": text})
            future.set_result(text)
            return text, key
        except BaseException as problem:
            future.set_exception(problem if isinstance(problem, Exception) else EngineError("the judge was stopped"))
            future.exception()  # mark the exception as retrieved, even if nothing else awaits it
            raise
        finally:
            del self._open[key]

    async def _ask(self, talk: Sequence[Mapping[str, str]], key: str) -> str:
        c, engine = self.config, self.engine
        if hasattr(engine, "chat"):  # a server applies its own template
            (done,) = await engine.chat(talk, self.law, c.max_tokens, key=key)
            return done.text
        template = "own" if getattr(engine.tokenizer, "chat_template", None) else None
        prompt = render(engine.tokenizer, talk, generation_prompt=True, template=template).tokens
        stops = {end_of_turn(engine.tokenizer, template=template), engine.tokenizer.eos_token_id} - {None}
        (done,) = await engine.sample(Request(prompt, self.law, 1, c.max_tokens, tuple(sorted(stops)), key=key))
        return done.text


# --- what is asked ----------------------------------------------------------------------------------------------------


def shown(rubric: str, play: Play) -> str:
    """The task and the answer, if the rubric does not contain them."""
    if "{answer}" in rubric or "{dialogue}" in rubric:
        return ""
    return f"\n\nThe task:\n{play.prompt}\n\nThe answer:\n{play.answer}"


# --- what is answered ------------------------------------------------------------------------------------------------


def objects(text: str) -> list[dict[str, Any]]:
    """Every JSON object in a text, also inside prose and code fences. Objects inside another are part of it."""
    found, end, decoder = [], 0, json.JSONDecoder()
    for start in re.finditer(r'\{\s*["}]', text):
        if start.start() >= end:
            with contextlib.suppress(ValueError, RecursionError):
                value, end = decoder.raw_decode(text, start.start())
                found.append(value)
    return found


def read_object(text: str, name: str, key: str) -> dict[str, Any]:
    """The last JSON object with a key `key` in an answer (a model may think first), of several the one that names the
    question `name`. One that names another question is refused; one that names none is trusted."""
    found = [o for o in objects(text) if key in o]
    if not found:
        raise Unreadable(f"Your answer holds no JSON object with {'a score' if key == 'score' else repr(key)}")
    said = next((o for o in reversed(found) if str(o.get("id")) == name), found[-1])
    if "id" in said and str(said["id"]) != name:
        raise Unreadable(f"Your answer is for '{str(said['id'])[:40]}', not for '{name}'")
    return said


def read_mark(text: str, name: str, low: float, high: float) -> float:
    """The mark in an answer, as a number."""
    score = read_object(text, name, "score")["score"]
    if isinstance(score, str):
        try:
            score = float(score)
        except ValueError:
            score = None
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise Unreadable("Your score is not a number")
    if not (math.isfinite(score) and low <= score <= high):
        raise Unreadable(f"Your score is not from {low:g} to {high:g}")
    return float(score)
