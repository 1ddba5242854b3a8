"""Threads for work that would block the server's event loop.

The engine has a thread with its own event loop. A step of the model blocks that loop, never an answer to /health.
Three more threads read requests (JSON, templates, tokens): one texts, one conversations, one what is large. Two write
answers (log-probs, JSON): one those that are small, one those that are large. So a small request waits for no large
one, and a text for no template. All threads end with the server.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar, get_args

T = TypeVar("T")
# The engine gives the interpreter away at each operation of a step. If another thread computes meanwhile, it gets it
# back after this many seconds (Python's default is ten times as much, and a step has hundreds of operations).
SWITCH_S = 0.0005
Lane = Literal["texts", "chats", "large", "answers", "large answers"]


class WorkerThreads:
    def __init__(self) -> None:
        sys.setswitchinterval(SWITCH_S)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lanes = {lane: ThreadPoolExecutor(1, lane) for lane in get_args(Lane)}

    async def engine(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the engine's loop and return its result. If the caller stops waiting, it is cancelled."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="engine", daemon=True)
            self._thread.start()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def run(self, lane: Lane, function: Callable[..., T], *given: Any) -> T:
        """Run a function in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._lanes[lane], function, *given)

    def close(self, patience: float = 2.0) -> bool:
        """Start nothing new, and give running work a moment. Returns whether all threads have ended."""
        for pool in self._lanes.values():
            pool.shutdown(wait=False, cancel_futures=True)
        mine = [t for t in threading.enumerate() if t in self._threads()]
        if self._loop is not None and self._loop.is_running():
            asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop)
            self._loop.call_soon_threadsafe(self._loop.call_later, 0.1, self._loop.stop)
        end = time.monotonic() + patience
        for thread in mine:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(t.is_alive() for t in mine)

    def _threads(self) -> set[threading.Thread]:
        engine = set() if self._thread is None else {self._thread}
        return engine | {t for pool in self._lanes.values() for t in pool._threads}


async def _cancel_all() -> None:
    for task in asyncio.all_tasks():
        if task is not asyncio.current_task():
            task.cancel()
