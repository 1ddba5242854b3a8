"""Connections: how many there may be, how long one may take its time, and how much is said about it.

A connection is *waiting* while it has not sent a whole request: new, half-sent, or kept alive. It gets `HEADER_S` seconds for the
headers and may be idle for `IDLE_S` after an answer (the time for a body is in `service`). When the house is full, the one that has waited longest makes room for a
new one, so that somebody who really asks (for /health, say) gets in; only where all are at work is a new one told 503. A client that
reads nothing of its answer for `STALL_S` is cut off.
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

HEADER_S = 10.0  # from connecting, or from the first byte of a further request, to the last byte of its headers
IDLE_S = 30  # without a request; longer than clients keep a connection (httpx: 5 s), or they would meet a closed one
STALL_S = 60.0  # in which nothing of an answer is read
MOST = 1024  # connections, where files allow that many
SPARE_FILES = 64  # left to everything else
ACCEPTED = 16  # connections taken from the backlog at once: fewer than SPARE_FILES
QUIET_S = 60.0  # between two lines about the same trouble


def most_connections() -> int:
    """As many as the limit on open files allows."""
    try:
        import resource

        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        open_now = len(os.listdir("/proc/self/fd"))
    except (ImportError, OSError):
        return MOST
    return MOST if soft < 0 else max(8, min(MOST, soft - open_now - SPARE_FILES))


class Once(logging.Filter):
    """One line about a kind of trouble in a while; the next one says how many were left out."""

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


ONCE = Once()
log = logging.getLogger("uvicorn.error")


def quiet() -> None:
    """Whatever goes wrong a thousand times is told once in a while."""
    for name in ("uvicorn.error", "asyncio"):
        logger = logging.getLogger(name)
        if ONCE not in logger.filters:
            logger.addFilter(ONCE)


class Door:
    """What the connections of one server share."""

    def __init__(self, most: int | None = None):
        self.most = most or most_connections()
        self.waiting: dict[Connection, None] = {}  # the longest first

    def protocol(self) -> type[Connection]:
        door = self

        class Here(Connection):
            def __init__(self, *given: Any, **named: Any):
                super().__init__(*given, **named)
                self.door = door

        return Here


class Connection(H11Protocol):
    door: Door

    def __init__(self, *given: Any, **named: Any):
        super().__init__(*given, **named)
        self.late: asyncio.TimerHandle | None = None  # waits for headers
        self.stalled: asyncio.TimerHandle | None = None  # waits for a reader

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.door.most:
            if not self.door.waiting:
                log.warning("all %d connections are at work: new ones are told 503", self.door.most)
                self.turn_away()
                return
            log.warning("more than %d connections: those that send no request are closed", self.door.most)
            oldest = next(iter(self.door.waiting))
            self.door.waiting.pop(oldest)
            oldest.transport.abort()
        self.look(HEADER_S)

    def turn_away(self) -> None:
        problem = ApiError(503, "too many connections: try again later.", code="too_many_connections").body()
        data = json.dumps(problem).encode()
        head = f"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n"
        self.transport.write(f"{head}retry-after: 1\r\nconnection: close\r\n\r\n".encode() + data)
        self.transport.close()

    def look(self, seconds: float | None) -> None:
        """Where it stands now; while its headers are awaited, it has `seconds` for them (None: as long as it is kept alive)."""
        if self.working and self.late is not None:
            self.late.cancel()
            self.late = None
        if self.working and not self.cycle.more_body:
            self.door.waiting.pop(self, None)
        elif not self.transport.is_closing():
            self.door.waiting.setdefault(self)
            if not self.working and self.late is None and seconds is not None:
                self.late = self.loop.call_later(seconds, self.too_late)

    def too_late(self) -> None:
        log.warning("a connection sent no whole request within %g s and was closed", HEADER_S)
        self.transport.abort()

    @property
    def working(self) -> bool:
        """The headers of a request are here, and its answer is not over."""
        return self.cycle is not None and not self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        self.look(HEADER_S)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        begun = self.conn.their_state is not h11.IDLE or self.conn.trailing_data[0]  # of a body that nobody wants, or a next request
        self.look(HEADER_S if begun else None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.door.waiting.pop(self, None)
        if self.late is not None:
            self.late.cancel()
        self.resume_writing()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        if self.working and self.cycle.more_body:  # whoever is still sending will not be answered
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
        if left >= before:
            log.warning("a client read nothing of its answer for %g s and was cut off", STALL_S)
            self.transport.abort()
        else:
            self.watch(left)

    def resume_writing(self) -> None:
        if self.stalled is not None:
            self.stalled.cancel()
            self.stalled = None
        super().resume_writing()
