"""Clients take turns: whatever one of them asks for, the others wait for a few steps of the model, not for its end."""

import asyncio
import contextlib
import json
import socket
import threading

import httpx
import pytest

from trailmark.commands.serve import serving
from trailmark.engines.base import Request, run
from trailmark.engines.local import LocalEngine
from trailmark.rollout.search import Plan
from trailmark.score.values import HeadValues
from trailmark.serve import answers
from trailmark.serve import body as body_module
from trailmark.serve import score as score_module
from trailmark.serve import search as search_module
from trailmark.serve import service as service_module
from trailmark.serve.answers import Names, Reply
from trailmark.serve.app import build_app
from trailmark.serve.body import PARTS, ChatBody, CompletionBody, read
from trailmark.serve.capacity import ANSWER, Capacity, answer_size
from trailmark.serve.errors import ApiError
from trailmark.serve.service import Service
from trailmark.serve.threads import WorkerThreads

SAY = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def lm():
    from trailmark.models.lm import LM
    from trailmark.models.tiny import build, tiny_config, tiny_tokenizer

    tokenizer = tiny_tokenizer()
    return LM(build(tiny_config("llama", vocab=len(tokenizer), kv_heads=2, context=512), 0), tokenizer, "tiny")


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("requests", [1, 12])
def test_a_short_request_does_not_wait_for_a_long_one(lm, tokens, requests):
    """Counted in tokens that the other party gets meanwhile, not in seconds."""
    engine = LocalEngine(lm, slots=4, max_len=512)

    async def ask():
        asks = [Request((k + 1, 7), n=48 // requests, max_tokens=60, seed=k) for k in range(requests)]
        long = [asyncio.create_task(engine.sample(a, party="long")) for a in asks]
        while engine.counts.decoded < 30:
            await asyncio.sleep(0)
        before = engine.counts.decoded
        await engine.sample(Request((9, 9), max_tokens=tokens), party="short")
        waited = engine.counts.decoded - before
        for task in long:
            task.cancel()
        await asyncio.gather(*long, return_exceptions=True)
        return waited

    # one token needs no slot; three need the next free one, and all 48 samples draw 60 tokens
    assert asyncio.run(ask()) <= (5 * 4 if tokens == 1 else 4 * 60 + 60)


@pytest.mark.parametrize(("tokens", "length", "most"), [(1, 2, 10), (2, 2, 10), (1, 60, 60), (2, 60, 60)])
def test_one_token_does_not_wait_for_the_prompts_of_many_requests(lm, tokens, length, most):
    """Counted in prompts that are computed meanwhile: those of the pass in progress, and of its own. A prompt that
    takes more than what is left of a pass also waits for one prompt of each of the others, but not for all."""
    engine = LocalEngine(lm, slots=16, max_len=128)

    async def ask():
        asks = [Request((k + 1, j + 1, *[7] * 98), max_tokens=tokens) for k in range(40) for j in range(8)]
        long = [asyncio.create_task(engine.sample(a, party=f"long {a.prompt[0]}")) for a in asks]
        while engine.counts.prefills < 60:
            await asyncio.sleep(0)
        before = engine.counts.prefills
        await engine.sample(Request((9,) * length, max_tokens=1), party="short")
        waited = engine.counts.prefills - before
        for task in long:
            task.cancel()
        await asyncio.gather(*long, return_exceptions=True)
        return waited

    assert asyncio.run(ask()) <= most


def test_turns_change_no_token(lm):
    asks = [Request((k + 1, 5, 6), n=3, max_tokens=9, seed=k) for k in range(7)]
    want = run(LocalEngine(lm, slots=4, max_len=64), asks)

    async def together():
        engine = LocalEngine(lm, slots=4, max_len=64)
        return await asyncio.gather(*(engine.sample(a, party=k % 3) for k, a in enumerate(asks)))

    assert asyncio.run(together()) == want


def test_a_search_counts_its_candidates_and_draws_no_more_than_the_queue_could(lm):
    with serving(LocalEngine(lm, slots=4, max_len=64), "m", queue=60) as url:
        body = lambda **search: {"prompt": "a", "max_tokens": 4, "search": {"by": "logp", **search}}
        ask = lambda **search: httpx.post(f"{url}/v1/completions", json=body(**search), timeout=60)
        refused = ask(beam=9, rounds=1000)
        assert refused.status_code == 400
        assert "81 sequences at once; the limit is 64" in refused.json()["error"]["message"]
        assert ask(beam=2, rounds=1000).status_code == 200


def test_a_search_draws_no_more_tokens_than_the_queue_holds(lm, monkeypatch):
    plans, real = [], service_module.search_all
    monkeypatch.setattr(service_module, "search_all", lambda *given: (plans.append(given[2]), real(*given))[1])
    with serving(LocalEngine(lm, slots=4, max_len=64), "m", queue=60) as url:
        for more in ({}, {"budget": 10**6}, {"budget": 10}):
            search = {"by": "logp", "beam": 2, "rounds": 1000, **more}
            body = {"prompt": "a", "max_tokens": 4, "search": search}
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
    assert [plan.budget for plan in plans] == [64 * 64, 64 * 64, 10]


def test_every_kind_of_request_takes_turns_with_others(lm, monkeypatch):
    """The engine takes turns among parties: each request is one, with all that is drawn for it."""
    real, given, parties = LocalEngine.sample, [], []

    async def sample(self, request, on_token=None, top=0, party=None):
        given.append(party)
        return await real(self, request, on_token, top, party)

    monkeypatch.setattr(LocalEngine, "sample", sample)
    with serving(LocalEngine(lm, slots=4, max_len=64), "m") as url:
        for more in ({}, {"stream": True}, {"search": {"by": "logp", "beam": 2, "step_ends": [*"aeiou"]}}):
            given.clear()
            body = {"prompt": ["a", "b"], "max_tokens": 4, "ignore_eos": True, **more}
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
            assert len(given) > 1 and all(party is given[0] is not None for party in given), more
            parties.append(given[0])
    assert len(set(map(id, parties))) == 3


def reply(lm, kind, **fields):
    body = kind.model_validate(fields)
    prompts = [(1,) * 40] * (1 if kind is ChatBody else 2)
    return Reply(body, Names(lm.tokenizer), "m", prompts), prompts


def test_what_is_repeated_for_each_choice_counts_each_time(lm):
    told = lambda n, **more: answer_size(
        *reply(lm, CompletionBody, prompt=["a", "b"], n=n, **more), [10, 10], more.get("echo", False), None
    )
    assert told(128) == 0
    for more in ({"prompt_logprobs": 5}, {"return_token_ids": True}, {"logprobs": 2, "echo": True}, {"echo": True}):
        assert told(128, **more) == 128 * told(1, **more) > 0
    tree = answer_size(*reply(lm, CompletionBody, prompt="a"), [10, 10], False, Plan("beam", 3, rounds=5, tree=True))
    assert tree >= 2 * 5 * 9 * 200


def test_the_estimate_is_no_less_than_the_answer(lm):
    with serving(LocalEngine(lm, slots=8, max_len=256), "m") as url:
        for path, kind, body in (
            ("completions", CompletionBody, {"prompt": "a" * 40, "logprobs": 20, "echo": True, "prompt_logprobs": 20}),
            ("completions", CompletionBody, {"prompt": "a" * 40, "return_token_ids": True, "n": 5}),
            ("chat/completions", ChatBody, {"messages": SAY, "logprobs": True, "top_logprobs": 20}),
        ):
            body |= {"max_tokens": 50, "n": body.get("n", 3), "ignore_eos": True}
            answer = httpx.post(f"{url}/v1/{path}", json=body, timeout=60)
            given = answer.json()["usage"]["prompt_tokens"]
            made = Reply(kind.model_validate(body), Names(lm.tokenizer), "m", [(1,) * given])
            size = answer_size(made, made.prompts, [50], body.get("echo", False), None)
            assert len(answer.content) <= 1.1 * size + 2000 + 50 * 12 * body["n"]


def test_a_small_request_that_makes_a_large_answer_is_refused(lm):
    with serving(LocalEngine(lm, slots=4, max_len=512), "m") as url:
        body = {"prompt": "a" * 500, "n": 128, "prompt_logprobs": 20, "max_tokens": 1}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 400 and "alternatives" in answer.json()["error"]["message"]
        rows = {"prompt": ["a" * 500] * 60, "n": 8, "return_token_ids": True, "max_tokens": 1, "echo": True}
        assert httpx.post(f"{url}/v1/completions", json=rows, timeout=60).status_code == 200
    assert ANSWER >= 1 << 24


def posted(body, address="127.0.0.1"):
    """What a server gets of a POST from an address."""
    data = json.dumps(body).encode()
    headers = {"host": "localhost", "content-type": "application/json", "content-length": str(len(data))}
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": "/v1/completions",
             "raw_path": b"/v1/completions", "query_string": b"", "root_path": "", "client": (address, 5),
             "headers": [(k.encode(), v.encode()) for k, v in headers.items()]}  # fmt: skip
    return scope, [{"type": "http.request", "body": data, "more_body": False}]


@contextlib.asynccontextmanager
async def asking(app, body, address="127.0.0.1", reads=None):
    """A client that reads while `reads` is set. It leaves at the end of the block."""
    scope, sent = posted(body, address)
    got, seen = [], asyncio.Event()

    async def receive():
        return sent.pop() if sent else await asyncio.Event().wait()

    async def send(part):
        got.append(part)
        if part["type"] == "http.response.body":
            seen.set()
            if reads is not None:
                await reads.wait()

    task = asyncio.create_task(app(scope, receive, send))
    try:
        yield task, got, seen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def status(app, body, address="127.0.0.1"):
    async with asking(app, body, address) as (task, got, _):
        await asyncio.wait_for(task, 60)
    return got[0]["status"]


def test_a_client_that_fills_the_queue_shuts_out_no_other(lm):
    app = build_app(LocalEngine(lm, slots=4, max_len=512), "m", queue=28)
    service = app.state.service
    long = {"prompt": "a", "max_tokens": 60, "ignore_eos": True, "n": 4, "stream": True}
    short = {"prompt": "b", "max_tokens": 2, "ignore_eos": True}

    async def ask():
        async with contextlib.AsyncExitStack() as held:
            for _ in range(8):  # nobody reads, so they stay
                await held.enter_async_context(asking(app, long, reads=asyncio.Event()))
            while service.capacity.taken < 32:
                await asyncio.sleep(0.001)
            assert await status(app, short) == 429  # the same client
            assert await status(app, short, "10.0.0.7") == 200
            assert await status(app, {**short, "n": 16}, "10.0.0.7") == 200
            assert await status(app, {**short, "n": 17}, "10.0.0.7") == 429  # more than what is left free
            # on one machine all have one address: what needs no slot is let in
            assert await status(app, {**short, "max_tokens": 1}) == 200
            assert await status(app, {**short, "max_tokens": 1, "n": 16}) == 200
            assert await status(app, {**short, "max_tokens": 1, "n": 17}) == 429
        while service.capacity.in_work:
            await asyncio.sleep(0.001)
        assert not service.capacity.held and not service.capacity.quick.held

    try:
        asyncio.run(ask())
    finally:
        service.close()


def test_what_finds_no_room_is_refused_before_its_texts_are_read(lm, monkeypatch):
    """Else a client that asks again and again keeps a thread busy with texts that nobody answers."""
    app = build_app(LocalEngine(lm, slots=4, max_len=512), "m", queue=28)
    long = {"prompt": "a", "max_tokens": 60, "ignore_eos": True, "n": 4, "stream": True}
    encoded, real = [], CompletionBody.prompts
    monkeypatch.setattr(CompletionBody, "prompts", lambda self, t: (encoded.append(self.n), real(self, t))[1])

    async def ask():
        async with contextlib.AsyncExitStack() as held:
            for _ in range(8):
                await held.enter_async_context(asking(app, long, reads=asyncio.Event()))
            while app.state.service.capacity.taken < 32:
                await asyncio.sleep(0.001)
            assert await status(app, {"prompt": ["a"] * 8, "n": 3, "max_tokens": 1}) == 429

    try:
        asyncio.run(ask())
    finally:
        app.state.service.close()
    assert encoded == [4] * 8


def test_texts_are_encoded_a_few_at_a_time_up_to_the_first_that_is_too_long(lm, monkeypatch):
    lm.add_head("value", zero=False, seed=1)
    calls, real = [], WorkerThreads.run
    encoded = lambda given, *more: (calls[-1].append(given), real_encoded(given, *more))[1]
    real_encoded = body_module.encoded

    async def run_in(self, lane, function, *given):
        calls.append([])
        return await real(self, lane, function, *given)

    monkeypatch.setattr(WorkerThreads, "run", run_in)
    for module in (body_module, score_module, search_module):
        monkeypatch.setattr(module, "encoded", encoded)
    texts = lambda k: ["ab"] * k
    with serving(LocalEngine(lm, slots=4, max_len=64), "m", values=HeadValues(lm)) as url:
        for path, body, each in (
            ("completions", lambda t: {"prompt": t, "max_tokens": 1}, 1),
            ("score", lambda t: {"prompt": "a", "completion": t}, 2),
            ("values", lambda t: {"states": t}, 1),
        ):
            calls.clear()
            assert httpx.post(f"{url}/v1/{path}", json=body(texts(40)), timeout=60).status_code == 200
            assert [len(c) for c in calls if c] == [16 * each, 16 * each, 8 * each], path
            calls.clear()
            long = [*texts(20), "a" * 100, *texts(200)]
            assert httpx.post(f"{url}/v1/{path}", json=body(long), timeout=60).status_code == 400
            assert sum(map(len, calls)) == 21 * each, path


def test_many_short_answers_are_written_as_a_large_one(lm, monkeypatch):
    threads, real = [], service_module.json_response

    def json_response(content):
        threads.append(threading.current_thread().name.partition("_")[0])
        return real(content)

    monkeypatch.setattr(service_module, "json_response", json_response)
    with serving(LocalEngine(lm, slots=4, max_len=64), "m", queue=1000) as url:
        for k in (1, 700):
            body = {"prompt": ["a"] * k, "max_tokens": 1}
            assert len(httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"]) == k
    assert threads == ["answers", "large answers"]


def test_nothing_is_computed_for_a_client_that_has_left(lm):
    engine = LocalEngine(lm, slots=4, max_len=64)

    async def ask():
        tasks = [asyncio.create_task(engine.sample(Request((1, 2), max_tokens=1), party="p")) for _ in range(50)]
        await asyncio.sleep(0)  # all wait
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while not engine.scheduler._task.done():
            await asyncio.sleep(0)

    asyncio.run(ask())
    assert engine.counts.prefills == 0


def test_thousands_of_rows_and_schemas_are_checked_outside_the_event_loop(lm, monkeypatch):
    lm.add_head("value", zero=False, seed=1)
    threads, real = [], Service.check

    def check(self, *given):
        threads.append(threading.current_thread().name.partition("_")[0])
        real(self, *given)

    monkeypatch.setattr(Service, "check", check)
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    with serving(LocalEngine(lm, slots=4, max_len=64), "m", values=HeadValues(lm)) as url:
        for path, body, thread in (
            ("completions", {"prompt": ["a"] * 9, "max_tokens": 1}, "texts"),
            ("chat/completions", {"messages": SAY, "max_tokens": 1}, "chats"),
            ("score", {"tokens": [[1, 2]] * 9}, "texts"),
            ("values", {"states": [[1, 2]] * 9}, "chats"),
            ("completions", {"prompt": "a", "max_tokens": 1, "response_format": schema}, "large"),
        ):
            threads.clear()
            assert httpx.post(f"{url}/v1/{path}", json=body, timeout=60).status_code == 200
            assert threads and set(threads) == {thread}, path


def test_each_further_client_gets_half_of_what_is_left():
    room, held = Capacity(64), contextlib.ExitStack()
    with held:
        for name, most in (("a", 64), ("b", 32), ("c", 16), ("d", 8)):
            for _ in range(most):
                held.enter_context(room.holding(1, name))
            with pytest.raises(ApiError, match="the queue is full"), room.holding(1, name):
                pass
        assert room.taken == 120
    with room.holding(64, "a"):
        pass
    assert room.taken == 0 and not room.held


def test_addresses_of_one_owner_are_one_client():
    from starlette.requests import Request

    from trailmark.serve.capacity import client_of

    asked = lambda host: client_of(Request({"type": "http", "client": host and (host, 5)}))
    assert asked("2001:db8::1") == asked("2001:db8::ffff:2%eth0") != asked("2001:db8:0:1::1")
    assert asked("10.0.0.1") != asked("10.0.0.2") and asked(None) == "" and asked("proxy") == "proxy"


def test_a_body_of_a_million_rows_is_refused_before_it_is_parsed(monkeypatch):
    from trailmark.serve import body

    rows = lambda k: b'{"prompt":[' + b"[1]," * k + b"[1]]}"
    assert len(read(CompletionBody, rows(100)).prompt) == 101
    texts = json.dumps({"prompt": ['[{"\\' * 40_000, "\\"]}).encode()  # brackets of a text are no parts
    assert read(CompletionBody, texts).prompt[0].startswith('[{"')
    assert not body.has_many_parts(rows(PARTS - 3)) and body.has_many_parts(rows(PARTS - 2))
    assert not body.has_many_parts(b'"' + b"[" * (PARTS + 1)) and not body.has_many_parts(b'"' + b"[" * PARTS + b"[\\")
    monkeypatch.setattr(body, "from_json", None)
    for data in (rows(1_500_000), b'{"messages":[' + b"{}," * 1_500_000 + b"{}]}", b"[" * (7 << 20)):
        with pytest.raises(ApiError, match="more than 65536 parts"):
            read(CompletionBody, data)


def test_a_large_answer_is_written_in_short_calls(monkeypatch):
    from starlette.responses import JSONResponse

    entry = {"7": {"logprob": -0.5, "rank": 1, "decoded_token": "é\u2028"}}
    choice = {"text": "", "token_ids": (1, 2), "logprobs": None, "prompt_logprobs": [None] + [entry] * 500, "x": {}}
    tree = {"search": {"tree": [{"id": k, "text": "a"} for k in range(1000)], "best": None, "empty": []}}
    content = {"id": "m", "choices": [choice] * 40 + [tree], "usage": {"a": 1}}
    longest = 0

    def encode(part, real=answers.ENCODER.encode):
        nonlocal longest
        made = real(part)
        longest = max(longest, len(made))
        return made

    monkeypatch.setattr(answers.ENCODER, "encode", encode)
    made = answers.json_response(content)
    assert made.body == JSONResponse(content).body and longest < 5000 < len(made.body) // 100
    assert made.headers["content-type"] == "application/json"


def test_a_stream_that_nobody_reads_ends_and_others_go_on(lm, monkeypatch):
    monkeypatch.setattr(service_module, "UNREAD", 256)
    app = build_app(LocalEngine(lm, slots=4, max_len=512), "m")
    service = app.state.service
    long = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "n": 4, "stream": True}

    async def ask():
        reads = asyncio.Event()
        async with asking(app, long, reads=reads) as (task, got, seen):
            await asyncio.wait_for(seen.wait(), 60)
            while service.engine.scheduler.open:
                await asyncio.sleep(0.001)
            for _ in range(20_000):
                if service.unread <= 1:
                    break
                await asyncio.sleep(0.001)
            assert service.unread <= 1  # what it did not read is dropped at once, and not held against others
            other = {**long, "max_tokens": 20, "n": 2}
            async with asking(app, other) as (reading, heard, _):
                await asyncio.wait_for(reading, 60)
            assert b"read faster" not in b"".join(p.get("body", b"") for p in heard)
            reads.set()
            await asyncio.wait_for(task, 60)
        end = b"".join(p.get("body", b"") for p in got)
        assert b"too much of the answers was not read" in end and end.endswith(b"data: [DONE]\n\n")
        assert service.unread == service.capacity.in_work == 0

    try:
        asyncio.run(ask())
    finally:
        service.close()


def test_answers_that_nobody_reads_hold_their_share_and_give_it_back(lm, monkeypatch):
    from trailmark.serve import capacity

    monkeypatch.setattr(capacity, "ANSWER", 1 << 24)
    monkeypatch.setattr(service_module, "ANSWER", 3 << 20)  # four times that in all
    body = json.dumps({"prompt": "a" * 400, "n": 64, "prompt_logprobs": 5, "max_tokens": 1})
    data = body.encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with serving(LocalEngine(lm, slots=4, max_len=512), "m") as url:
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", int(url.rsplit(":")[-1])))
            deaf.sendall(head + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
            assert deaf.recv(15) == b"HTTP/1.1 200 OK"
            second = httpx.post(f"{url}/v1/completions", json=json.loads(body), timeout=60)
            assert second.status_code == 429
            assert httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        for _ in range(600):
            third = httpx.post(f"{url}/v1/completions", json=json.loads(body), timeout=60)
            if third.status_code == 200:
                break
        assert third.status_code == 200 and len(third.json()["choices"]) == 64
