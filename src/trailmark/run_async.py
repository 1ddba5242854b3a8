"""Call asynchronous code from ordinary code, also in a notebook.

`asyncio.run` refuses to work inside a running loop, and a notebook's cells run inside one. There the work gets a thread
with its own loop, and the cell waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def wait(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end and return what it returns."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1, thread_name_prefix="trailmark") as thread:
        return thread.submit(asyncio.run, work).result()
