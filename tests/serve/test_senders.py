"""Which requests a server accepts: of programs, not of a web page that somebody has open in a browser."""

import httpx
import openai
import pytest

from trailmark.commands.serve import serving
from trailmark.engines.local import LocalEngine
from trailmark.serve.senders import Senders, host_name

SAY = [{"role": "user", "content": "hi"}]
ASK = {"prompt": "a", "max_tokens": 1}
CHAT = {"messages": SAY, "max_tokens": 1}


@pytest.fixture(scope="module")
def engine():
    from trailmark.models.lm import LM
    from trailmark.models.tiny import build, tiny_config, tiny_tokenizer

    tokenizer = tiny_tokenizer()
    return LocalEngine(LM(build(tiny_config("llama", vocab=len(tokenizer), kv_heads=2), 0), tokenizer, "tiny"), 2, 64)


@pytest.fixture(scope="module")
def url(engine):
    with serving(engine, "m", hosts=["proxy.example"]) as url:
        yield url


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonp", None])
@pytest.mark.parametrize("path", ["completions", "chat/completions", "score", "values"])
def test_a_form_of_a_web_page_is_no_request(url, kind, path):
    headers = {} if kind is None else {"Content-Type": kind}
    answer = httpx.post(f"{url}/v1/{path}", content=b'{"prompt": "a", "max_tokens": 1}', headers=headers)
    assert answer.status_code == 415 and "Content-Type: application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/x+json"])
def test_every_kind_of_json_is_one(url, kind):
    body, headers = b'{"prompt": "a", "max_tokens": 1}', {"Content-Type": kind}
    answer = httpx.post(f"{url}/v1/completions", content=body, headers=headers)
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "localhost@evil.example", "", "x", "a b"]
)
def test_a_name_that_points_here_is_refused(url, host):
    """DNS rebinding: the page's own name leads to this machine."""
    for answer in (
        httpx.post(f"{url}/v1/completions", json=ASK, headers={"Host": host}),
        httpx.get(f"{url}/v1/models", headers={"Host": host}),
    ):
        assert answer.status_code == 403 and "--allow-host" in answer.json()["error"]["message"]


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1", "[::1]:8000", "10.0.0.7", "proxy.example"])
def test_names_and_numbers_of_this_machine_are_accepted(url, host):
    assert httpx.post(f"{url}/v1/completions", json=ASK, headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "https://evil.example:1", "null", "http://10.0.0.7", ""])
def test_a_page_of_another_place_is_refused(url, origin):
    answer = httpx.post(f"{url}/v1/chat/completions", json=CHAT, headers={"Origin": origin})
    assert answer.status_code == 403 and answer.json()["error"]["code"] == "origin_not_allowed"


def test_pages_of_this_server_and_of_this_machine_are_accepted(url):
    for origin in (url, "http://localhost:3000", "https://proxy.example", "http://[::1]:9"):
        assert httpx.post(f"{url}/v1/chat/completions", json=CHAT, headers={"Origin": origin}).status_code == 200


def test_every_name_if_asked_for(engine):
    with serving(engine, "m", hosts=["*"]) as url:
        headers = {"Host": "any.example", "Origin": "https://any.example"}
        assert httpx.post(f"{url}/v1/completions", json=ASK, headers=headers).status_code == 200
        assert httpx.post(f"{url}/v1/completions", content=b"{}", headers=headers).status_code == 415


def test_real_clients_and_checks_of_health_are_not_disturbed(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        assert client.completions.create(model="m", **ASK).choices[0].finish_reason
    assert httpx.get(f"{url}/health", headers={"Host": "pod-7.cluster.example"}).status_code == 200


@pytest.mark.parametrize(
    "given",
    [
        {"template": "{{ 'a' * 9999999999 }}"},
        {"template": None},
        {"chat_template": "x"},
        {"messages": []},
        {"tokenizer": 1},
        {"self": 1},
        {"conversation": 1},
        {"bos_token": ""},
        {"eos_token": "x"},
        {"add_generation_prompt": False},
        {"tokenize": True},
        {"padding": True},
        {"tokenizer_kwargs": {}},
        {"raise_exception": 1},
        {"range": 1},
        {"tools": []},
        {"__class__": 1},
        {"enable_thinking": "x" * 70_000},
        {"documents": [["x"] * 30_000]},
    ],
)
def test_a_request_sets_no_more_than_variables_of_usual_templates(url, given):
    answer = httpx.post(f"{url}/v1/chat/completions", json={**CHAT, "chat_template_kwargs": given})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "chat_template_kwargs" and len(error["message"]) < 600


def test_what_clients_commonly_set_reaches_the_template(engine, monkeypatch):
    tokenizer = engine.tokenizer
    variables = "{% if enable_thinking is false %}!{% endif %}{{ reasoning_effort }}"
    variables += "{% if documents %}{{ documents[0].text }}{% endif %}"
    monkeypatch.setattr(tokenizer, "chat_template", tokenizer.chat_template + variables)
    more = {"enable_thinking": False, "reasoning_effort": "low", "documents": [{"text": "é"}]}
    with serving(engine, "m") as url:
        body = {**CHAT, "chat_template_kwargs": more, "return_token_ids": True}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body).json()
    assert "choices" in answer, answer
    assert tokenizer.decode(answer["prompt_token_ids"]).endswith("!lowé")
    wrong = {**CHAT, "chat_template_kwargs": {"documents": 5}}
    with serving(engine, "m") as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json=wrong)
    assert answer.status_code == 400 and "refuses the messages" in answer.json()["error"]["message"]


def test_a_models_own_template_cannot_stop_the_others(engine, monkeypatch, hurried_templates):
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    monkeypatch.setattr(engine.tokenizer, "chat_template", loop)
    with serving(engine, "m") as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json=CHAT, timeout=120)
        assert answer.status_code == 400 and "computes for more than 0.4 s" in answer.json()["error"]["message"]
        assert httpx.post(f"{url}/v1/completions", json=ASK, timeout=60).status_code == 200


def test_errors_of_our_own_tell_nothing_of_the_inside(engine, monkeypatch):
    from trailmark.serve.service import Service

    monkeypatch.setattr(Service, "prompt", lambda self, body: {}["secret path"])
    with serving(engine, "m") as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json=CHAT)
    assert answer.status_code == 500 and "secret" not in answer.text and "KeyError" not in answer.text


def test_host_names_are_read_strictly():
    assert [host_name(h) for h in ("a:1", "A.b.:2", "[::1]", "a:b", "[x]", "u@h", "a/b", "")] == [
        "a", "a.b", "::1", "", "", "", "", "",
    ]  # fmt: skip
    assert Senders(["Proxy.Example."]).known("proxy.example") and not Senders().known("")
