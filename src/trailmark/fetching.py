"""Whether anything may be fetched from a network now. A dry run fetches nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from trailmark.errors import TrailmarkError

_ALLOWED = ContextVar("fetching is allowed", default=True)


class NotHere(TrailmarkError):
    """Something is not known to be on this machine, and may not be fetched now."""


@contextmanager
def nothing_fetched() -> Iterator[None]:
    """Inside, `may_fetch` raises NotHere."""
    before = _ALLOWED.set(False)
    try:
        yield
    finally:
        _ALLOWED.reset(before)


def allowed() -> bool:
    return _ALLOWED.get()


def may_fetch(what: str) -> None:
    """Called before `what` is fetched."""
    if not allowed():
        raise NotHere(f"{what} would be fetched")
