"""Check a run on its own data: `verify(run)` looks for silent mistakes and reports what it found.

It changes nothing in a run. The command writes only `verify.json` beside the recipe. Importing this module is fast.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trailmark.verify.report import Report

__all__ = ["verify"]


def verify(run: str | Path, build: Callable[..., Any] | None = None, limit: int = 64) -> Report:
    """Check the run in a directory. `build` makes samples from episodes (default: `build_samples`) and is tested
    itself. `limit` is the largest number of episodes, turns or rows that each check reads."""
    from trailmark.verify.checks import certify

    return certify(run, build, limit)
