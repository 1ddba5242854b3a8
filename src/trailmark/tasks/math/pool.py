"""Worker processes that compare formulas. They are guarded: no answer can hang, crash or fill the memory of the caller.

A worker has a limit of computing seconds per question and a limit of memory. It kills itself when a limit is reached,
even deep inside C code. If that fails, the caller waits ten times as long and then kills it. Whatever happens to a
worker, its question gets an answer ("time", "crash"), and the next question gets a new worker. The limit counts
computing time, so a busy machine does not turn a right answer into a wrong one.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

from trailmark.errors import TaskError

WORKER = Path(__file__).with_name("worker.py")
TO_START = 120.0  # seconds that a worker has to start: the machine may be busy
PATIENCE = 10.0  # the caller waits this many times the computing seconds
INSTALL = "pip install 'trailmark[math]'"
PACKAGES = {
    "math_verify": "math-verify", "latex2sympy2_extended": "latex2sympy2_extended", "antlr4": "antlr4-python3-runtime"
}  # fmt: skip


class Pool:
    """`ask` may be called from any thread. Workers start when they are needed, at most `workers` of them."""

    def __init__(self, workers: int = 2, seconds: float = 2.0, memory_mb: int = 2048):
        if workers < 1 or not 0 < seconds <= 3600 or memory_mb < 256:
            raise TaskError(
                f"a pool needs workers >= 1, seconds > 0 and memory_mb >= 256, not {workers}, {seconds}, {memory_mb}."
            )
        self.seconds, self.memory_mb = seconds, memory_mb
        self.started = self.lost = 0  # counts of workers
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(workers):
            self._idle.put(None)  # None: a worker that is not started yet
        _POOLS.add(self)

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """The worker's answer, or {"error": "time" | "crash"}."""
        worker = self._idle.get()
        try:
            if worker is None or not worker.alive:
                worker = None
                worker = self._start()
            answer = worker.ask(question, PATIENCE * self.seconds + 1)
            if "error" in answer and not worker.alive:
                self.lost += 1
            return answer
        finally:
            self._idle.put(worker)

    def check(self) -> None:
        """Start a worker and test its parser, once per process. A TaskError says what is missing or wrong."""
        need_math_verify()
        if WORKER in _PROVEN:
            return
        worker = self._idle.get()
        try:
            if worker is None or not worker.alive:
                worker = None
                worker = self._start()
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End the idle workers. Asking again starts new ones."""
        kept: list[None] = []
        with contextlib.suppress(queue.Empty):
            while True:
                worker = self._idle.get_nowait()
                if worker is not None:
                    worker.kill()
                kept.append(None)
        for none in kept:
            self._idle.put(none)

    def _start(self) -> _Worker:
        need_math_verify()
        self.started += 1
        return _Worker(self.seconds, self.memory_mb)


class _Worker:
    def __init__(self, seconds: float, memory_mb: int):
        command = [sys.executable, "-P", str(WORKER), str(seconds), str(memory_mb)]
        settings = {**os.environ, "PYTHONHASHSEED": "0"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=settings
        )
        self.lines: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=_listen, args=(self.process.stdout, self.lines), daemon=True).start()
        hello = self._hear(TO_START)
        if hello.get("ready") is not True:
            self.kill()
            raise TaskError(
                f"the LaTeX parser of the answer checker does not work: {_why(hello)} ({_installed()}); {INSTALL}"
            )
        _PROVEN.add(WORKER)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def ask(self, question: dict[str, Any], patience: float) -> dict[str, Any]:
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(question).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            self.kill()
            return {"error": "crash"}
        answer = self._hear(patience)
        if "error" in answer:
            self.kill()  # its late output must not be read as the answer to the next question
        return answer

    def _hear(self, patience: float) -> dict[str, Any]:
        try:
            line = self.lines.get(timeout=patience)
        except queue.Empty:
            return {"error": "time"}
        try:
            answer = json.loads(line)
        except ValueError:
            return {"error": self._cause()}
        return answer if isinstance(answer, dict) else {"error": "crash"}

    def _cause(self) -> str:
        """Why a worker ended. It sends itself a signal when its time is up."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return "time" if self.process.wait(5) in _ALARMS else "crash"
        return "crash"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(OSError, ValueError):
            if self.process.stdin is not None:  # the listener closes the other pipe
                self.process.stdin.close()


_ALARMS = (-27, -26, -14, -24)  # SIGPROF, SIGVTALRM, SIGALRM, SIGXCPU


def _listen(pipe: Any, lines: queue.Queue[bytes]) -> None:
    """Put a worker's output into the queue line by line; an empty line means that the worker has ended."""
    with contextlib.suppress(OSError, ValueError):
        while line := pipe.readline():
            lines.put(line)
    pipe.close()
    lines.put(b"")


def _why(answer: dict[str, Any]) -> str:
    said = answer.get("problem") or {"time": "it did not start in time"}.get(
        answer.get("error", ""), "it did not start"
    )
    return str(said)[:300]


def _installed() -> str:
    """The installed versions. The usual cause is an antlr4 version that the parser was not built with."""
    found = []
    for name in PACKAGES.values():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(found) or "none of its packages is installed"


def need_math_verify() -> None:
    if missing := [name for module, name in PACKAGES.items() if importlib.util.find_spec(module) is None]:
        raise TaskError(f"checking answers needs {', '.join(missing)}: {INSTALL}")


_PROVEN: set[Path] = set()  # workers whose parser was tested
_POOLS: weakref.WeakSet[Pool] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for pool in list(_POOLS):
        pool.close()
