"""A language model as judge: it is shown a play and asked for a mark as JSON.

Every answer is kept by what was asked, as soon as it is there (`cache.py`): a run that is killed asks nothing twice and loses
nothing. An answer without a readable mark is asked again, with what was wrong with it, a bounded number of times. An answer for
another play is refused. Where there is no mark in the end, the play *failed*: it has no reward, and never a zero.
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
from trailmark.errors import JudgeError
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
    """An answer from which no mark can be read; the text says why."""


class ModelJudge(Judge):
    """`engine` is who answers; without, it is opened from the settings when it is first needed. A judge that asks for something
    else than a mark, such as the turns that decided a play, derives from this one and says in `form` what the answer shall look
    like and in `read` what it means; asking, asking again and keeping answers stay the same."""

    def __init__(self, config: ModelJudgeConfig, engine: Any = None, cache: str | Path | None = None):
        self.config, self._engine, self._shared = config, engine, cache or config.cache
        self.cache = Cache(self._shared)
        named = config.server.model if config.server else config.model.name if config.model else "judge"
        self.name = named if engine is None else engine.name
        self.source = f"judge {self.name}"
        self.law = SamplingLaw(config.temperature)
        rest = [config.rubric, config.low, config.high, config.temperature, config.max_tokens, config.again]
        if type(self) is not ModelJudge:  # it may ask for something else
            rest += [type(self).__name__, self.form("")]
        self.fingerprint = digest(json.dumps([self.name, *rest]))
        self.asked = 0  # questions that went out; the others were in the cache
        self._open: dict[str, asyncio.Future[str]] = {}

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
                self._engine = local_engine(load_model(self.config.model).freeze(), EngineConfig())
        return self._engine

    def keep(self, folder: str | Path) -> None:
        if self._engine is None and self.config.server is not None:
            self._must_serve()
        super().keep(folder)
        if self._shared is None:
            self.cache = Cache(Path(folder) / "answers.jsonl")

    def _must_serve(self) -> None:
        """A server that is not there, or serves another model, is told before anything is played."""
        try:
            wait(self.engine.must_serve())
        except EngineError as problem:
            raise JudgeError(f"reward.server: {problem}.") from None

    async def judge(self, plays: Sequence[Play]) -> list[Verdict]:
        gate = asyncio.Semaphore(self.config.at_once)

        async def one(play: Play) -> Verdict:
            async with gate:
                return await self._verdict(play)

        return list(await asyncio.gather(*map(one, plays)))

    def question(self, play: Play) -> str:
        """What is asked about a play, without the form of the answer."""
        return filled(self.config.rubric, play) + shown(self.config.rubric, play)

    def form(self, name: str) -> str:
        """What the answer shall look like. `name` is that of the question: an answer that repeats another one is refused."""
        return ASK.format(id=name, low=self.config.low, high=self.config.high)

    def read(self, text: str, name: str, play: Play) -> Verdict:
        """What an answer means; `Unreadable` if it is not as it shall be."""
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
        """What `read` finds in the answer to a question; asked again, with the reason, while it finds it `Unreadable`."""
        c, why = self.config, ""
        ask = "\n\n" + form
        talk: list[dict[str, str]] = [{"role": "user", "content": question + ask}]
        for _ in range(c.again + 1):
            try:
                text = await self._answer(talk)
            except EngineError as problem:
                return Failed(f"judge '{self.name}': {problem}")
            try:
                return read(text)
            except Unreadable as problem:
                why = str(problem)
                talk += [{"role": "assistant", "content": text}, {"role": "user", "content": f"{why}.{ask}"}]
        return Failed(f"judge '{self.name}' gave no mark when asked {c.again + 1} times: {why}")

    async def _answer(self, talk: Sequence[Mapping[str, str]]) -> str:
        """The model's words to these messages: from the cache, from whoever is asking the same already, or from the model."""
        c = self.config
        key = digest(json.dumps([self.name, c.temperature, c.max_tokens, list(talk)]))
        if key in self.cache:
            return self.cache[key]["text"]
        if key in self._open:
            return await asyncio.shield(self._open[key])
        future = self._open[key] = asyncio.get_running_loop().create_future()
        try:
            self.asked += 1
            text = await self._ask(talk, key)
            self.cache.add(key, {"question": talk[-1]["content"], "text": text})
            future.set_result(text)
            return text
        except BaseException as problem:
            future.set_exception(problem if isinstance(problem, Exception) else EngineError("the judge was stopped"))
            future.exception()  # seen, even where nobody else waits
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
    """The task and the answer, where the rubric does not place them itself."""
    if "{answer}" in rubric or "{dialogue}" in rubric:
        return ""
    return f"\n\nThe task:\n{play.prompt}\n\nThe answer:\n{play.answer}"


# --- what is answered --------------------------------------------------------------------------------------------------


def objects(text: str) -> list[dict[str, Any]]:
    """Every JSON object that stands in a text, in prose and code fences too; those inside another are part of it."""
    found, end, decoder = [], 0, json.JSONDecoder()
    for start in re.finditer(r'\{\s*["}]', text):
        if start.start() >= end:
            with contextlib.suppress(ValueError, RecursionError):
                value, end = decoder.raw_decode(text, start.start())
                found.append(value)
    return found


def read_object(text: str, name: str, key: str) -> dict[str, Any]:
    """The last JSON object with a key `key` in an answer: a model may think first. It must be the answer to question `name`."""
    found = [o for o in objects(text) if key in o]
    if not found:
        raise Unreadable(f"Your answer holds no JSON object with {'a score' if key == 'score' else repr(key)}")
    said = found[-1]
    if "id" in said and str(said["id"]) != name:
        raise Unreadable(f"Your answer is for '{str(said['id'])[:40]}', not for '{name}'")
    return said


def read_mark(text: str, name: str, low: float, high: float) -> float:
    """The mark in an answer."""
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
