"""The http engine against our own server equals the local engine; against bad ones it
raises a named error in time, never an empty answer."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from trailmark.commands.serve import serving
from trailmark.config import ServerConfig
from trailmark.engines.base import EngineError, Request, run
from trailmark.engines.http import (
    EngineGarbage,
    EngineRefused,
    EngineStatus,
    EngineTimeout,
    HttpEngine,
)
from trailmark.engines.http_client import address
from trailmark.engines.local import LocalEngine
from trailmark.models.tiny import tiny_tokenizer
from trailmark.rollout.play import Seat, play, solo
from trailmark.seats.open import connect
from trailmark.tasks.taxi import Taxi
from trailmark.types import Failed, SamplingLaw, Scored

TOKENIZER = tiny_tokenizer()


def engine_of(make_lm):
    lm = make_lm("llama", pad_is_eos=False, context=2048)
    return LocalEngine(lm, slots=4, max_len=1024)


@pytest.fixture
def local(make_lm):
    return engine_of(make_lm)


@pytest.fixture
def url(make_lm):
    with serving(engine_of(make_lm), "tiny", api_key="k") as url:
        yield url


def ask(engine, *requests):
    return run(engine, requests)


# --- against our own server -----------------------------------------------------------------------------------------


def test_equals_the_local_engine(url, local):
    there = HttpEngine(url, "tiny", TOKENIZER, api_key="k", exact=True)
    eos = TOKENIZER.eos_token_id
    laws = [
        SamplingLaw(temperature=0),
        SamplingLaw(),
        SamplingLaw(0.7, 0.9, 30),
        SamplingLaw(allowed=(5, 6, 7)),
        SamplingLaw(min_tokens=4, stop_ids=(eos, 9)),
    ]
    asked = [
        Request(tuple(range(3, 9 + k)), law, 1 + k % 3, 12, ends, stops, seed=4, key=f"episode/{k}\0{k}")
        for k, law in enumerate(laws)
        for ends in ((eos, 9), ())
        if set(law.stop_ids) <= set(ends)
        for stops in ((), ("e", "完"))
    ]
    assert run(there, asked) == run(local, asked)  # tokens, texts, both log-probs, bit for bit
    tokens = list(range(40))
    assert asyncio.run(there.score(tokens)) == asyncio.run(local.score(tokens))
    assert asyncio.run(there.score(tokens, 7)) == asyncio.run(local.score(tokens, 7))
    assert asyncio.run(there.score(tokens, 0)) == asyncio.run(local.score(tokens, 0))


def test_play_through_it(url, local):
    source = Taxi(mode="pickup", horizon=4, history="none")
    tasks = source.tasks(n=6)
    there = HttpEngine(url, "tiny", TOKENIZER, api_key="k", exact=True)
    for protocol in (None, solo(chat=True)):
        mine = play(source, tasks, [Seat("policy", local)], protocol, n=2, seed=3)
        theirs = play(source, tasks, [Seat("policy", there)], protocol, n=2, seed=3)
        assert [e.turns for e in theirs] == [e.turns for e in mine] and len(mine) == 12
        assert [e.outcome for e in theirs] == [e.outcome for e in mine]
        assert all(isinstance(e.outcome, Scored) for e in theirs)


def test_chat(url, local):
    there = HttpEngine(f"{url}/v1/", "tiny", api_key="k")
    said = asyncio.run(there.chat([{"role": "user", "content": "hi"}], SamplingLaw(temperature=0), 9))
    prompt = tuple(TOKENIZER.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"))
    assert said == ask(local, Request(prompt, SamplingLaw(temperature=0), 1, 9, (TOKENIZER.eos_token_id,)))[0]
    with pytest.raises(EngineError, match="has no tokenizer"):
        ask(there, Request((1,)))


def test_what_the_server_refuses_is_told_and_not_repeated(url):
    wrong = HttpEngine(url, "tiny", TOKENIZER, api_key="wrong")
    with pytest.raises(EngineStatus, match="answered 401: the API key is wrong") as caught:
        ask(wrong, Request((1,)))
    assert caught.value.status == 401
    there = HttpEngine(url, "tiny", TOKENIZER, api_key="k")
    with pytest.raises(EngineStatus, match="1500 tokens long; 'tiny' holds 1024"):
        ask(there, Request((1,) * 1500))
    with pytest.raises(EngineStatus, match="no model 'other'"):
        ask(HttpEngine(url, "other", TOKENIZER, api_key="k"), Request((1,)))


def test_a_recipe_section(url, monkeypatch):
    config = ServerConfig(address=url, model="tiny", api_key_env="TEST_KEY")
    monkeypatch.delenv("TEST_KEY", raising=False)
    with pytest.raises(EngineError, match="actor.api_key_env: the environment variable TEST_KEY is not set"):
        connect(config, key="actor")
    monkeypatch.setenv("TEST_KEY", "k")
    assert asyncio.run(connect(config).chat([{"role": "user", "content": "hi"}], max_tokens=3))[0].tokens


def test_a_server_that_is_killed_fails_episodes_and_scores_none(tmp_path):
    """Long turns, so that the kill falls into the middle of them."""
    command = [sys.executable, "-m", "trailmark", "serve", "tiny", "--port", "0", "--slots", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    try:
        url = process.stdout.readline().split(" at ")[1].split("/v1")[0]
        engine = HttpEngine(url, "tiny", TOKENIZER, retries=1, backoff=0.05, deadline=60)
        source = Taxi(mode="pickup", horizon=50, history="none")
        done = []

        async def free(desk):
            while not desk.over:
                await desk.ask("policy", text=desk.observation.text, max_tokens=100)
                done.append(1)
                if len(done) == 4:
                    process.kill()
                await desk.act("0")

        episodes = play(source, source.tasks(n=12), [Seat("policy", engine)], free)
        assert len(episodes) == 12 and len(done) >= 4
        failed = [e for e in episodes if isinstance(e.outcome, Failed)]
        assert len(failed) >= 8  # only episodes whose last turn was answered can have ended
        assert all(e.outcome.error.startswith("engine: ") and "cannot be reached" in e.outcome.error for e in failed)
    finally:
        process.kill()
        process.communicate(timeout=30)


# --- against bad servers --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def fake(answers):
    """A server that gives the listed answers to POST, the last one again and again: (status, body, headers)."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.reply(404, b"{}", {})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((self.path, dict(self.headers), body))
            status, answer, headers = (*answers[min(len(seen), len(answers)) - 1], {})[:3]
            answer = answer(body) if callable(answer) else answer
            self.reply(status, answer if isinstance(answer, bytes) else json.dumps(answer).encode(), headers)

        def reply(self, status, data, headers):
            self.send_response(status)
            for name, value in {**headers, "Content-Length": len(data)}.items():
                self.send_header(name, str(value))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def choice(**more):
    return {"choices": [{"index": 0, "text": "ok", "finish_reason": "stop", **more}]}


