"""Named points where a test may kill the process: `TRAILMARK_KILL_AT=segment.synced#2` kills it there the second
time. `TRAILMARK_KILL_WITH=SIGTERM` sends another signal than SIGKILL."""

from __future__ import annotations

import os
import signal
from collections import Counter

_reached: Counter[str] = Counter()


def point(name: str) -> None:
    """Send the process the signal if TRAILMARK_KILL_AT is `name`, or is `name#k` and this is the k-th call."""
    target = os.environ.get("TRAILMARK_KILL_AT")
    if target:
        _reached[name] += 1
        if target in (name, f"{name}#{_reached[name]}"):
            os.kill(os.getpid(), signal.Signals[os.environ.get("TRAILMARK_KILL_WITH", "SIGKILL")])
