"""Real sockets, OpenAI's own client, raw requests: what is served is what the local engine writes, and nothing that a
client does takes the server down."""

import asyncio
import json
import socket
import threading
import time

import httpx
import openai
import pytest

from trailmark.commands.serve import serving
from trailmark.engines.base import Request, run
from trailmark.engines.local import LocalEngine
from trailmark.rollout.play import stop_ids
from trailmark.serve.answers import token_name
from trailmark.serve.prompt_format import plain_format
from trailmark.types import SamplingLaw

GREEDY = SamplingLaw(temperature=0)
SAY = [{"role": "user", "content": "Where to?"}]


@pytest.fixture(scope="module")
def lm():
    from trailmark.models.lm import LM
    from trailmark.models.tiny import build, tiny_config, tiny_tokenizer

    tokenizer = tiny_tokenizer()
    return LM(build(tiny_config("llama", vocab=len(tokenizer), kv_heads=2, context=4096), 0), tokenizer, "tiny")


@pytest.fixture(scope="module")
def engine(lm):
    return LocalEngine(lm, slots=8, max_len=256)


@pytest.fixture(scope="module")
def local(lm):
    """What the served engine is compared with: the same shape, so the same bits."""
    return LocalEngine(lm, slots=8, max_len=256)


@pytest.fixture(scope="module")
def url(engine):
    with serving(engine, "tiny", api_key="secret") as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def post(url):
    with httpx.Client(base_url=url, headers={"Authorization": "Bearer secret"}, timeout=60) as http:
        yield (
            lambda path, body=None, **more: (
                http.post(path, json=body, **more) if more == {} else http.post(path, **more)
            )
        )
        assert http.get("/health").json()["status"] == "ok"  # the server lives on after each


def ids(lm, text):
    return tuple(lm.tokenizer.encode(text, add_special_tokens=False))


def prompt_of(lm, messages):
    return plain_format(lm.tokenizer).prompt(lm.tokenizer, messages)


def test_models_and_key(client, url):
    (model,) = client.models.list().data
    assert model.id == "tiny" and model.owned_by == "trailmark" and model.prompts == "template"
    assert client.models.retrieve("tiny") == model
    for name in ("gpt", "runs/none", "tiny/x"):
        with pytest.raises(openai.NotFoundError, match=f"no model '{name}'") as caught:
            client.models.retrieve(name)
        assert caught.value.code == "model_not_found" and caught.value.type == "not_found_error"
    assert httpx.get(f"{url}/v1/models/tiny").status_code == 401
    with pytest.raises(openai.AuthenticationError, match="API key is wrong"):
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 401
    assert httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer sécret".encode()}).status_code == 401
    assert httpx.get(f"{url}/health").status_code == 200
    with pytest.raises(openai.NotFoundError, match="no model 'gpt'"):
        client.completions.create(model="gpt", prompt="a")
    assert httpx.get(f"{url}/nowhere").json()["error"]["type"] == "not_found_error"
    assert httpx.get(f"{url}/v1/completions").status_code == 405


def test_greedy_streamed_whole_and_local_are_one(client, lm, local):
    """The tiny model writes arbitrary bytes, so half characters abound."""
    for text in ("Where to?", "é", "one two three", "\n"):
        want = run(local, [Request(ids(lm, text), GREEDY, 1, 40, stop_ids(lm.tokenizer))])[0][0]
        asked = {"model": "tiny", "prompt": text, "temperature": 0, "max_tokens": 40}
        whole = client.completions.create(**asked)
        pieces = [c.choices[0].text for c in client.completions.create(**asked, stream=True)]
        assert whole.choices[0].text == "".join(pieces) == want.text
        assert whole.choices[0].finish_reason == ("length" if want.cut_off else "stop")
        assert whole.usage.completion_tokens == len(want.tokens)
    prompt = prompt_of(lm, SAY)
    want = run(local, [Request(prompt, GREEDY, 1, 40, stop_ids(lm.tokenizer, chat=True))])[0][0]
    asked = {"model": "tiny", "messages": SAY, "temperature": 0, "max_completion_tokens": 40}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert whole.choices[0].message.content == want.text
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == want.text
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage == whole.usage and whole.usage.prompt_tokens == len(prompt)


