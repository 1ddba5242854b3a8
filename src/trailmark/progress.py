"""Progress of long work: a bar when a person watches, plain lines when nobody does."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

SHOWN = ("reward", "success", "loss", "nll", "kl_old", "entropy")


class Progress:
    def __init__(self, total: int, done: int = 0, name: str = ""):
        self.total, self.done, self.name = total, done, name
        self._bar: Any = None
        self._said = 0.0

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Rich

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[numbers]}"),
            )
            self._bar = Rich(*columns, console=Console(stderr=True))
            self._bar.start()
            self._id = self._bar.add_task(self.name, total=self.total, completed=self.done, numbers="")
        return self

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        keys = [k for k in metrics if k.split("/")[-1] in SHOWN]
        numbers = "  ".join(f"{k} {metrics[k]:.4g}" for k in keys[:5])
        if self._bar is not None:
            self._bar.update(self._id, completed=step, numbers=numbers)
        elif time.monotonic() - self._said > 10 or step == self.total:
            self._said = time.monotonic()
            print(f"{self.name} {step}/{self.total}  {numbers}", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