GOOD = choice(token_ids=[5, 6], logprobs={"token_logprobs": [-1.0, -2.0]})


def quick(url, **more):
    return HttpEngine(url, "m", TOKENIZER, backoff=0.01, **more)


def test_errors_that_pass_are_waited_for():
    answers = [(500, b"oops"), (429, b"{}", {"Retry-After": "0.05"}), (503, {"error": "loading"}), (200, GOOD)]
    with fake(answers) as (url, seen):
        (done,) = ask(quick(url, headers={"X-Team": "a"}, query={"version": "7"}, api_key="s"), Request((1, 2)))[0]
    assert done.text == TOKENIZER.decode([5, 6])  # the text of the tokens, even if the server left something out
    assert done.tokens == (5, 6) and done.logp == done.logq == (-1.0, -2.0) and done.stop == "stopped"
    assert len(seen) == 4 and len({json.dumps(body) for _, _, body in seen}) == 1
    path, headers, body = seen[0]
    assert path == "/v1/completions?version=7" and headers["X-Team"] == "a" and headers["Authorization"] == "Bearer s"
    assert body["prompt"] == [1, 2] and "top_k" not in body and "key" not in body


@pytest.mark.parametrize(
    ("said", "request_", "want"),
    [
        ({}, {}, "stopped"),
        ({"finish_reason": "eos_token"}, {}, "stopped"),
        ({"finish_reason": "stop_sequence"}, {}, "stop_string"),
        ({"stop_reason": "ok"}, {}, "stop_string"),  # vLLM names the text, or the token
        ({"stop_reason": 6}, {}, "stopped"),
        ({}, {"stop_ids": (6,), "stop_strings": ("x",)}, "stopped"),
        ({}, {"stop_ids": (7,), "stop_strings": ("x",)}, "stop_string"),
        ({"finish_reason": "length"}, {"max_tokens": 2}, "length"),
        ({"finish_reason": "length"}, {"max_tokens": 3}, "context_full"),
        ({"finish_reason": "model_length"}, {"max_tokens": 2}, "context_full"),
    ],
)
def test_a_server_says_why_an_answer_ended(said, request_, want):
    answer = choice(**{"token_ids": [5, 6], "logprobs": {"token_logprobs": [-1.0, -2.0]}, **said})
    with fake([(200, answer)]) as (url, _):
        (done,) = ask(quick(url), Request((1, 2), **request_))[0]
    assert done.stop == want and done.cut_off == (want in ("length", "context_full"))


