"""`trailmark serve` as a process: what it says when it cannot start, and how it ends."""

import re
import signal
import socket
import subprocess
import threading
import time

import forked
import httpx
import openai
import pytest
from serve_calls import ENV, command, refused


@pytest.fixture
def start():
    made = []

    def start(*words, **env):
        process = forked.Popen(command(*words), env={**ENV, **env}, stdout=subprocess.PIPE, text=True)
        made.append(process)
        line = process.stdout.readline()
        assert line, "it did not start"
        return process, re.search(r"http://\S+(?=/v1)", line)[0]

    yield start
    for process in made:
        process.kill()
        process.communicate(timeout=30)


def test_what_cannot_be_served(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused("tiny", "--port", port)
        assert f"127.0.0.1:{port} (Address already in use)" in said and "--port" in said
    assert "neither a local folder nor" in refused("no/such-model", "--port", 0)
    assert "no config.json" in refused(tmp_path, "--port", 0)
    assert "cannot listen on nowhere.invalid" in refused("tiny", "--host", "nowhere.invalid")
    assert "--device" in refused("tiny", "--port", 0, "--device", "abacus")
    (tmp_path / "checkpoints").mkdir()
    assert "has no checkpoint yet" in refused(tmp_path, "--port", 0)


def test_a_server_starts_serves_and_ends(start):
    process, url = start("tiny", "--port", 0, "--name", "mine", "--slots", 2, "--grace", 30, TRAILMARK_API_KEY="k")
    assert url.startswith("http://127.0.0.1:")
    assert "already in use" in refused("tiny", "--port", url.rsplit(":")[-1])
    with openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0, timeout=60) as client:
        answer = client.chat.completions.create(
            model="mine", messages=[{"role": "user", "content": "hi"}], max_tokens=5
        )
        assert 1 <= answer.usage.completion_tokens <= 5
    done = []

    def long():
        body = {"prompt": "a", "max_tokens": 400, "n": 4, "ignore_eos": True}
        done.append(httpx.post(f"{url}/v1/completions", json=body, headers={"Authorization": "Bearer k"}, timeout=60))

    waiting = threading.Thread(target=long)
    waiting.start()
    while httpx.get(f"{url}/health").json()["sequences"] != 4:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    waiting.join(60)
    assert done[0].status_code == 200 and done[0].json()["usage"]["completion_tokens"] == 1600  # it was let finish


def test_who_is_still_waiting_at_the_deadline_hears_so(start):
    process, url = start("tiny", "--port", 0, "--slots", 1, "--grace", 0.2)
    done = {}

    def long(stream):
        body = {"prompt": "a", "max_tokens": 500, "n": 120, "ignore_eos": True, "stream": stream}
        done[stream] = httpx.post(f"{url}/v1/completions", json=body, timeout=60)

    threads = [threading.Thread(target=long, args=(stream,)) for stream in (False, True)]
    for t in threads:
        t.start()
    while httpx.get(f"{url}/health").json()["sequences"] != 240:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    for t in threads:
        t.join(60)
    assert done[False].status_code == 503 and "is stopping" in done[False].json()["error"]["message"]
    assert done[True].status_code == 200 and "is stopping" in done[True].text.rstrip().rsplit("data: ", 1)[1]
