"""The real server under requests that would freeze a careless one, each sent while /health is asked again and again and
must answer. `make test-hostile`; the latency itself is measured by bench/soak.py."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.hostile
DEADLINE = 10.0  # seconds for an answer of /health: generous, and far below what a frozen server takes
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
JSON = {"Content-Type": "application/json"}
SAY = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with a long context."""
    from trailmark.models.tiny import build, tiny_config, tiny_tokenizer

    path, tokenizer = tmp_path_factory.mktemp("model"), tiny_tokenizer()
    build(tiny_config("llama", vocab=len(tokenizer), layers=1, width=32, context=4096)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@contextlib.contextmanager
def started(folder, log, *words, files=None):
    """The address and process of a server whose every line goes to `log`."""
    command = [sys.executable, "-m", "trailmark", "serve", str(folder), "--port", "0", "--name", "m", *words]
    if files is not None:
        command = ["bash", "-c", f'ulimit -n {files}; exec "$@"', "-", *command]
    with log.open("w") as out:
        process = subprocess.Popen(command, env=ENV, stdout=out, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + 120
        while (found := re.search(r"at (http://\S+)/v1", log.read_text())) is None:
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        yield found[1], process
    finally:
        process.kill()
        process.wait(30)


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    with started(folder, tmp_path_factory.mktemp("log") / "log", "--grace", "1") as (url, process):
        yield url
        assert process.poll() is None


class Polling:
    """Asks for /health (with a `body`: for a completion) on connections of its own, one after the other."""

    def __init__(self, url, body=None, deadline=DEADLINE):
        self.url, self.body, self.deadline = url, body, deadline
        self.took, self.wrong, self.stop = [], [], threading.Event()
        self.thread = threading.Thread(target=self.ask)

    def ask(self):
        while not self.stop.is_set():
            began = time.monotonic()
            try:
                asked = ("GET", "/health") if self.body is None else ("POST", TEXT)
                httpx.request(asked[0], self.url + asked[1], json=self.body, timeout=self.deadline).raise_for_status()
                self.took.append(time.monotonic() - began)
            except httpx.HTTPError as problem:
                self.wrong.append(f"{type(problem).__name__} after {time.monotonic() - began:.1f} s")
            self.stop.wait(0.05)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        time.sleep(0.3)
        self.stop.set()
        self.thread.join()
        assert self.took and not self.wrong


def connect(url, buffer=None):
    host, port = url.removeprefix("http://").split(":")
    made = socket.socket()
    made.settimeout(30)
    if buffer is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    made.connect((host, int(port)))
    return made


def raw(path, body):
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ATTACKS = {
    "a stop text of a megabyte": (TEXT, {"prompt": "a", "stop": "ab" * 500_000, "max_tokens": 500, "stream": True}),
    "32 stop texts of 200 kB": (TEXT, {"prompt": "a", "stop": ["ab" * 100_000] * 32, "max_tokens": 500}),
    "two million stop texts": (TEXT, {"prompt": "a", "stop": ["a"] * 1_500_000}),
    "log-probs without end": (CHAT, {"messages": SAY, "n": 128, "logprobs": True, "top_logprobs": 20}),
    "log-probs of long prompts": (TEXT, {"prompt": ["a" * 4000] * 100, "prompt_logprobs": 20, "max_tokens": 1}),
    "250,000 empty messages": (CHAT, {"messages": [{"role": "user", "content": ""}] * 250_000}),
    "a role of 7 MB": (CHAT, {"messages": [{"role": "u" * (7 << 20), "content": "hi"}]}),
    "a message of 7 MB": (CHAT, {"messages": [{"role": "user", "content": "u" * (7 << 20)}]}),
    "a million parts": (CHAT, {"messages": [{"role": "user", "content": [{}] * 1_500_000}]}),
    "a name of 7 MB": (CHAT, {"messages": SAY, "model": "m" * (7 << 20)}),
    "a field of 7 MB": (CHAT, {"messages": SAY, "m" * (7 << 20): 1}),
    "half a million fields": (CHAT, {"messages": SAY, **{f"x{k}": 1 for k in range(400_000)}}),
    "half a million options": (CHAT, {"messages": SAY, "chat_template_kwargs": {f"x{k}": 1 for k in range(400_000)}}),
    "three million ids, the last wrong": (TEXT, {"prompt": [1] * 2_500_000 + ["a"]}),
    "a million texts, the last wrong": (TEXT, {"prompt": ["a"] * 1_500_000 + [1]}),
    "a million prompts": (TEXT, {"prompt": ["a"] * 1_500_000}),
    "a million rows": (TEXT, {"prompt": [[1]] * 1_500_000}),
    "a million states": ("/v1/values", {"states": ["a"] * 1_500_000}),
    "a million completions": ("/v1/score", {"prompt": "a", "completion": ["a"] * 1_500_000}),
    "a key of 7 MB": (TEXT, {"prompt": "a", "key": "k" * (7 << 20)}),
    "a million step ends": (TEXT, {"prompt": "a", "search": {"beam": 2, "by": "logp", "step_ends": ["a"] * 1_500_000}}),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_request_out_of_all_bounds_is_refused_and_health_answers(server, name):
    path, body = ATTACKS[name]
    with Polling(server):
        answer = httpx.post(server + path, json=body, timeout=60)
    assert answer.status_code in (400, 404) and answer.json()["error"]["message"]


@pytest.mark.parametrize("data", [b"[" * (7 << 20), b'{"a":' * (1 << 20), b"[" * 190 + b"]" * 190, b"9" * (7 << 20)])
def test_json_that_is_no_request(server, data):
    with Polling(server):
        answer = httpx.post(server + TEXT, content=data, headers=JSON, timeout=60)
    assert answer.status_code == 400


LARGEST = {
    "stop texts": {
        "prompt": "a",
        "stop": ["ab" * 512] * 31 + ["b" * 1024],
        "max_tokens": 1500,
        "n": 8,
        "ignore_eos": True,
    },
    "log-probs": {"prompt": "a", "logprobs": 20, "max_tokens": 400, "n": 64, "ignore_eos": True},
    "log-probs of prompts": {"prompt": ["a" * 2000] * 12, "prompt_logprobs": 20, "max_tokens": 1},
    "prompts": {"prompt": ["ab" * 200] * 500, "max_tokens": 1},
}


@pytest.mark.parametrize("name", LARGEST)
def test_the_largest_requests_that_are_served(server, name):
    with Polling(server):
        answer = httpx.post(server + TEXT, json=LARGEST[name], timeout=280)
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"]


def test_the_longest_conversation(server):
    talk = [{"role": "user" if k % 2 == 0 else "assistant", "content": "a"} for k in range(2047)]
    with Polling(server):
        answer = httpx.post(server + CHAT, json={"messages": talk, "max_tokens": 1}, timeout=60)
        scored = httpx.post(f"{server}/v1/score", json={"messages": talk[:101], "completion": "a"}, timeout=200)
    assert answer.status_code == 400 and "tokens long" in answer.json()["error"]["message"]
    assert scored.status_code == 200


def test_clients_that_vanish(server):
    body = json.dumps({"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "n": 4, "stream": True}).encode()
    with Polling(server):
        for k in range(60):
            with connect(server) as gone:
                gone.sendall(raw(TEXT, body)[: None if k % 2 else 40 + k])
    end = time.monotonic() + 60
    while httpx.get(f"{server}/health").json()["sequences"]:
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_client_that_reads_nothing(server):
    body = json.dumps({"prompt": "a", "max_tokens": 400, "n": 60, "logprobs": 20, "ignore_eos": True}).encode()
    with Polling(server), connect(server) as deaf:
        deaf.sendall(raw(TEXT, body))
        done = httpx.post(server + TEXT, json={"prompt": "a", "max_tokens": 2, "ignore_eos": True}, timeout=280)
    assert done.json()["usage"]["completion_tokens"] == 2


WAIT, MORE_MB = 15.0, 1024  # seconds for a token beside a greedy client; what the server may hold more meanwhile
REPEATED = {"prompt": "a" * 700, "n": 128, "max_tokens": 1, "prompt_logprobs": 5}
LONG = {"prompt": "a", "max_tokens": 3500, "ignore_eos": True}
KEYS = [{"type": "object", "properties": {f"k{i}{j}": {"type": "number"} for j in range(10)}} for i in range(40)]
FORM = {"type": "json_schema", "json_schema": {"name": "m", "schema": {"anyOf": KEYS}}}
GREEDY = {  # what one client asks, on how many connections, and whether it reads the answers
    "a search": ({**LONG, "search": {"beam": 64, "rounds": 1000, "by": "logp", "step_ends": [*"aeiou\n"]}}, 1, True),
    "a full queue": ({**LONG, "n": 8}, 512, True),
    "many long prompts": ({"prompt": [f"{k} {'a' * 900}" for k in range(128)], "max_tokens": 1}, 30, True),
    "thousands of texts": ({"prompt": ["ab " * 300] * 4000, "max_tokens": 1}, 8, True),
    "texts beyond the context": ({"prompt": ["ab " * 2000] * 1300, "max_tokens": 1}, 8, True),
    "a large schema": ({**LONG, "ignore_eos": False, "n": 16, "response_format": FORM}, 10, True),
    "repeated log-probs": (REPEATED, 8, True),
    "answers that nobody reads": (REPEATED, 60, False),
    "streams that nobody reads": ({**LONG, "n": 64, "stream": True}, 60, False),
}


@pytest.fixture(scope="module")
def wide(folder, tmp_path_factory):
    """A server whose queue holds a search with 64 beams."""
    with started(folder, tmp_path_factory.mktemp("log") / "log", "--queue", "4080") as made:
        yield made


def megabytes(process, field):
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


@pytest.mark.parametrize("name", GREEDY)
def test_a_token_comes_soon_whatever_another_client_asks_for(wide, name):
    url, process = wide
    body, many, reads = GREEDY[name]
    data, over = raw(TEXT, json.dumps(body).encode()), threading.Event()
    before = megabytes(process, "VmRSS")

    def drain(one):
        with contextlib.suppress(OSError):
            while not over.is_set() and one.recv(1 << 16):
                pass

    def leave(one):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)

    with contextlib.ExitStack() as held:
        for _ in range(many):
            one = held.enter_context(connect(url, None if reads else 4096))
            one.sendall(data)
            if reads and many < 100:
                held.callback(leave, one)  # ends the thread's wait
                threading.Thread(target=drain, args=[one], daemon=True).start()
        with Polling(url, {"prompt": "b", "max_tokens": 1}, WAIT), Polling(url):
            time.sleep(8)
        over.set()
    assert megabytes(process, "VmHWM") - before < MORE_MB
    end = time.monotonic() + 60
    while httpx.get(f"{url}/health", timeout=DEADLINE).json()["sequences"]:
        assert time.monotonic() < end
        time.sleep(0.1)


def test_three_hundred_half_sent_requests_at_256_files(folder, tmp_path):
    log = tmp_path / "log"
    with started(folder, log, files=256) as (url, process), contextlib.ExitStack() as held:
        with Polling(url):
            half = []
            for k in range(300):
                one = held.enter_context(connect(url))
                with contextlib.suppress(ConnectionError):  # the server has closed it already
                    one.sendall(
                        b""
                        if k % 3 == 0
                        else b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: "
                        if k % 3 == 1
                        else raw(TEXT, b"{" * 99)[:-9]
                    )
                half.append(one)
            done = httpx.post(url + TEXT, json={"prompt": "a", "max_tokens": 2, "ignore_eos": True}, timeout=60)
            assert done.json()["usage"]["completion_tokens"] == 2
            for one in half:  # headers get 10 s, bodies 30
                one.settimeout(60)
                with contextlib.suppress(ConnectionError):
                    while one.recv(4096):
                        pass
        assert process.poll() is None and len(log.read_bytes()) < 20_000
        assert httpx.get(f"{url}/health").json() == {"status": "ok", "sequences": 0, "limit": 528}


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_within_seconds_under_load(folder, tmp_path, sign):
    with started(folder, tmp_path / "log", "--grace", "1") as (url, process), contextlib.ExitStack() as held:
        body = json.dumps({"prompt": "a", "max_tokens": 4000, "n": 100, "ignore_eos": True, "logprobs": 0}).encode()
        for k in range(8):
            one = held.enter_context(connect(url))
            one.sendall(raw(TEXT, body)[: None if k < 5 else -5])
        while httpx.get(f"{url}/health").json()["sequences"] < 400:
            time.sleep(0.05)
        process.send_signal(sign)
        assert process.wait(30) == 0


def test_the_keyboard_ends_it_while_long_stop_texts_are_looked_for(folder, tmp_path):
    with started(folder, tmp_path / "log", "--grace", "1") as (url, process), connect(url) as one:
        path, body = ATTACKS["32 stop texts of 200 kB"]
        one.sendall(raw(path, json.dumps(body).encode()))
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
