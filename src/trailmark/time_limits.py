"""Calls of other people's code that may take too long: a world's `reset` and `step`, a reward function.

A call with a limit has a daemon thread of its own. When its time is over, `TooLong` is raised, and nobody waits for the
thread any more. Python cannot end a thread: it stays, with its memory, until the call returns. It does not keep the
process alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeVar

from trailmark.errors import TaskError, TrailmarkError

T = TypeVar("T")


class TooLong(TrailmarkError):
    """A call took longer than it may. The play that made it is `Failed`."""


@dataclass(frozen=True)
class TimeLimits:
    """The most seconds that a call of a world's method may take; none: any time."""

    reset: float | None = None
    step: float | None = None

    @classmethod
    def of(cls, given: Any) -> TimeLimits:
        """Limits from {"reset": 30, "step": 2}; each may be left out."""
        if isinstance(given, TimeLimits):
            return given
        if not isinstance(given, Mapping) or (odd := next((k for k in given if k not in ("reset", "step")), None)):
            said = f"has no '{odd}'" if isinstance(given, Mapping) else f"cannot be {given!r}"
            raise TaskError(f"time_limits {said}: write the seconds of reset, of step or of both, such as {{step: 2}}.")
        for name, seconds in given.items():
            number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
            if seconds is not None and not (number and 0 < seconds < math.inf):
                raise TaskError(f"time_limits.{name} is {seconds!r}: it must be a number of seconds above 0.")
        return cls(**given)


async def within(seconds: float | None, what: str, function: Callable[..., T], *args: Any) -> T:
    """What the function returns or raises, if it does so in time; `TooLong` if it does not. None: it is called here."""
    if seconds is None:
        return function(*args)
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if not done.done():
            done.set_result((result, error))

    def work() -> None:
        result, error = None, None
        try:
            result = function(*args)
        except BaseException as problem:
            error = problem
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name=f"trailmark-{what}", daemon=True).start()
    finished, _ = await asyncio.wait([done], timeout=seconds)
    if not finished:
        done.cancel()
        raise too_long(what, seconds)
    result, error = done.result()
    if error is not None:
        raise error
    return result


async def awaited_within(seconds: float | None, what: str, work: Awaitable[T]) -> T:
    """The same for work that awaits: it is cancelled when its time is over. (Work that never awaits cannot be.)"""
    if seconds is None:
        return await work
    doing = asyncio.ensure_future(work)
    try:
        finished, _ = await asyncio.wait([doing], timeout=seconds)
    except asyncio.CancelledError:
        doing.cancel()
        raise
    if not finished:
        doing.cancel()
        raise too_long(what, seconds)
    return doing.result()


def too_long(what: str, seconds: float) -> TooLong:
    return TooLong(f"{what} took longer than {seconds:g} s")


class WorldCalls:
    """How many plays call their worlds. `threads`: the worlds wait, so each call gets a thread; else they are called
    one after the other, also if a call has a limit."""

    def __init__(self, threads: Executor | None = None, at_once: int = 1):
        self.threads = threads
        self._room = asyncio.Semaphore(1 if threads is None else at_once)

    async def call(self, limits: TimeLimits, phase: str, function: Callable[..., T], *args: Any) -> T:
        """Call a world's method of this name."""
        seconds = getattr(limits, phase)
        if seconds is not None:
            async with self._room:
                return await within(seconds, phase, function, *args)
        if self.threads is None:
            return function(*args)
        return await asyncio.get_running_loop().run_in_executor(self.threads, function, *args)
