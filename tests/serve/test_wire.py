"""What goes over the wire beside the answers themselves."""

import asyncio
import json
import socket

import httpx
import pytest

from trailmark.commands.serve import serving
from trailmark.engines.http_client import Wire
from trailmark.engines.local import LocalEngine
from trailmark.serve.connections import Connection
from trailmark.serve.service import event

SAY = [{"role": "user", "content": "hi"}]


@pytest.fixture
def engine(make_lm):
    return LocalEngine(make_lm("llama"), 2, 64)


def test_a_small_answer_does_not_wait_for_more_on_either_side(engine, monkeypatch):
    """Without TCP_NODELAY every answer on a kept connection waits 40 ms."""
    served, asked = [], []
    made = Connection.connection_made

    def note(self, transport):
        served.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        made(self, transport)

    async def note_client(response):
        one = response.extensions["network_stream"].get_extra_info("socket")
        asked.append(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    async def ask(url):
        wire = Wire(url, {}, {})
        (await wire._here()).client.event_hooks["response"].append(note_client)
        await wire.get("/health")

    monkeypatch.setattr(Connection, "connection_made", note)
    with serving(engine, "m") as url:
        asyncio.run(ask(url))
    assert served == [1] and asked and all(asked)


def test_no_text_can_forge_a_line_of_a_stream():
    """Clients such as httpx break lines wherever str.splitlines does."""
    text = "".join(chr(c) for c in range(0x3000)) + "data: [DONE]"
    assert len("".join(f"a{chr(c)}" for c in range(0x3000)).splitlines()) > 9
    line, *rest = event({"choices": [{"text": text}]}).splitlines()
    assert rest == [""] and json.loads(line.removeprefix("data: ")) == {"choices": [{"text": text}]}


def test_a_stream_with_line_separators_reads_back_whole(engine, monkeypatch):
    from trailmark.serve.growing_text import Growing

    said = "a\u2028data: [DONE]\u2029b\x85c"
    monkeypatch.setattr(Growing, "add", lambda self, token: said)
    with serving(engine, "m") as url:
        body = {"messages": SAY, "max_tokens": 3, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
            lines = [line for line in answer.iter_lines() if line]
    chunks = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in lines[:-1]]
    assert lines[-1] == "data: [DONE]" and chunks[1]["content"] == said