def test_a_model_whose_context_is_too_short_is_asked_for_fewer_tokens():
    """What is left of the context is asked for, a hundred tokens less each time; another error is not repeated."""
    full = {"error": {"message": "This model's maximum context length is 4096 tokens."}}
    with fake([(400, full), (400, full), (200, GOOD)]) as (url, seen):
        (done,) = ask(quick(url), Request((1, 2), max_tokens=512))[0]
    assert done.tokens == (5, 6) and [body["max_tokens"] for *_, body in seen] == [512, 412, 312]
    assert len({json.dumps({**body, "max_tokens": 0}) for *_, body in seen}) == 1
    with fake([(400, full)]) as (url, seen), pytest.raises(EngineStatus, match="maximum context length"):
        ask(quick(url), Request((1, 2), max_tokens=250))
    assert [body["max_tokens"] for *_, body in seen] == [250, 150, 50]
    with fake([(400, full)]) as (url, seen), pytest.raises(EngineStatus, match="maximum context length"):
        ask(quick(url), Request((1, 2), max_tokens=5000))
    assert [body["max_tokens"] for *_, body in seen] == [5000 - 100 * k for k in range(11)]
    with fake([(400, {"error": {"message": "no such model"}})]) as (url, seen), pytest.raises(EngineStatus):
        ask(quick(url), Request((1, 2), max_tokens=512))
    assert {body["max_tokens"] for *_, body in seen} == {512}


def test_errors_that_stay_are_raised():
    with fake([(500, {"error": {"message": "out of memory"}})]) as (url, seen):
        with pytest.raises(EngineStatus, match="answered 500: out of memory"):
            ask(quick(url, retries=2), Request((1,)))
        assert len(seen) == 3
        source = Taxi(mode="pickup", horizon=4, history="none")
        (episode,) = play(source, source.tasks(n=1), [Seat("policy", quick(url, retries=0))])
        assert isinstance(episode.outcome, Failed) and "out of memory" in episode.outcome.error
    with pytest.raises(EngineRefused, match="cannot be reached"):
        ask(quick(url, retries=1), Request((1,)))  # the server is gone now
    with pytest.raises(EngineError, match="is not a valid address"):
        ask(quick("nonsense://x"), Request((1,)))


@pytest.mark.parametrize(
    "answer",
    [
        b"<html>", b"", b"null", b"{}", {"choices": []}, {"choices": [1]}, {"choices": [{}, {}]}, choice(text=None),
        choice(finish_reason=None), choice(finish_reason="abort"), choice(token_ids=["a"]), choice(token_ids=[]),
        choice(token_ids=[5], logprobs={"token_logprobs": [-1.0, -2.0]}), choice(token_ids=[5], logprobs={"x": 1}),
        choice(token_ids=[5], logprobs={"token_logprobs": ["a"]}), choice(token_ids=[5], logprobs=[3]),
        b'{"choices": [{"text": "a", "finish_reason": "stop", "token_ids": [5], "logprobs": {"token_logprobs": '
        b'[NaN]}}]}',
    ],
)  # fmt: skip
def test_garbage(answer):
    with fake([(200, answer)]) as (url, _), pytest.raises(EngineGarbage):
        ask(quick(url), Request((1,)))


def test_a_server_that_never_answers():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started = time.monotonic()
        with pytest.raises(EngineTimeout, match=r"no answer within 0\.5 s"):
            ask(quick(f"http://127.0.0.1:{silent.getsockname()[1]}", deadline=0.5), Request((1,)))
        assert time.monotonic() - started < 30


def test_a_deadline_counts_from_when_a_request_is_sent():
    """Nine requests of 0.2 s, one at a time, within a deadline of 1.5 s each."""

    def slow(body):
        time.sleep(0.2)
        return GOOD

    with fake([(200, slow)]) as (url, _):
        assert len(ask(quick(url, concurrency=1, deadline=1.5), *[Request((k,)) for k in range(9)])) == 9