def test_many_samples_and_seeds(client, lm, local):
    want = run(local, [Request(prompt_of(lm, SAY), n=3, max_tokens=12, stop_ids=stop_ids(lm.tokenizer, True), seed=7)])[
        0
    ]
    asked = {"model": "tiny", "messages": SAY, "n": 3, "seed": 7, "max_tokens": 12}
    whole = client.chat.completions.create(**asked)
    assert [c.message.content for c in whole.choices] == [c.text for c in want]
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == [c.text for c in want] and len(set(streamed)) == 3
    free = {client.completions.create(model="tiny", prompt="a", max_tokens=12).choices[0].text for _ in range(4)}
    assert len(free) == 4  # without a seed each is a draw of its own
    several = client.completions.create(model="tiny", prompt=["a", "b"], n=2, temperature=0, max_tokens=5)
    assert [c.index for c in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == several.choices[1].text and several.usage.prompt_tokens == 2


def test_stop_texts(client, lm, local):
    letters = list(ids(lm, "ab"))
    asked = {"model": "tiny", "prompt": "x", "seed": 3, "max_tokens": 60, "extra_body": {"allowed_token_ids": letters}}
    free = client.completions.create(**asked).choices[0]
    assert set(free.text) == {"a", "b"} and free.finish_reason == "length" and len(free.text) == 60
    for stop in ("ba", ["bba", "aab"], ["never", "abab"], ["b" * 40]):
        cuts = [at for s in ([stop] if isinstance(stop, str) else stop) if (at := free.text.find(s)) >= 0]
        whole = client.completions.create(**asked, stop=stop).choices[0]
        assert whole.text == (free.text[: min(cuts)] if cuts else free.text)
        assert whole.finish_reason == ("stop" if cuts else "length")
        pieces = [c.choices[0].text for c in client.completions.create(**asked, stop=stop, stream=True)]
        assert "".join(pieces) == whole.text
    held = client.completions.create(**{**asked, "extra_body": {**asked["extra_body"], "min_tokens": 20}}, stop="ba")
    assert held.usage.completion_tokens >= 20


def test_logprobs_of_both_kinds(client, lm, local):
    want = run(local, [Request(ids(lm, "Hi"), n=1, max_tokens=9, seed=5, stop_ids=stop_ids(lm.tokenizer))])[0][0]
    asked = {"model": "tiny", "prompt": "Hi", "seed": 5, "max_tokens": 9}
    got = client.completions.create(**asked, logprobs=3).choices[0].logprobs
    assert got.token_logprobs == list(want.logp) and got.tokens == [token_name(lm.tokenizer, t) for t in want.tokens]
    streamed = [c.choices[0].logprobs for c in client.completions.create(**asked, logprobs=3, stream=True)]
    assert sum((s.token_logprobs for s in streamed if s), []) == list(want.logp)
    assert sum((s.text_offset for s in streamed if s), []) == got.text_offset
    scored = local.score_top(ids(lm, "Hi") + want.tokens, 3)[1:]
    for (_, _, best), top, word, logp in zip(scored, got.top_logprobs, got.tokens, want.logp):
        assert top.pop(word) == logp
        for token, value in best:  # streamed from cached keys and values, scored in one pass
            assert top.pop(token_name(lm.tokenizer, token), value) == pytest.approx(value, abs=1e-5)
        assert not top
    chat = {"model": "tiny", "messages": SAY, "seed": 5, "max_tokens": 9, "logprobs": True, "top_logprobs": 2}
    listed = client.chat.completions.create(**chat).choices[0].logprobs.content
    end = stop_ids(lm.tokenizer, True)
    same = run(local, [Request(prompt_of(lm, SAY), max_tokens=9, seed=5, stop_ids=end)])[0][0]
    assert [e.logprob for e in listed] == list(same.logp) and all(len(e.top_logprobs) == 2 for e in listed)
    assert all(e.top_logprobs[0].logprob >= e.top_logprobs[1].logprob for e in listed)
    raw = b"".join(bytes(e.bytes) for e in listed)
    assert raw.decode(errors="replace") == lm.tokenizer.decode(same.tokens)


def test_token_ids_in_and_out(post, lm, local):
    law = SamplingLaw(0.7, 0.9, 20)
    prompts = [ids(lm, "abc"), ids(lm, "de")]
    want = run(local, [Request(p, law, 2, 8, (), (), 11, k) for p, k in zip(prompts, ("", "\x001"))])
    body = {"prompt": [list(p) for p in prompts], "n": 2, "seed": 11, "temperature": 0.7, "top_p": 0.9, "top_k": 20}
    body |= {"max_tokens": 8, "ignore_eos": True, "return_token_ids": True, "logprobs": 0}
    choices = post("/v1/completions", body).json()["choices"]
    for c, w in zip(choices, sum(want, [])):
        assert tuple(c["token_ids"]) == w.tokens and tuple(c["law_logprobs"]) == w.logq
        assert tuple(c["logprobs"]["token_logprobs"]) == w.logp and c["text"] == w.text
    assert [c["prompt_token_ids"] for c in choices] == [list(p) for p in prompts for _ in range(2)]
    lines = post("/v1/completions", {**body, "stream": True}).text.split("\n\n")
    assert lines[-2] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-2]]
    for k, w in enumerate(sum(want, [])):
        assert sum((c["token_ids"] for c in chunks if c["index"] == k), []) == list(w.tokens)
    chat = {"messages": SAY, "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    answer = post("/v1/chat/completions", chat).json()
    assert tuple(answer["prompt_token_ids"]) == prompt_of(lm, SAY) and len(answer["choices"][0]["token_ids"]) == 4


def test_log_probs_of_prompts(post, lm, local):
    tokens = ids(lm, "Hello you")
    want = local.score_rows([tokens], [1])[0]
    body = {"prompt": "Hello you", "max_tokens": 3, "temperature": 0}
    echoed = post("/v1/completions", {**body, "echo": True, "logprobs": 2}).json()["choices"][0]
    assert echoed["text"].startswith("Hello you") and echoed["logprobs"]["token_logprobs"][0] is None
    assert echoed["logprobs"]["token_logprobs"][1 : len(tokens)] == want and len(echoed["logprobs"]["tokens"]) == 12
    only = post("/v1/completions", {**body, "max_tokens": 0, "echo": True, "logprobs": 0}).json()
    assert only["choices"][0]["text"] == "Hello you" and only["usage"]["completion_tokens"] == 0
    assert only["choices"][0]["logprobs"]["token_logprobs"] == [None, *want]
    streamed = post("/v1/completions", {**body, "max_tokens": 0, "echo": True, "stream": True}).text
    assert json.loads(streamed.split("\n\n")[0].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    listed = post("/v1/completions", {**body, "prompt_logprobs": 2}).json()["choices"][0]["prompt_logprobs"]
    assert listed[0] is None and [e[str(t)]["logprob"] for e, t in zip(listed[1:], tokens[1:])] == want
    for entry in listed[1:]:
        ranks = sorted((e["rank"], -e["logprob"]) for e in entry.values())
        assert [r for r, _ in ranks[:2]] == [1, 2] and ranks == sorted(ranks, key=lambda x: x[1])
    chat = post("/v1/chat/completions", {"messages": SAY, "max_tokens": 1, "prompt_logprobs": 0}).json()
    assert len(chat["prompt_logprobs"]) == len(prompt_of(lm, SAY))


def test_scores(post, lm, local):
    a, b = ids(lm, "abc def"), ids(lm, "xyz")
    rows = post("/v1/score", {"tokens": [list(a), list(b)]}).json()["data"]
    assert [r["token_logprobs"] for r in rows] == [local.score_rows([x], [1])[0] for x in (a, b)]
    assert rows[0]["sum"] == pytest.approx(sum(local.score_rows([a], [1])[0])) and rows[0]["count"] == len(a) - 1
    want = local.score_rows([a + b], [len(a)])[0]
    for prompt, completion in (
        ("abc def", "xyz"),
        (list(a), list(b)),
        ("abc def", ["xyz", "x"]),
        (["abc def"], ["xyz"]),
    ):
        got = post("/v1/score", {"prompt": prompt, "completion": completion}).json()["data"]
        assert got[0]["token_logprobs"] == want and got[0]["token_ids"] == list(b)
    head = prompt_of(lm, SAY)
    said = post("/v1/score", {"messages": SAY, "completion": "xyz"}).json()["data"][0]
    assert said["token_logprobs"] == local.score_rows([head + b], [len(head)])[0] and said["count"] == 3


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("completions", {}, "'prompt' is missing"),
        ("completions", {"prompt": 3}, "'prompt'"),
        ("completions", {"prompt": [1, "a"]}, "'prompt'"),
        ("completions", {"prompt": []}, "'prompt'"),
        ("completions", {"prompt": ""}, "empty prompt"),
        ("completions", {"prompt": "a", "max_tokens": "5"}, "'max_tokens'"),
        ("completions", {"prompt": "a", "max_tokens": 0}, "only with 'echo'"),
        ("completions", {"prompt": "a", "n": 0}, "'n'"),
        ("completions", {"prompt": "a", "n": True}, "'n'"),
        ("completions", {"prompt": "a", "temperature": -1}, "'temperature'"),
        ("completions", {"prompt": "a", "top_p": 0}, "'top_p'"),
        ("completions", {"prompt": "a", "stop": ""}, "'stop'"),
        ("completions", {"prompt": "a", "allowed_token_ids": []}, "'allowed_token_ids'"),
        ("completions", {"prompt": "a", "allowed_token_ids": [10**6]}, "among 0 to"),
        ("completions", {"prompt": [10**6]}, "another tokenizer"),
        ("completions", {"prompt": [-1]}, "'prompt'"),
        ("completions", {"prompt": "a" * 300}, "300 tokens long; 'tiny' holds 256"),
        ("completions", {"prompt": "a" * (7 << 20)}, "characters are too many"),
        ("completions", {"prompt": ["a"] * 700}, "700 sequences at once"),
        ("completions", {"prompt": "a", "min_tokens": 50}, "more than max_tokens"),
        ("completions", {"prompt": "a", "logit_bias": {"5": 1}}, "'logit_bias' is not supported"),
        ("completions", {"prompt": "a", "temprature": 1}, "Did you mean 'temperature'"),
        ("completions", {"prompt": "a", "stream": True, "prompt_logprobs": 1}, "cannot be streamed"),
        ("chat/completions", {"messages": []}, "'messages'"),
        ("chat/completions", {"messages": [{"role": "user"}]}, "'messages'"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text"),
        ("chat/completions", {"messages": SAY, "tools": [{}]}, "'tools' is not supported"),
        ("chat/completions", {"messages": SAY, "chat_template_kwargs": {"tokenize": True}}, "cannot be set"),
        ("score", {"prompt": "a"}, "give either"),
        ("score", {"tokens": [1], "prompt": "a", "completion": "b"}, "give either"),
        ("score", {"prompt": ["a", "b"], "completion": ["c", "d", "e"]}, "do not pair up"),
        ("score", {"prompt": "", "completion": "e"}, "empty prompt"),
        ("score", {"tokens": [1, 10**6]}, "token 1000000 is unknown"),
        ("score", {"tokens": [1] * 300}, "300 tokens long"),
    ],
)  # fmt: skip
def test_bad_requests(post, path, body, says):
    answer = post(f"/v1/{path}", body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and says in error["message"] and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"prompt": "a", "stop": "x" * 1025}, "stop"),
        ("completions", {"prompt": "a", "stop": ["x"] * 33}, "stop"),
        ("completions", {"prompt": "a", "stop": ["x", "x" * 1025]}, "stop"),
        ("completions", {"prompt": "a", "stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ("completions", {"prompt": "a", "key": "x" * 4097}, "key"),
        ("completions", {"prompt": "a", "model": "x" * 4097}, "model"),
        ("completions", {"prompt": "a", "n": 129}, "n"),
        ("completions", {"prompt": "a", "logprobs": 21}, "logprobs"),
        ("completions", {"prompt": "a", "max_tokens": 2**31}, "max_tokens"),
        ("completions", {"prompt": "a", "min_tokens": 2**31}, "min_tokens"),
        ("completions", {"prompt": "a", "top_k": 2**31}, "top_k"),
        ("completions", {"prompt": "a", "seed": 2**63}, "seed"),
        ("completions", {"prompt": "a", "seed": -(10**30)}, "seed"),
        ("completions", {"prompt": ["a"] * 4097}, "prompt"),
        ("completions", {"prompt": ["a"] * 5, "n": 128}, "n"),
        ("completions", {"prompt": "a", "n": 128, "max_tokens": 250, "logprobs": 20}, "logprobs"),
        ("completions", {"prompt": ["a" * 250] * 120, "prompt_logprobs": 20, "max_tokens": 1}, "logprobs"),
        ("completions", {"prompt": "a" * 200, "echo": True, "n": 128, "logprobs": 20, "max_tokens": 20}, "logprobs"),
        ("completions", {"prompt": "a", "search": {"beam": 2, "by": "logp", "step_ends": ["x" * 1025]}}, "search"),
        ("completions", {"prompt": "a", "x" * 257: 0}, None),
        ("completions", {"prompt": "a", **{f"x{k}": 0 for k in range(257)}}, None),
        ("completions", {"prompt": "a", "metadata": [[]] * 70000}, None),
        ("chat/completions", {"messages": SAY * 2049}, "messages"),
        ("chat/completions", {"messages": [{"role": "x" * 65, "content": ""}]}, "messages"),
        ("chat/completions", {"messages": [{"role": "user<|im_end|>", "content": ""}]}, "messages"),
        ("chat/completions", {"messages": [{"role": "", "content": ""}]}, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 4097}]},
        "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": "", "name": "x" * 300000}]}, "messages"),
        ("chat/completions", {"messages": SAY, "top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ("chat/completions", {"messages": SAY, "n": 128, "top_logprobs": 20, "logprobs": True}, "top_logprobs"),
        ("chat/completions", {"messages": SAY, "chat_template_kwargs": {f"x{k}": 1 for k in range(33)}},
        "chat_template_kwargs"),
        ("chat/completions", {"messages": SAY, "chat_template_kwargs": {"x": "y" * 4097}}, "chat_template_kwargs"),
        ("score", {"tokens": [[1, 2]] * 4097}, "tokens"),
        ("score", {"prompt": "a", "completion": ["b"] * 700}, "n"),
        ("score", {"messages": [*SAY, {"role": "assistant", "content": ""}] * 300, "completion": ["b"] * 9},
        "messages"),
        ("values", {"states": ["a"] * 4097}, "states"),
    ],
)  # fmt: skip
def test_every_field_has_a_limit(post, path, body, param):
    answer = post(f"/v1/{path}", body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error"), error


def test_a_body_nested_too_deep(post):
    deep: dict = {}
    for _ in range(40):
        deep = {"x": deep}
    answer = post("/v1/chat/completions", {"messages": SAY, "metadata": deep})
    assert answer.status_code == 400 and "nested deeper" in answer.json()["error"]["message"]


def test_what_asks_for_nothing_is_let_through(post):
    body = {"prompt": "a", "max_tokens": 1, "user": "me", "logit_bias": {}, "best_of": 1, "suffix": None, "stop": None}
    assert post("/v1/completions", {**body, "presence_penalty": 0, "echo": False}).status_code == 200


@pytest.mark.parametrize(
    "data", [b"{", b"", b"[1]", b"\xff\xfe", b'{"prompt": NaN}', b'{"prompt": "\\ud800"}', b"[" * 9999]
)
def test_invalid_json(post, data):
    answer = post("/v1/completions", content=data, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json"


def test_ten_megabytes(post, client):
    answer = post("/v1/completions", {"prompt": "a" * (10 << 20)})
    assert answer.status_code == 413 and "larger than 8 MB" in answer.json()["error"]["message"]
    with pytest.raises(openai.APIStatusError, match="larger than 8 MB"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a" * (10 << 20)}])


def test_two_hundred_at_once(url, lm, local):
    prompts = [f"number {k}" for k in range(200)]
    want = run(local, [Request(ids(lm, p), GREEDY, 1, 6, stop_ids(lm.tokenizer)) for p in prompts])

    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0, timeout=200) as client:
            asked = [
                client.completions.create(model="tiny", prompt=p, temperature=0, max_tokens=6, stream=k % 4 == 0)
                for k, p in enumerate(prompts)
            ]
            done = []
            for answer in await asyncio.gather(*asked):
                if isinstance(answer, openai.AsyncStream):
                    done.append("".join([c.choices[0].text async for c in answer]))
                else:
                    done.append(answer.choices[0].text)
            return done

    assert asyncio.run(ask()) == [w[0].text for w in want]


def wait_until(true, seconds=60):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_vanishes_frees_its_slots(lm, stream):
    engine = LocalEngine(lm, slots=4, max_len=4000)
    with serving(engine, "tiny") as url:
        body = json.dumps({"prompt": "a", "n": 8, "max_tokens": 3000, "ignore_eos": True, "stream": stream}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", int(url.rsplit(":")[-1]))) as raw:
            raw.sendall(head + body)
            wait_until(lambda: engine.counts.decoded > 20)
        wait_until(lambda: httpx.get(f"{url}/health").json()["sequences"] == 0)
        wait_until(lambda: not engine.scheduler.open)
        assert engine.counts.decoded < 8 * 3000
        with socket.create_connection(("127.0.0.1", int(url.rsplit(":")[-1]))) as raw:
            raw.sendall(head + body[:10])  # disconnects in the middle of its request
        answer = httpx.post(
            f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 2, "ignore_eos": True}, timeout=60
        )
        assert answer.json()["usage"]["completion_tokens"] == 2


def test_a_full_queue(lm):
    engine = LocalEngine(lm, slots=1, max_len=4000)
    with serving(engine, "tiny", queue=2) as url:
        stop = threading.Event()

        def hold():
            body = {"prompt": "a", "n": 3, "max_tokens": 3900, "ignore_eos": True, "stream": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
                stop.wait(60)
                assert answer.status_code == 200

        held = threading.Thread(target=hold)
        held.start()
        wait_until(lambda: httpx.get(f"{url}/health").json()["sequences"] == 3)
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert httpx.post(f"{url}/v1/score", json={"tokens": [1, 2]}, timeout=60).status_code == 200  # needs no slot
        assert httpx.post(f"{url}/v1/score", json={"tokens": [[1, 2]] * 3}).json()["data"][2]["count"] == 1
        stop.set()
        held.join()
        wait_until(lambda: httpx.get(f"{url}/health").json()["sequences"] == 0)
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=60).status_code == 200


def test_an_engine_that_fails_is_an_error_and_not_the_end(lm, monkeypatch):
    engine = LocalEngine(lm, slots=2, max_len=64)
    with serving(engine, "tiny") as url:
        monkeypatch.setattr(engine.decoder, "step", lambda: 1 / 0)
        body = {"prompt": "a", "max_tokens": 9, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body)
        assert answer.status_code == 500 and "ZeroDivisionError" in answer.json()["error"]["message"]
        events = httpx.post(f"{url}/v1/completions", json={**body, "stream": True}).text.split("\n\n")
        assert "ZeroDivisionError" in json.loads(events[-3].removeprefix("data: "))["error"]["message"]
        monkeypatch.undo()
        assert httpx.post(f"{url}/v1/completions", json=body).json()["usage"]["completion_tokens"] == 9
