"""A language model as judge: it sees a play and answers with a mark as JSON.

Every answer is stored by its question as soon as it arrives (`ask/client.py`). So a run that is killed loses nothing
and asks nothing twice. If no mark can be read, the judge is told why and asked again, a limited number of times. An
answer for another play is refused. If there is no mark in the end, the play *failed*: it has no reward, which is not a
reward of zero.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from trailmark.ask.client import Client, NoAnswer, Unreadable, run_limited
from trailmark.ask.store import Store
from trailmark.config import EngineConfig
from trailmark.engines.base import EngineError
from trailmark.engines.http_client import EngineRefused, EngineStatus, EngineTimeout
from trailmark.errors import JudgeError, JudgeGone
from trailmark.run_async import wait
from trailmark.score.base import Judge, Play, Verdict, digest, filled, scored
from trailmark.score.config import ModelJudgeConfig
from trailmark.seats.open import connect, open_engine
from trailmark.time_limits import TooLong, awaited_within
from trailmark.types import Annotation, Failed, SamplingLaw

T = TypeVar("T")
ASK = (
    "Reply with one JSON object and nothing else:\n"
    '{{"id": "{id}", "score": a number from {low:g} to {high:g}, "reason": "one sentence"}}'
)


class ModelJudge(Judge):
    """`engine` gives the answers; if it is not given, it is opened from the settings when it is first needed. A judge
    that asks for something other than a mark, such as the turns that decided a play, derives from this class. It
    defines the form of the answer in `form` and its meaning in `read`. Asking, asking again and the store of answers
    stay the same."""

    def __init__(self, config: ModelJudgeConfig, engine: Any = None, cache: str | Path | None = None):
        self.config, self._shared = config, cache or config.cache
        named = config.server.model if config.server else config.model.name if config.model else "judge"
        self.name = named if engine is None else engine.name
        self.source = f"judge {self.name}"
        rest = [config.rubric, config.low, config.high, config.temperature, config.max_tokens, config.again]
        if type(self) is not ModelJudge:  # a subclass may ask for something else
            rest += [type(self).__name__, self.form("")]
        if config.constrained:
            rest.append("constrained")
            if self.schema("") is None:
                raise JudgeError(f"reward.constrained: {type(self).__name__} has no `schema`: define one.")
        self.fingerprint = digest(json.dumps([self.name, *rest]))
        weights = ""
        if engine is None and config.model is not None and Path(config.model.name).is_dir():
            from trailmark.models.adapters import weights_print

            weights = digest(weights_print(config.model))  # the weights in a folder may change
            self.fingerprint = digest(json.dumps([weights, *rest]))
        self._must_be_there = engine is None and config.server is not None
        self.client = Client(engine or self._open, Store(self._shared, text="text"), self.name, weights,
                             SamplingLaw(config.temperature), price=config.price)  # fmt: skip

    def _open(self) -> Any:
        if self.config.server is not None:
            return connect(self.config.server, "reward.server")
        assert self.config.model is not None
        from trailmark.models.load import load_untrained

        return open_engine(load_untrained(self.config.model, "reward.model"), EngineConfig(), plays=False)

    @property
    def asked(self) -> int:
        """Questions that were sent; the answers to the others were stored."""
        return self.client.used.asked

    def keep(self, folder: str | Path) -> None:
        if self._must_be_there:
            self._must_serve()
        super().keep(folder)
        if self._shared is None:
            self.client.store = Store(Path(folder) / "answers.jsonl", text="text")

    def _must_serve(self) -> None:
        """Before anything is played, raise an error if the server does not answer or serves another model."""
        try:
            wait(self.client.open().must_serve())
        except EngineError as problem:
            kind = JudgeGone if isinstance(problem, EngineRefused | EngineStatus | EngineTimeout) else JudgeError
            raise kind(f"reward.server: {problem}.") from None
        self._must_be_there = False

    async def judge(self, plays: Sequence[Play]) -> list[Verdict]:
        return await run_limited(plays, self._verdict, self.config.at_once)

    def question(self, play: Play) -> str:
        """The question about a play, without the form of the answer."""
        return filled(self.config.rubric, play) + shown(self.config.rubric, play)

    def form(self, name: str) -> str:
        """The form that the answer must have. `name` identifies the question: an answer that repeats another name is
        refused."""
        return ASK.format(id=name, low=self.config.low, high=self.config.high)

    def schema(self, name: str) -> Mapping[str, Any] | None:
        """The JSON schema of that form. None: it has none."""
        if type(self).form is not ModelJudge.form:
            return None
        score = {"type": "number", "minimum": self.config.low, "maximum": self.config.high}
        return object_schema({"id": {"const": name}, "score": score, "reason": {"type": "string"}})

    def read(self, text: str, name: str, play: Play) -> Verdict:
        """The meaning of an answer. Raises `Unreadable` if the answer does not have the right form."""
        c = self.config
        score = read_mark(text, name, c.low, c.high)
        mark = Annotation(play.episode.id, "judge_score", "episode", (score,), None, self.stamp)
        return Verdict(scored((score - c.low) / (c.high - c.low), c.success), (mark,))

    async def _verdict(self, play: Play) -> Verdict:
        question = self.question(play)
        name = digest(question)
        read = lambda text: self.read(text, name, play)
        asking = self.ask_for(question, self.form(name), read, self.schema(name))
        try:
            found = await awaited_within(self.config.time_limit, f"judge '{self.name}'", asking)
        except TooLong as problem:
            found = Failed(str(problem))
        return Verdict(found) if isinstance(found, Failed) else found

    def metrics(self, notes: Sequence[Annotation]) -> dict[str, float]:
        """What this process has spent on the judge, if its price is known."""
        cost = self.client.used.cost
        return {} if cost is None else {"judge_cost": cost}

    async def ask_for(
        self, question: str, form: str, read: Callable[[str], T], schema: Mapping[str, Any] | None = None
    ) -> T | Failed:
        """What `read` finds in the answer to a question; asked again, with the reason, if it is `Unreadable`."""
        c = self.config
        schema = schema if c.constrained else None
        try:
            return await self.client.ask(question, c.max_tokens, form=form, read=read, again=c.again, schema=schema)
        except Unreadable as why:
            return Failed(f"judge '{self.name}' gave no mark when asked {c.again + 1} times: {why}")
        except NoAnswer as problem:
            return Failed(f"judge '{self.name}': {problem}")


# --- what is asked ----------------------------------------------------------------------------------------------------


def shown(rubric: str, play: Play) -> str:
    """The task and the answer, if the rubric does not contain them."""
    if "{answer}" in rubric or "{dialogue}" in rubric:
        return ""
    return f"\n\nThe task:\n{play.prompt}\n\nThe answer:\n{play.answer}"


def object_schema(properties: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a JSON object with exactly these keys."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


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
