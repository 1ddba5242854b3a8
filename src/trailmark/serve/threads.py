"""Threads for work that would block the server's event loop.

The engine has a thread with its own event loop. A step of the model blocks that loop, never an answer to /health. One
more thread reads texts (templates, tokens), and another writes answers (log-probs, JSON). So a large text waits only
for other texts, and a large answer only for other answers. All threads end with the server.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class WorkerThreads:
    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._reading = ThreadPoolExecutor(1, "reading")
        self._writing = ThreadPoolExecutor(1, "writing")

    async def engine(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the engine's loop and return its result. If the caller stops waiting, it is cancelled."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="engine", daemon=True)
            self._thread.start()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def read(self, function: Callable[..., T], *given: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._reading, function, *given)

    async def write(self, function: Callable[..., T], *given: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._writing, function, *given)

    def close(self, patience: float = 2.0) -> bool:
        """Start nothing new, and give running work a moment. Returns whether all threads have ended."""
        for pool in (self._reading, self._writing):
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
        return engine | {t for pool in (self._reading, self._writing) for t in pool._threads}


async def _cancel_all() -> None:
    for task in asyncio.all_tasks():
        if task is not asyncio.current_task():
            task.cancel()
