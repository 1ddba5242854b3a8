"""Search and values over real sockets: the server returns what the library finds, also under load."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from trailmark.commands.serve import serving
from trailmark.engines.base import Request
from trailmark.engines.http_client import EngineGarbage, EngineStatus
from trailmark.engines.local import LocalEngine
from trailmark.rollout.play import stop_ids
from trailmark.rollout.search import Plan, search
from trailmark.score.values import HeadValues, HttpValues, Line, LogProb
from trailmark.serve.prompt_format import plain_format

SAY = [{"role": "user", "content": "Where to?"}]
ENDS = ["a", "e", "i", "o", " "]


@pytest.fixture(scope="module")
def lm():
    from trailmark.models.lm import LM
    from trailmark.models.tiny import build, tiny_config, tiny_tokenizer

    tokenizer = tiny_tokenizer()
    made = LM(build(tiny_config("llama", vocab=len(tokenizer), kv_heads=2, context=512), 0), tokenizer, "tiny")
    made.add_head("value", zero=False, seed=1)
    return made


@pytest.fixture(scope="module")
def local(lm):
    return LocalEngine(lm, slots=8, max_len=128)


@pytest.fixture(scope="module")
def url(lm):
    with serving(LocalEngine(lm, slots=8, max_len=128), "tiny", api_key="secret", values=HeadValues(lm)) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def http(url):
    with httpx.Client(base_url=url, headers={"Authorization": "Bearer secret"}, timeout=60) as http:
        yield http


def found_here(lm, local, prompt, plan, scorer=None, chat=False, key=""):
    request = Request(prompt, max_tokens=24, stop_ids=stop_ids(lm.tokenizer, chat), seed=7, key=key)
    return search(local, [request], scorer or HeadValues(lm), plan)[0]


@pytest.mark.parametrize(
    "asked", [{"beam": 3, "step_ends": ENDS}, {"best_of": 4}, {"beam": 2, "step_ends": ENDS, "by": "logp"}]
)
def test_a_search_behind_the_openai_client(client, lm, local, asked):
    plan = Plan(
        "beam" if "beam" in asked else "best_of",
        asked.get("beam") or asked["best_of"],
        tuple(asked.get("step_ends", ("\n",))),
        tree=True,
    )
    scorer = LogProb() if asked.get("by") else None
    prompt = plain_format(lm.tokenizer).prompt(lm.tokenizer, SAY)
    expected = found_here(lm, local, prompt, plan, scorer, chat=True)
    body = {"search": {**asked, "tree": True}, "return_token_ids": True}
    done = client.chat.completions.create(
        model="tiny", messages=SAY, max_tokens=24, seed=7, logprobs=True, extra_body=body
    )
    choice = done.choices[0]
    assert choice.message.content == expected.best.text
    assert choice.finish_reason == ("length" if expected.best.stop == "length" else "stop")
    assert choice.token_ids == list(expected.best.tokens)
    assert [t.logprob for t in choice.logprobs.content] == list(expected.best.logp)
    assert choice.search == json.loads(json.dumps(expected.plain())) and len(choice.search["tree"]) > 3
    assert done.usage.completion_tokens == len(expected.best.tokens) <= choice.search["tokens"]


def test_without_a_tree_none_comes_back(client):
    done = client.completions.create(model="tiny", prompt="x", max_tokens=4, extra_body={"search": {"best_of": 2}})
    assert set(done.choices[0].search) == {"score", "finished", "tokens", "rounds", "why"}


def test_several_prompts_are_searched_each(client, lm, local):
    plan = Plan("beam", 2, tuple(ENDS))
    body = {"search": {"beam": 2, "step_ends": ENDS}, "key": "k"}
    done = client.completions.create(model="tiny", prompt=["One", "Two and"], max_tokens=24, seed=7, extra_body=body)
    expected = [
        found_here(lm, local, tuple(lm.tokenizer.encode(p)), plan, key=k)
        for p, k in (("One", "k"), ("Two and", "k\x001"))
    ]
    assert [c.text for c in done.choices] == [f.best.text for f in expected]


def test_without_search_it_is_as_before(client, lm, local):
    from trailmark.engines.base import run

    done = client.completions.create(model="tiny", prompt="One", max_tokens=9, seed=7)
    ((plain,),) = run(
        local, [Request(tuple(lm.tokenizer.encode("One")), max_tokens=9, stop_ids=stop_ids(lm.tokenizer), seed=7)]
    )
    assert done.choices[0].text == plain.text and "search" not in done.choices[0].model_extra
    width_one = client.completions.create(
        model="tiny", prompt="One", max_tokens=9, seed=7, temperature=0, extra_body={"search": {"best_of": 1}}
    )
    greedy = client.completions.create(model="tiny", prompt="One", max_tokens=9, temperature=0)
    assert width_one.choices[0].text == greedy.choices[0].text


def test_nothing_finished_is_an_empty_answer(client, lm):
    body = {"search": {"beam": 2, "rounds": 1, "step_ends": ["a", "b"]}, "allowed_token_ids": lm.tokenizer.encode("ab")}
    choice = client.completions.create(model="tiny", prompt="x", max_tokens=50, extra_body=body).choices[0]
    assert (choice.text, choice.finish_reason) == ("", "length")
    assert choice.search == {"score": None, "finished": 0, "tokens": 2, "rounds": 1, "why": "rounds"}
    body = {"search": {"beam": 2, "budget": 3}, "ignore_eos": True}
    choice = client.completions.create(model="tiny", prompt="x", max_tokens=50, extra_body=body).choices[0]
    assert (choice.text, choice.finish_reason) == ("", "length")
    assert choice.search == {"score": None, "finished": 0, "tokens": 2, "rounds": 1, "why": "budget"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"search": {}}, "search"),
        ({"search": {"beam": 2, "best_of": 2}}, "search"),
        ({"search": {"beam": 0}}, "search"),
        ({"search": {"beem": 2}}, "search"),
        ({"search": {"beam": 2, "step_ends": [""]}}, "search"),
        ({"search": {"beam": 2}, "n": 2}, "n"),
        ({"search": {"beam": 2}, "stream": True}, "stream"),
        ({"search": {"beam": 2}, "echo": True}, "echo"),
        ({"search": {"beam": 2}, "logprobs": 3}, "logprobs"),
        ({"search": {"beam": 2}, "temperature": 0}, "temperature"),
        ({"search": {"best_of": 100000}}, "search"),
    ],
)
def test_a_search_that_cannot_be_had(http, body, param):
    said = http.post("/v1/completions", json={"prompt": "x", **body})
    assert said.status_code == 400 and said.json()["error"]["param"] == param, said.text


def test_values_of_texts_tokens_and_conversations(http, lm):
    ids = lm.tokenizer.encode("Where to?")
    begun = plain_format(lm.tokenizer).prompt(lm.tokenizer, SAY)
    spoken = (*begun, *lm.tokenizer.encode("There."))
    states = ["Where to?", ids, SAY, [*SAY, {"role": "assistant", "content": "There."}]]
    expected = asyncio.run(HeadValues(lm).values([tuple(ids), tuple(ids), begun, spoken]))
    said = http.post("/v1/values", json={"states": states, "model": "tiny"}).json()
    assert said == {"object": "values", "model": "tiny", "values": expected} and expected[0] == expected[1]
    assert http.post("/get_values", json={"states": states}).json() == expected
    assert len(set(expected)) == 3


def test_values_asked_at_once_are_those_asked_in_turn(http):
    texts = [f"state {k} " + "x" * (7 * k % 50) for k in range(24)]
    ask = lambda text: http.post("/get_values", json={"states": [text]}).json()[0]
    in_turn = [ask(t) for t in texts]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, texts)) == in_turn
    assert http.post("/get_values", json={"states": texts}).json() == in_turn


@pytest.mark.parametrize(
    ("states", "status"),
    [([], 400), ([""], 400), (["x" * 200], 400), ([[10**6]], 400), ([3], 400), ("x", 400), ([[{"role": "user"}]], 400)],
)
def test_states_without_a_value(http, states, status):
    said = http.post("/v1/values", json={"states": states})
    assert said.status_code == status and said.json()["error"]["message"]


def test_a_server_without_a_value_model(lm):
    with serving(LocalEngine(lm, slots=2, max_len=64), "tiny") as url, httpx.Client(base_url=url, timeout=60) as plain:
        assert plain.post("/v1/values", json={"states": ["x"]}).status_code == 404
        refused = plain.post("/v1/completions", json={"prompt": "x", "search": {"beam": 2}})
        assert refused.status_code == 400 and "--value RUN" in refused.json()["error"]["message"]
        done = plain.post(
            "/v1/completions", json={"prompt": "x", "max_tokens": 3, "search": {"best_of": 2, "by": "logp"}}
        )
        assert done.status_code == 200 and done.json()["choices"][0]["search"]["finished"] == 2
        with pytest.raises(EngineStatus, match="no value model"):
            asyncio.run(HttpValues(url).score([Line((1,), (2,))]))


def test_a_server_of_values_is_a_scorer(url, lm, local):
    lines = [Line((1, 2), (3,)), Line((1, 2), (4, 5))]
    remote = HttpValues(url, "secret")
    assert (
        asyncio.run(remote.score(lines)) == asyncio.run(HeadValues(lm).score(lines))
        and asyncio.run(remote.score([])) == []
    )
    plan = Plan("beam", 2, tuple(ENDS))
    prompt = tuple(lm.tokenizer.encode("One"))
    assert found_here(lm, local, prompt, plan, remote).best.tokens == found_here(lm, local, prompt, plan).best.tokens

    async def nonsense(path, body):
        return {"values": ["a"]}

    remote.wire.post = nonsense
    with pytest.raises(EngineGarbage, match="asked for 2 values"):
        asyncio.run(remote.score(lines))


def test_the_command_loads_the_value_model(lm, tmp_path):
    from typer.testing import CliRunner

    from trailmark.commands.app import app

    done = CliRunner().invoke(app, ["serve", "tiny", "--port", "0", "--value", str(tmp_path)])
    assert done.exit_code == 2 and "holds no value model" in done.stderr


@pytest.fixture
def computed(monkeypatch):
    """How many rows were computed in each pass."""
    passes, real = [], HeadValues._compute
    monkeypatch.setattr(
        HeadValues, "_compute", lambda self, rows, places: (passes.append(len(rows)), real(self, rows, places))[1]
    )
    return passes


@pytest.mark.parametrize("fixed", [True, False])
def test_states_of_a_client_that_left_are_not_computed(lm, computed, fixed):
    values = HeadValues(lm, fixed=fixed)

    async def ask():
        left = asyncio.create_task(values.values([(k + 1, 5) for k in range(100)]))
        while not (computed if fixed else values._waiting):
            await asyncio.sleep(0)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        before = sum(computed)
        await values.values([(7, 8)])
        return sum(computed) - before

    assert asyncio.run(ask()) == 1


@pytest.mark.parametrize("fixed", [True, False])
def test_a_state_does_not_wait_for_thousands_of_another_request(lm, computed, fixed):
    """Counted in rows that are computed meanwhile, not in seconds."""
    from trailmark.serve.app import build_app
    from trailmark.serve.service import ROWS_AT_ONCE

    values = HeadValues(lm, fixed=fixed)
    service = build_app(LocalEngine(lm, slots=4, max_len=128), "m", values=values).state.service

    async def ask():
        long = asyncio.create_task(service.valued([(k % 90 + 1, 5) for k in range(400)]))
        while not computed:
            await asyncio.sleep(0)
        before = sum(computed)
        await service.valued([(7, 8)])
        waited = sum(computed) - before
        return waited, await long

    waited, found = asyncio.run(ask())
    assert waited <= 2 * ROWS_AT_ONCE and max(computed) <= ROWS_AT_ONCE
    assert found == pytest.approx(asyncio.run(values.values([(k % 90 + 1, 5) for k in range(400)])), abs=1e-5)
