"""SIGTERM, SIGINT and SIGHUP. A command ends where it is, with `Stopped`; training first ends its step.

`timeout` and some schedulers send a signal twice at once, so a second one counts only if it comes later.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)]
APART = 0.2  # seconds
Handler = Callable[[int, Any], object]


class Stopped(KeyboardInterrupt):
    """A signal asked this process to end. `except Exception` lets it pass. Its notes say what was kept and how to go
    on."""

    def __init__(self, number: int, note: str = ""):
        self.number = number
        super().__init__(
            "stopped by the keyboard" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"
        )
        if note:
            self.add_note(note)


class Asked:
    """Whether a signal has come."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.note = ""  # what `Stopped` says
        self._at = 0.0

    def first(self, number: int) -> bool | None:
        """Note a signal. True: it is the first; None: it is the first, sent twice; False: it is a second one."""
        if self.number is None:
            self.number, self._at = number, time.monotonic()
            return True
        return None if time.monotonic() - self._at < APART else False


_command: Asked | None = None  # of the command that runs


@contextlib.contextmanager
def handling(handler: Handler) -> Iterator[dict[int, Any]]:
    """Signals go to `handler` during the block, if this is the main thread. Ignored ones stay ignored. Yields the
    handlers from before."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):  # None: it is not Python's
                before[number] = signal.signal(number, handler)
    try:
        yield before
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """For a command: a signal raises `Stopped`, and a second one ends the process."""
    global _command
    asked, outer = Asked(), _command

    def handle(number: int, frame: Any) -> None:
        if (first := asked.first(number)) is False:
            os._exit(128 + number)
        if first:
            raise Stopped(number)

    _command = asked
    try:
        with handling(handle):
            yield
    finally:
        _command = outer


@contextlib.contextmanager
def after_step() -> Iterator[Asked]:
    """For work that can only stop at certain places: a signal is noted, and the block looks at `number`. After the
    block it raises `Stopped`, or ends the process if that is what the signal does here. A second signal does what it
    did before the block, at once."""
    asked = Asked()

    def handle(number: int, frame: Any) -> None:
        if (first := asked.first(number)) is False:
            if _command is not None:
                os._exit(128 + number)
            _as_before(before[number], number, frame)
        elif first:
            _say(f"{signal.Signals(number).name}: the run ends after this step; a second signal ends it at once\n")

    with handling(handle) as before:
        yield asked
    if (number := asked.number) is None:
        return
    stopped = Stopped(number, asked.note)
    if _command is not None:
        _command.first(number)
    elif before[number] is not signal.default_int_handler:
        _say(f"{stopped}: {asked.note}\n")
        _as_before(before[number], number, None)
    raise stopped


@contextlib.contextmanager
def advising(how: str | Callable[[], str]) -> Iterator[None]:
    """If the block is stopped, `how` says what was kept or how to go on."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        stopped.add_note(how if isinstance(how, str) else how())
        raise


def _as_before(handler: Any, number: int, frame: Any) -> None:
    if callable(handler):
        handler(number, frame)
    else:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def _say(text: str) -> None:
    """Write to stderr from a signal handler: `print` may be at work just then."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
