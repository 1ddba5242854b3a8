"""Progress of long work: a live view on a terminal, plain lines elsewhere.

`Phases` measures how long each phase of a step took and how many tokens it handled. The numbers go to timings.jsonl
and, as tokens per second of each phase, to the view.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

SHOWN = ("reward", "success", "kl", "kl_old", "entropy", "nll", "loss")  # in this order
BARS = "▁▂▃▄▅▆▇█"
HISTORY = 32
EVERY = 10.0  # seconds between plain lines
PATIENCE = 3.0  # seconds of preparation without a word
T = TypeVar("T")


class Phases:
    """Seconds and tokens of the phases of one step, as {"collect_seconds": …, "collect_tokens": …}."""

    def __init__(self) -> None:
        self.numbers: dict[str, float] = {}

    def add(self, name: str, seconds: float, tokens: int = 0) -> None:
        for key, value in ((f"{name}_seconds", seconds), (f"{name}_tokens", tokens)):
            if value or key in self.numbers or key.endswith("seconds"):
                self.numbers[key] = self.numbers.get(key, 0) + value

    @contextmanager
    def phase(self, name: str, tokens: int = 0) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - began, tokens)

    def through(self, name: str, items: Iterable[T]) -> Iterator[T]:
        """Yield the items. The time to make them counts for `name`; the time to use them does not."""
        source = iter(items)
        while True:
            began = time.perf_counter()
            try:
                item = next(source)
            except StopIteration:
                return
            finally:
                self.add(name, time.perf_counter() - began)
            yield item


def rates(timings: Mapping[str, float]) -> dict[str, float]:
    """Tokens per second of each phase that counted tokens."""
    out = {}
    for key, seconds in timings.items():
        name = key.removesuffix("_seconds")
        tokens = timings.get(f"{name}_tokens")
        if key != name and tokens and seconds > 0:
            out[name] = tokens / seconds
    return out


def sparkline(values: Iterable[float]) -> str:
    """Values as bars from the smallest to the largest. Equal values are drawn at half height."""
    shown = [v for v in values if v == v and abs(v) != float("inf")]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    if high == low:
        return BARS[3] * len(shown)
    return "".join(BARS[min(7, int((v - low) / (high - low) * 8))] for v in shown)


def duration(seconds: float) -> str:
    """A duration: 4 s, 1:05, 2:00:07."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def short_count(x: float) -> str:
    """A count: 950, 1.2k, 34k, 1.5M."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if x >= 0.9995 * size:
            return f"{x / size:.1f}{letter}" if x < 9.95 * size else f"{x / size:.0f}{letter}"
    return f"{x:.0f}"


def typical(seconds: Sequence[float]) -> float:
    """The mean, in which a value above three medians counts as three medians. A step that loads, compiles or waits for
    a disk says little about the others."""
    ordered = sorted(seconds)
    middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    if len(ordered) == 2:  # the first of the first two steps is the slow one
        middle = ordered[0]
    return sum(min(s, 3 * middle) for s in ordered) / len(ordered)


def counted(items: Iterable[T], what: str, unit: str, total: int | None = None) -> Iterator[T]:
    """Yield the items. If that takes long, say on stderr how many are done: in one line that is written anew on a
    terminal, in plain lines now and then elsewhere."""
    began = said = time.monotonic()
    live, done = sys.stderr.isatty(), 0
    for done, item in enumerate(items):
        wait = PATIENCE if said == began else 0.5 if live else EVERY
        if not done % 256 and (now := time.monotonic()) - said > wait:
            said = now
            of = "" if not total else f" of {total:,}"
            left = f", {duration((now - began) * (total - done) / done)} left" if total and done else ""
            print(f"{what}: {done:,}{of} {unit}{left}", end="\033[K\r" if live else "\n", file=sys.stderr, flush=True)
        yield item
    if live and said > began:
        print("\033[K", end="", file=sys.stderr, flush=True)


class Progress:
    def __init__(self, total: int, done: int = 0, name: str = ""):
        self.total, self.done, self.name = total, done, name
        self.step, self.metrics, self.timings = done, {}, {}
        self.evaluated: tuple[int, dict[str, float]] | None = None
        self.history: dict[str, deque[float]] = {}
        self._began = self._said = time.monotonic()
        self._last = self._began, done  # the time and the number of the last step
        # Seconds of the recent steps, without (False) and with (True) an evaluation.
        self._pace: dict[bool, deque[float]] = {kind: deque(maxlen=HISTORY) for kind in (False, True)}
        self._tested, self._gap = done, 0  # the last step with an evaluation, and its distance to the one before
        self._first = True
        self._live: Any = None
        self._lock = threading.RLock()  # another thread draws the view

    def __enter__(self) -> Progress:
        self._began = time.monotonic()
        self._last = self._began, self.done
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(
                get_renderable=self.view, console=Console(stderr=True), refresh_per_second=4, transient=False
            )
            self._live.start()
        return self

    def update(self, step: int, metrics: Mapping[str, float], timings: Mapping[str, float] | None = None) -> None:
        """Keep and show the numbers of a step. Without a terminal, print a line now and then."""
        with self._lock:
            self._keep(step, metrics, timings)
        now = time.monotonic()
        if self._live is None and (self._first or now - self._said > EVERY or step == self.total):
            self._first, self._said = False, now
            print(self.line(), file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        """Print one line that stays, above the view if there is one."""
        if self._live is None:
            print(f"warning: {text}", file=sys.stderr, flush=True)
        else:
            self._live.console.print(f"warning: {text}", style="yellow", markup=False, highlight=False)

    def _keep(self, step: int, metrics: Mapping[str, float], timings: Mapping[str, float] | None) -> None:
        self.step, self.metrics, self.timings = step, dict(metrics), dict(timings or {})
        self._time(step, any(k.startswith("eval/") for k in metrics))
        for key, value in metrics.items():
            if _last(key) in SHOWN and not key.startswith("eval/"):
                self.history.setdefault(key, deque(maxlen=HISTORY)).append(value)
        if found := {k.removeprefix("eval/"): v for k, v in metrics.items() if k.startswith("eval/")}:
            self.evaluated = step, found

    def _time(self, step: int, tested: bool) -> None:
        now = time.monotonic()
        (then, before), self._last = self._last, (now, step)
        if step > before:
            self._pace[tested].append((now - then) / (step - before))
        if tested:
            self._gap, self._tested = max(1, step - self._tested), step

    def left(self) -> float | None:
        """Seconds to the end. Steps with an evaluation take longer and are rare, so the two kinds are counted apart.
        One mean over the last steps would jump whenever an evaluation enters or leaves it."""
        remaining = self.total - self.step
        plain, tested = self._pace[False], self._pace[True]
        if remaining <= 0 or not (plain or tested):
            return None if not (plain or tested) else 0.0
        usual = typical(plain or tested)
        if not tested:
            return usual * remaining
        # The very last step is evaluated too, whatever the interval is.
        gap = self._gap or self.total
        times = min(remaining, max(1, -(-(self.total - self._tested) // gap)))
        return usual * (remaining - times) + typical(tested) * times

    def line(self) -> str:
        """The progress as one plain line."""
        keys = _shown(self.metrics)
        words = [f"{self.name} {self.step}/{self.total}", *(f"{k} {self.metrics[k]:.4g}" for k in keys[:7])]
        words += [f"{name} {short_count(rate)} tok/s" for name, rate in rates(self.timings).items()]
        left = self.left()
        if left is not None and self.step < self.total:
            words.append(f"{duration(left)} left")
        return "  ".join(words)

    def view(self) -> Any:
        """The view on a terminal: steps done, numbers with their recent past, speed, the last evaluation."""
        with self._lock:
            return self._draw()

    def _draw(self) -> Any:
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        left = self.left()
        top = Table.grid(padding=(0, 2), expand=True)
        top.add_column(no_wrap=True)
        top.add_column(ratio=1)
        top.add_column(no_wrap=True, justify="right")
        time_left = "" if left is None or self.step >= self.total else f"{duration(left)} left"
        spent = duration(time.monotonic() - self._began)
        top.add_row(
            f"{self.step}/{self.total}", ProgressBar(max(1, self.total), self.step), f"{spent} {time_left}".strip()
        )
        numbers = Table.grid(padding=(0, 2))
        for key in _shown(self.history)[:6]:
            past = self.history[key]
            numbers.add_row(Text(key, "dim"), Text(f"{past[-1]:.4g}", "bold"), Text(sparkline(past), "cyan"))
        parts: list[Any] = [top, numbers]
        speed = [f"{name} {short_count(rate)} tok/s" for name, rate in rates(self.timings).items()]
        speed = speed or [f"{k.removesuffix('_seconds')} {v:.2g} s" for k, v in self.timings.items() if k != "seconds"]
        if speed:
            parts.append(Text("speed  " + "  ".join(speed), "dim"))
        if self.evaluated:
            step, found = self.evaluated
            said = "  ".join(f"{k} {found[k]:.4g}" for k in _shown(found))
            parts.append(Text.assemble((f"evaluation at step {step}  ", "dim"), (said, "bold green")))
        return Panel(Group(*parts), title=Text(self.name or "training"), title_align="left", border_style="dim")

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()


def _last(key: str) -> str:
    return key.split("/")[-1]


def _shown(names: Iterable[str]) -> list[str]:
    """The names to show, training before evaluation, in the order of SHOWN."""
    known = [n for n in names if _last(n) in SHOWN]
    return sorted(known, key=lambda n: (n.startswith("eval/"), SHOWN.index(_last(n))))
