"""Named places where a test may kill the process: `TRAILMARK_KILL_AT=segment.synced#2` dies there the second time."""

from __future__ import annotations

import os
import signal
from collections import Counter

_reached: Counter[str] = Counter()


def point(name: str) -> None:
    """Die here by SIGKILL when TRAILMARK_KILL_AT is `name`, or `name#k` and this is the k-th time; else do nothing."""
    target = os.environ.get("TRAILMARK_KILL_AT")
    if target:
        _reached[name] += 1
        if target in (name, f"{name}#{_reached[name]}"):
            os.kill(os.getpid(), signal.SIGKILL)
