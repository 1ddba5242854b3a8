"""A user's reward function. It has one signature in the whole library.

    def score(prompt, answer, row): return number                      one play at a time
    def score(prompts, answers, rows): return [number, …]              all plays at once
    async def score(prompt, answer, row, scorer): …                    awaited; `scorer` computes likelihoods

Parameters are recognised by name and may be left out. `prompt` and `answer` are texts, `row` is the line of data. If
the function returns anything but a finite number, an error names the file, the function and the row: a missing reward
must never become a zero.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trailmark.errors import JudgeError, shorten
from trailmark.functions import load_function, where_it_failed
from trailmark.score.base import Judge, Play, Verdict, digest, scored
from trailmark.score.config import FunctionJudgeConfig
from trailmark.time_limits import TooLong, awaited_within, within
from trailmark.trust import source_text
from trailmark.types import Failed

if TYPE_CHECKING:
    from trailmark.config import ModelConfig, ServerConfig

ONE, ALL = ("prompt", "answer", "row"), ("prompts", "answers", "rows")


def open_function(config: FunctionJudgeConfig, key: str = "reward") -> Judge:
    """A judge from `config.path`: a function, or a user's class that derives from `Judge`. Errors name the recipe key
    `key`."""
    found, file = load_function(config.path, key)
    if isinstance(found, type):
        if not issubclass(found, Judge):
            raise JudgeError(f"{key} '{config.path}': a class must derive from trailmark.score.base.Judge.")
        if config.time_limit is not None:
            raise JudgeError(f"{key}.time_limit: class {config.path} judges all plays at once: limit the time in it.")
        try:
            judge = found()
        except Exception as problem:
            said = where_it_failed(problem, file)
            raise JudgeError(f"{key}: class {config.path} cannot be made: {said}.") from problem
        if not judge.fingerprint:  # the class sets none: use its file's content
            judge.fingerprint = digest(source_text(file)) if file.is_file() else ""
        return judge
    return FunctionJudge(found, file, config.path, config.success, config.model, config.at_once, server=config.server,
                         time_limit=config.time_limit)  # fmt: skip


class FunctionJudge(Judge):
    def __init__(
        self,
        function: Callable[..., Any],
        file: str | Path | None = None,
        name: str = "",
        success: float | None = None,
        model: ModelConfig | None = None,
        at_once: int = 32,
        scorer: Any = None,
        server: ServerConfig | None = None,
        time_limit: float | None = None,
    ):
        """From Python: `FunctionJudge(score)`. `scorer` is passed to a function that asks for one. If it is not given,
        it is made from `model` when it is first needed, or from a `server`."""
        found = file or inspect.getsourcefile(function)
        self.function, self.file = function, Path(found) if found else Path("<function>")
        self.name = name or f"{self.file.name}:{getattr(function, '__name__', 'score')}"
        self.source = f"function {self.name}"
        self.success, self.model, self.at_once, self._scorer = success, model, at_once, scorer
        self.server, self.time_limit = server, time_limit
        self._folder: Path | None = None
        self._given = scorer is not None
        text = source_text(self.file) if self.file.is_file() else inspect.getsource(function).encode()
        self.fingerprint = digest(text)
        self.wanted, self.together = _wanted(function, self.name)
        # the weights of a scorer's model are part of the reward
        if "scorer" in self.wanted and server is not None:
            self.fingerprint = digest(text + f"served {server.model}".encode())
        elif "scorer" in self.wanted and model is not None and Path(model.name).is_dir():
            from trailmark.models.adapters import weights_print

            self.fingerprint = digest(text + weights_print(model).encode())
        self.repeatable = "scorer" not in self.wanted and not inspect.iscoroutinefunction(function)

    def keep(self, folder: str | Path) -> None:
        if "scorer" in self.wanted and self.server is not None and not self._given:
            self._the_scorer().check()
        super().keep(folder)
        self._folder = Path(folder)
        if self._scorer is not None and not self._given:
            self._scorer.keep(self._folder / "likelihoods.jsonl")

    async def judge(self, plays: Sequence[Play]) -> list[Verdict]:
        if not plays:
            return []
        numbers = await (self._all(plays) if self.together else self._each(plays))
        return [Verdict(x if isinstance(x, Failed) else scored(x, self.success)) for x in numbers]

    async def _each(self, plays: Sequence[Play]) -> list[float | Failed]:
        gate = asyncio.Semaphore(self.at_once)

        async def one(play: Play) -> float | Failed:
            async with gate:
                given = {"prompt": play.prompt, "answer": play.answer, "row": dict(play.row)}
                found = await self._call(given, play.where)
                return found if isinstance(found, Failed) else _number(found, self._about(play))

        if inspect.iscoroutinefunction(self.function):
            return list(await asyncio.gather(*map(one, plays)))
        return [await one(play) for play in plays]

    async def _all(self, plays: Sequence[Play]) -> list[float | Failed]:
        given = {
            "prompts": [p.prompt for p in plays],
            "answers": [p.answer for p in plays],
            "rows": [dict(p.row) for p in plays],
        }
        where = f"{len(plays)} rows, the first {plays[0].where}"
        found = await self._call(given, where)
        if isinstance(found, Failed):
            return [found] * len(plays)
        if hasattr(found, "tolist") and not isinstance(found, str):
            found = found.tolist()
        if isinstance(found, str | bytes) or not isinstance(found, Sequence):
            raise JudgeError(f"{self.name} returned {_shown(found)} for {where}: it must return a list of numbers.")
        if len(found) != len(plays):
            raise JudgeError(f"{self.name} returned {len(found)} numbers for {where}: it must return one for each row.")
        return [_number(x, self._about(p)) for x, p in zip(found, plays)]

    async def _call(self, given: dict[str, Any], where: str) -> Any:
        if "scorer" in self.wanted:
            given["scorer"] = self._the_scorer()
        given, what = {k: v for k, v in given.items() if k in self.wanted}, f"reward {self.name}"
        limit = None if inspect.iscoroutinefunction(self.function) else self.time_limit
        try:
            found = await within(limit, what, lambda: self.function(**given))
            return await awaited_within(self.time_limit, what, found) if inspect.isawaitable(found) else found
        except TooLong as problem:
            return Failed(str(problem))
        except (Exception, SystemExit) as problem:
            raise JudgeError(f"{self.name}: {where_it_failed(problem, self.file)} (for {where}).") from problem

    def _about(self, play: Play) -> str:
        return f"{self.name} returned {{}} for {play.where}"

    def _the_scorer(self) -> Any:
        if self._scorer is None:
            from trailmark.score.likelihood import TextScorer

            if self.model is None:
                raise JudgeError(f"{self.name} wants a scorer, and no model is named: set reward.model.")
            self._scorer = TextScorer(self.model, self._folder and self._folder / "likelihoods.jsonl", self.server)
        return self._scorer


def _wanted(function: Callable[..., Any], name: str) -> tuple[set[str], bool]:
    """The arguments that the function takes, and whether it takes all plays at once."""
    kinds = inspect.Parameter
    try:
        listed = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise JudgeError(f"{name} does not say its parameters: write def score(prompt, answer, row).") from None
    wanted: set[str] = set()
    for key, p in listed.items():
        if p.kind is kinds.VAR_KEYWORD:
            wanted |= set() if wanted & set(ALL) else set(ONE)
        elif key in (*ONE, *ALL, "scorer") and p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY):
            wanted.add(key)
        elif p.default is kinds.empty and p.kind is not kinds.VAR_POSITIONAL:
            raise JudgeError(
                f"{name} has the parameter '{key}': a reward function takes prompt, answer, row (or prompts, answers, "
                "rows) and scorer, by these names."
            )
    if wanted & set(ONE) and wanted & set(ALL):
        raise JudgeError(f"{name} mixes one and many: take prompt, answer, row, or prompts, answers, rows.")
    if not wanted & {*ONE, *ALL}:
        raise JudgeError(f"{name} takes nothing of what it is to judge: write def score(prompt, answer, row).")
    return wanted, bool(wanted & set(ALL))


def _number(value: Any, about: str) -> float:
    """A finite number, or an error. `about` has a placeholder for the value that was returned."""
    if hasattr(value, "item") and not isinstance(value, str):
        with contextlib.suppress(ValueError, RuntimeError, TypeError):
            value = value.item()  # numpy, torch
    if not isinstance(value, bool | int | float):
        raise JudgeError(f"{about.replace('{}', _shown(value))}: it must return a number.")
    if abs(value) > sys.float_info.max or not math.isfinite(value):
        raise JudgeError(f"{about.replace('{}', str(value)[:60])}: it must return a finite number.")
    return float(value)


def _shown(value: Any) -> str:
    return "None" if value is None else shorten(f"{type(value).__name__} {value!r}")
