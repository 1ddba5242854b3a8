"""Clients take turns: whatever one of them asks for, the others wait for a few steps of the model, not for its end."""

import asyncio
import json
import socket

import httpx
import pytest

from trailmark.commands.serve import serving
from trailmark.engines.base import Request, run
from trailmark.engines.local import LocalEngine
from trailmark.rollout.search import Plan
from trailmark.serve import service as service_module
from trailmark.serve.answers import Names, Reply
from trailmark.serve.body import ChatBody, CompletionBody
from trailmark.serve.capacity import ANSWER, answer_size

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
        while engine.decoded < 30:
            await asyncio.sleep(0)
        before = engine.decoded
        await engine.sample(Request((9, 9), max_tokens=tokens), party="short")
        waited = engine.decoded - before
        for task in long:
            task.cancel()
        await asyncio.gather(*long, return_exceptions=True)
        return waited

    # one token needs no slot; three need the next free one, and all 48 samples draw 60 tokens
    assert asyncio.run(ask()) <= (5 * 4 if tokens == 1 else 4 * 60 + 60)


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
