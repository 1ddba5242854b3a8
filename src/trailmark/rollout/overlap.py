"""Play the next batch while the learner works on this one.

The engine has weights of its own for that. They are published between two batches, never during one, so every batch is
played with the weights of exactly one step earlier: the staleness is bounded, and a run can be repeated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class NextBatch:
    """At most one batch that is being played in a thread."""

    def __init__(self, device: Any):
        self._device = device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trailmark-play")
        self._step: int | None = None
        self._work: Future[Any] | None = None

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
