"""A certificate of a run on its own data: `verify(run)` looks for what goes wrong in silence, and says what it found.

Nothing here changes a run but `verify.json`, which the command writes beside its recipe. Importing this is light.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trailmark.verify.report import Report

__all__ = ["verify"]


def verify(run: str | Path, build: Callable[..., Any] | None = None, limit: int = 64) -> Report:
    """Check the run in a directory. `build` makes samples of episodes (default: `build_samples`) and is itself under
    test; `limit` bounds how many episodes, turns or rows each check looks at."""
    from trailmark.verify.checks import certify

    return certify(run, build, limit)
