"""Slow connections, too many connections, and what is logged about them."""

import contextlib
import json
import logging
import socket

import httpx
import pytest

from trailmark.commands.serve import serving
from trailmark.engines.local import LocalEngine
from trailmark.serve import connections, received
from trailmark.serve.connections import RepeatFilter


@pytest.fixture
def engine(make_lm):
    return LocalEngine(make_lm("llama", context=2048), 2, 2048)


def connect(url, data=b""):
    made = socket.create_connection(("127.0.0.1", int(url.rsplit(":")[-1])), timeout=30)
    made.sendall(data)
    return made


def heard(connection):
    """All that comes until the other side closes."""
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(4096):
            parts.append(part)
    return b"".join(parts)


HALF = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: "
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = POST + b"Content-Length: 99\r\n\r\n{"


def test_half_sent_requests_are_closed(engine, monkeypatch):
    monkeypatch.setattr(connections, "HEADER_S", 0.3)
    monkeypatch.setattr(received, "PATIENCE_S", 0.3)
    with serving(engine, "m") as url, contextlib.ExitStack() as held:
        sent = (b"", HALF, BODY, GET + HALF, GET[:-2] + b"Content-Length: 99\r\n\r\n{")
        silent, half, body, second, unread = [heard(c) for c in [held.enter_context(connect(url, d)) for d in sent]]
        assert silent == half == b""
        assert body.startswith(b"HTTP/1.1 408") and b"did not arrive" in body and b"connection: close" in body.lower()
        assert all(x.startswith(b"HTTP/1.1 200") and x.count(b"HTTP/1.1") == 1 for x in (second, unread))
        assert httpx.get(f"{url}/health").status_code == 200


def test_whoever_sends_nothing_makes_room_for_who_asks(engine, monkeypatch, capfd):
    monkeypatch.setattr(connections, "most_connections", lambda: 4)
    monkeypatch.setattr(connections.REPEATS, "told", {})
    with serving(engine, "m") as url, contextlib.ExitStack() as held:
        waiting = [held.enter_context(connect(url, (b"", HALF, BODY)[k % 3])) for k in range(12)]
        for _ in range(8):
            assert httpx.get(f"{url}/health", timeout=30).json()["status"] == "ok"
        assert [heard(w) for w in waiting[:8]] == [b""] * 8  # the first to come were the first to go
    assert capfd.readouterr().err.count("more than 4 connections") == 1


def test_a_house_full_of_work_says_so(engine, monkeypatch):
    monkeypatch.setattr(connections, "most_connections", lambda: 2)
    body = json.dumps({"prompt": "a", "max_tokens": 2000, "n": 8, "ignore_eos": True}).encode()
    ask = POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with serving(engine, "m") as url, contextlib.ExitStack() as held:
        for _ in range(2):
            held.enter_context(connect(url, ask))
        while engine.counts.decoded < 4 or len(engine.scheduler.open) < 2:
            pass
        answer = httpx.get(f"{url}/health", timeout=30)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "too_many_connections"
        assert answer.headers["retry-after"] == "1"


def test_as_many_connections_as_files_allow(monkeypatch):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda what: (256, 256))
    assert 8 <= connections.most_connections() < 256 - connections.SPARE_FILES
    monkeypatch.setattr(resource, "getrlimit", lambda what: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert connections.most_connections() == connections.MOST and connections.ACCEPTED < connections.SPARE_FILES


def test_one_line_for_each_kind_of_trouble(monkeypatch):
    now = 0.0
    monkeypatch.setattr(connections.time, "monotonic", lambda: now)
    repeats = RepeatFilter()
    record = lambda text: logging.LogRecord("x", logging.WARNING, "", 0, text, (), None)
    kinds = ["accept failed\ntraceback 1", "accept failed\ntraceback 2", "bad request", "accept failed"]
    assert [repeats.filter(record(k)) for k in kinds] == [True, False, True, False]
    now = connections.QUIET_S + 1
    again = record("accept failed")
    assert repeats.filter(again) and again.msg == "accept failed (2 more of these before)"


def test_rubbish_in_place_of_http_is_told_once(engine, capfd, monkeypatch):
    monkeypatch.setattr(connections.REPEATS, "told", {})
    with serving(engine, "m") as url:
        for _ in range(5):
            with connect(url, b"\x16\x03\x01 what?\r\n\r\n") as made:
                assert heard(made).startswith(b"HTTP/1.1 400")
    assert capfd.readouterr().err.count("Invalid HTTP request") == 1
