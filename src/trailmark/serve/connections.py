"""Connections: how many there may be, how long each may wait, and how much is logged about them.

A connection is *waiting* while it has not sent a whole request: new, half-sent, or kept alive. It has `HEADER_S`
seconds for the headers and may be idle for `IDLE_S` after an answer (`received` limits the time for a body). If the
limit is reached, the connection that has waited longest is closed for a new one, so that a real request (for example to
/health) gets in. Only if all connections are working, a new one gets a 503. A client that reads fewer than `SLOWEST`
bytes of its answer in `STALL_S` is cut off.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from trailmark.serve.errors import ApiError

HEADER_S = 10.0  # seconds from connecting, or from the first byte of a further request, to the end of its headers
IDLE_S = 30  # seconds without a request; clients keep a connection for less (httpx: 5 s), so they see no closed one
STALL_S, SLOWEST = 60.0, 1 << 12  # seconds, and the bytes of an answer that must be read in them
MOST = 1024  # most connections, if the limit on open files allows that many
SPARE_FILES = 64  # open files left to everything else
ACCEPTED = 16  # connections taken from the backlog at once: fewer than SPARE_FILES
QUIET_S = 60.0  # seconds between two log lines about the same problem


def most_connections() -> int:
    """The number of connections that the limit on open files allows."""
    try:
        import resource

        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        open_now = len(os.listdir("/proc/self/fd"))
    except (ImportError, OSError):
        return MOST
    return MOST if soft < 0 else max(8, min(MOST, soft - open_now - SPARE_FILES))


class RepeatFilter(logging.Filter):
    """A log filter: one line about a kind of problem in a while; the next one says how many were left out."""

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        kind = str(record.msg).partition("\n")[0][:80]
        last, left = self.told.get(kind, (-QUIET_S, 0))
        now = time.monotonic()
        if now - last < QUIET_S:
            self.told[kind] = last, left + 1
            return False
        self.told = {k: v for k, v in self.told.items() if v[1] or now - v[0] < QUIET_S}
        self.told[kind] = now, 0
        if left:
            record.msg = f"{record.msg} ({left} more of these before)"
        return True


REPEATS = RepeatFilter()
log = logging.getLogger("uvicorn.error")


def limit_repeated_logs() -> None:
    """Log a problem that occurs thousands of times only once in a while."""
    for name in ("uvicorn.error", "asyncio"):
        logger = logging.getLogger(name)
        if REPEATS not in logger.filters:
            logger.addFilter(REPEATS)


class ConnectionLimits:
    """The state that all connections of one server share."""

    def __init__(self, most: int | None = None):
        self.most = most or most_connections()
        self.waiting: dict[Connection, None] = {}  # the one that waited longest is first

    def protocol(self) -> type[Connection]:
        limits = self

        class Here(Connection):
            def __init__(self, *given: Any, **named: Any):
                super().__init__(*given, **named)
                self.limits = limits

        return Here


class Connection(H11Protocol):
    limits: ConnectionLimits

    def __init__(self, *given: Any, **named: Any):
        super().__init__(*given, **named)
        self.late: asyncio.TimerHandle | None = None  # the deadline for headers
        self.stalled: asyncio.TimerHandle | None = None  # the deadline for a client that does not read

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.limits.most:
            if not self.limits.waiting:
                log.warning("all %d connections are working: new ones get a 503", self.limits.most)
                self.turn_away()
                return
            log.warning("more than %d connections: those that send no request are closed", self.limits.most)
            oldest = next(iter(self.limits.waiting))
            self.limits.waiting.pop(oldest)
            oldest.transport.abort()
        self.look(HEADER_S)

    def turn_away(self) -> None:
        problem = ApiError(503, "too many connections: try again later.", code="too_many_connections").body()
        data = json.dumps(problem).encode()
        head = f"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n"
        self.transport.write(f"{head}retry-after: 1\r\nconnection: close\r\n\r\n".encode() + data)
        self.transport.close()

    def look(self, seconds: float | None) -> None:
        """Update whether the connection is waiting. Its headers have `seconds` (None: as long as it is kept alive)."""
        if self.working and self.late is not None:
            self.late.cancel()
            self.late = None
        if self.working and not self.cycle.more_body:
            self.limits.waiting.pop(self, None)
        elif not self.transport.is_closing():
            self.limits.waiting.setdefault(self)
            if not self.working and self.late is None and seconds is not None:
                self.late = self.loop.call_later(seconds, self.too_late)

    def too_late(self) -> None:
        log.warning("a connection sent no whole request within %g s and was closed", HEADER_S)
        self.transport.abort()

    @property
    def working(self) -> bool:
        """Whether the headers of a request are here and its answer is not finished."""
        return self.cycle is not None and not self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        self.look(HEADER_S)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # True if a body that is not wanted, or a next request, has already begun.
        begun = self.conn.their_state is not h11.IDLE or self.conn.trailing_data[0]
        self.look(HEADER_S if begun else None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.limits.waiting.pop(self, None)
        if self.late is not None:
            self.late.cancel()
        self.resume_writing()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        if self.working and self.cycle.more_body:  # a client that is still sending gets no answer
            self.transport.abort()
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.watch(self.transport.get_write_buffer_size())

    def watch(self, left: int) -> None:
        self.stalled = self.loop.call_later(STALL_S, self.look_at_reader, left)

    def look_at_reader(self, before: int) -> None:
        left = self.transport.get_write_buffer_size()
        if before - left < SLOWEST:
            log.warning("a client read hardly anything of its answer for %g s and was cut off", STALL_S)
            self.transport.abort()
        else:
            self.watch(left)

    def resume_writing(self) -> None:
        if self.stalled is not None:
            self.stalled.cancel()
            self.stalled = None
        super().resume_writing()