def test_servers_that_tell_text_only():
    with fake([(200, choice())]) as (url, _):
        (done,) = ask(quick(url), Request((1,), stop_ids=(9,)))[0]
        assert done.text == "ok" and done.tokens == (*TOKENIZER.encode("ok"), 9) and done.logp == done.logq == ()
        with pytest.raises(EngineError, match="cannot be trained on"):
            ask(quick(url, exact=True), Request((1,)))
        with pytest.raises(EngineGarbage, match="not one of the labels"):
            ask(quick(url), Request((1,), SamplingLaw(allowed=(5,))))
    with fake([(200, GOOD)]) as (url, _), pytest.raises(EngineError, match="under this sampling law"):
        ask(quick(url, exact=True), Request((1,), SamplingLaw(0.5)))

    def strict(body):
        return {"error": "unknown field"} if "return_token_ids" in body else choice()

    with fake([(400, strict), (200, strict)]) as (url, seen):
        engine = quick(url)
        assert [c[0].text for c in ask(engine, Request((1,)))] == ["ok"]
        assert [c[0].text for c in ask(engine, Request((1,)))] == ["ok"]
        assert ["return_token_ids" in body for _, _, body in seen] == [True, False, False]


def test_servers_that_know_messages_only():
    def answer(body):
        return {"choices": [{"message": {"content": body["messages"][0]["content"][::-1]}, "finish_reason": "stop"}]}

    with fake([(200, answer)]) as (url, seen):
        engine = quick(url + "/v1/chat/completions")
        (done,) = ask(engine, Request(tuple(TOKENIZER.encode("abc")), max_tokens=5))[0]
        assert done.text == "cba" and done.logp == () and seen[0][0] == "/v1/chat/completions"
        assert set(seen[0][2]) == {"model", "messages", "n", "max_tokens", "temperature", "top_p", "seed"}


@pytest.mark.parametrize(
    "end", ["/openai/deployments/gpt/chat/completions?api-version=2024-10-21", "/openai/deployments/gpt/"]
)
def test_an_address_that_names_its_endpoint_is_used_as_it_is(end):
    """Azure's: no other route is used, and the query is sent along."""

    def answer(body):
        return {"choices": [{"message": {"content": body["messages"][-1]["content"][::-1]}, "finish_reason": "stop"}]}

    with fake([(200, answer)]) as (url, seen):
        engine = quick(url + end, query={"extra": "1"}, headers={"api-key": "k"})
        assert ask(engine, Request(tuple(TOKENIZER.encode("abc")), max_tokens=5))[0][0].text == "cba"
        assert asyncio.run(engine.chat([{"role": "user", "content": "xy"}]))[0].text == "yx"
    version = "api-version=2024-10-21&" if "?" in end else ""
    assert [path for path, _, _ in seen] == [f"/openai/deployments/gpt/chat/completions?{version}extra=1"] * 2
    assert {headers["api-key"] for _, headers, _ in seen} == {"k"} and "logprobs" not in seen[1][2]


@pytest.mark.parametrize(("url", "base", "chat", "named"), [
    ("http://h", "http://h", "/v1/chat/completions", False),
    ("http://h/v1/", "http://h", "/v1/chat/completions", False),
    ("http://h/v1/chat/completions", "http://h", "/v1/chat/completions", True),
    ("http://h/api/chat/completions/", "http://h/api", "/chat/completions", True),
    ("https://h/openai/deployments/x", "https://h/openai/deployments/x", "/chat/completions", True),
])  # fmt: skip
def test_addresses(url, base, chat, named):
    at = address(url)
    assert (at.base, at.chat, at.named, dict(at.query)) == (base, chat, named, {})


def test_scores_of_other_servers():
    def vllm(body):
        listed = [None, *({str(t): {"logprob": -t / 10}, "999": {"logprob": -0.1}} for t in body["prompt"][1:])]
        return choice(prompt_logprobs=listed)

    with fake([(200, vllm)]) as (url, _):
        assert asyncio.run(quick(url).score([4, 5, 6], 1)) == [-0.5, -0.6]
        assert asyncio.run(quick(url).score([4, 5, 6], 2)) == [-0.6]

    def older(body):
        return choice(logprobs={"token_logprobs": [None, -0.5, -0.6, -0.7]}) if body.get("echo") else choice()

    with fake([(200, older)]) as (url, _):
        assert asyncio.run(quick(url).score([4, 5, 6])) == [-0.5, -0.6]
    with fake([(200, choice())]) as (url, _), pytest.raises(EngineGarbage):
        asyncio.run(quick(url).score([4, 5, 6]))
