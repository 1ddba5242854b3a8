"""Who plays: a pool gets starts and gives plays back. A start carries its seed, so who plays it cannot change it.

    LocalPool    this process: many plays at once, and threads for worlds that wait
    Ahead        the next batch, played in a thread while the learner works on this one
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from trailmark.time_limits import WorldCalls


class Plays(Protocol):
    """What is played: `rollout.play.Game`."""

    async def play(self, start: Any, calls: WorldCalls | None = None) -> Any: ...


class Pool(Protocol):
    async def play(self, game: Plays, start: Any) -> Any:
        """Play one start, when there is room. A start that was lost is played again."""
        ...

    def close(self) -> None:
        """Nothing more will be played."""
        ...


class LocalPool:
    """Plays in this process, at most `at_once` at a time. `slow`: its worlds wait, so each call gets a thread."""

    def __init__(self, at_once: int = 256, slow: bool = False):
        self._room = asyncio.Semaphore(at_once)
        room = min(at_once, 64)
        self._threads = ThreadPoolExecutor(room) if slow else None
        self._calls = WorldCalls(self._threads, room)

    async def play(self, game: Plays, start: Any) -> Any:
        async with self._room:
            return await game.play(start, self._calls)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


class Ahead:
    """At most one batch that is being played in a thread, with weights that no other batch is played with.

    The engine has weights of its own for that. They are published between two batches, never during one, so every batch
    is played with the weights of exactly one step earlier: the staleness is bounded, and a run can be repeated."""

    def __init__(self, device: Any = None, on: bool = True):
        self.on, self._device = on, device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trailmark-play")
        self._step: int | None = None
        self._work: Future[Any] | None = None

    def batch(self, step: int, last: int, play: Callable[[int], Any], publish: Callable[[], None]) -> Any:
        """The batch of a step: the one that was played ahead, or one that is played now. If it is `on`, the next one
        begins, with the weights as they are."""
        made = self.take(step)
        if made is None:
            publish()
            made = play(step)
        if self.on and step < last:
            publish()
            self.start(step + 1, lambda: play(step + 1))
        return made

    def start(self, step: int, play: Callable[[], Any]) -> None:
        """Begin to play the batch of `step`."""
        self._step, self._work = step, self._thread.submit(self._played, play)

    def ready(self, step: int, made: Any) -> None:
        """The batch of `step` was played earlier, before the run was resumed."""
        self._step, self._work = step, Future()
        self._work.set_result(made)

    def wait(self) -> tuple[int, Any] | None:
        """The step and the batch that was started, once it is there. It stays to be taken."""
        return None if self._work is None or self._step is None else (self._step, self._work.result())

    def take(self, step: int) -> Any | None:
        """The batch of `step`, or None if it was not started."""
        if self._step != step or self._work is None:
            return None
        made, self._step, self._work = self._work.result(), None, None
        return made

    def _played(self, play: Callable[[], Any]) -> Any:
        with self._stream():
            return play()

    @contextlib.contextmanager
    def _stream(self) -> Iterator[None]:
        """On a GPU the thread has a stream of its own. Otherwise its kernels would wait in the learner's queue."""
        if getattr(self._device, "type", "cpu") != "cuda":
            yield
            return
        import torch

        own = torch.cuda.Stream(self._device)
        own.wait_stream(torch.cuda.default_stream(self._device))  # the weights that were just published
        with torch.cuda.stream(own):
            yield
        own.synchronize()
