"""The body of a request, as it arrives: bounded in size and in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request

from trailmark.serve.capacity import SMALL
from trailmark.serve.errors import ApiError

MOST_BYTES = 8 << 20  # largest body; a larger one is read and dropped, so that the client gets the error, up to
PATIENCE_BYTES = 64 << 20
PATIENCE_S = 30  # seconds for a body to arrive
CLOSE = {"Connection": "close"}


async def received(request: Request, hold: Callable[[int], Any]) -> bytes:
    """The body, if it is not too large and arrives in time. `hold` gets the size of each part of a large one, and may
    refuse it."""
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(PATIENCE_S):
            async for part in request.stream():
                size += len(part)
                if size <= MOST_BYTES:
                    hold(max(0, min(len(part), size - SMALL)))
                    parts.append(part)
                elif size > PATIENCE_BYTES:
                    break
    except ClientDisconnect:
        raise ApiError(400, "the client disconnected before its request was complete.") from None
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {PATIENCE_S} s.", headers=CLOSE) from None
    if size > MOST_BYTES:
        headers = CLOSE if size > PATIENCE_BYTES else {}
        message = f"the body is larger than {MOST_BYTES >> 20} MB."
        raise ApiError(413, message, code="request_too_large", headers=headers)
    return b"".join(parts)
