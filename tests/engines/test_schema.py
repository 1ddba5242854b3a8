"""JSON of a schema, from a model that has learnt nothing: in this process, from our own server, and what other servers
are sent."""

import asyncio
import json
import sys

import httpx
import pytest

from trailmark.ask.client import Client
from trailmark.commands.serve import serving
from trailmark.engines.base import EngineError, Request, SchemaError, run
from trailmark.engines.http import HttpEngine
from trailmark.engines.local import LocalEngine
from trailmark.types import SamplingLaw

COLOURS = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}, "sure": {"type": "boolean"}},
           "required": ["colour", "sure"], "additionalProperties": False}  # fmt: skip
EVERY = {json.dumps({"colour": c, "sure": s}) for c in ("red", "blue") for s in (True, False)}


def ask(engine, draw, **how):
    client = Client(engine, law=SamplingLaw(how.pop("temperature", 1.0), top_k=how.pop("top_k", 0)))
    return asyncio.run(client.ask("Which?", how.pop("max_tokens", 60), draw=str(draw), schema=COLOURS, **how))


@pytest.fixture
def lm(make_lm):
    pytest.importorskip("llguidance")
    return make_lm("llama", context=256)


def test_every_answer_keeps_to_the_schema(lm):
    engine = LocalEngine(lm, 4, 200)
    said = [ask(engine, k) for k in range(12)]
    assert {a.text for a in said} <= EVERY and len({a.text for a in said}) > 1 and {a.stop for a in said} == {"stopped"}
    assert ask(engine, 0, temperature=0.0).text in EVERY and ask(engine, 0, top_k=2).text in EVERY
    cut = ask(engine, 0, max_tokens=5)
    assert cut.text == '{"col' and cut.stop == "length"


def test_the_numbers_are_of_the_tokens_that_were_allowed(lm):
    """Where one token is allowed, its log-prob under the law is 0, and under the model it is what `score` says."""
    engine = LocalEngine(lm, 4, 200)
    prompt = tuple(lm.tokenizer.encode("Which?"))
    ends = (lm.tokenizer.eos_token_id,)
    (done,) = asyncio.run(engine.sample(Request(prompt, max_tokens=60, stop_ids=ends, schema=json.dumps(COLOURS))))
    assert done.text in EVERY and done.tokens[-1] == ends[0]
    assert done.logp == pytest.approx(asyncio.run(engine.score(prompt + done.tokens, len(prompt))), abs=1e-4)
    free = [k for k, q in enumerate(done.logq) if q < 0]  # the first letter of a colour, and of true or false
    assert [done.text[k] in "rbtf" for k in free] == [True, True]


def test_a_neighbour_without_a_schema_draws_what_it_draws_alone(lm):
    engine = LocalEngine(lm, 4, 200)
    free = Request(tuple(lm.tokenizer.encode("Free.")), max_tokens=20, key="free")
    bound = Request(free.prompt, max_tokens=60, stop_ids=(lm.tokenizer.eos_token_id,), schema=json.dumps(COLOURS))

    async def both():
        return await asyncio.gather(engine.sample(free), engine.sample(bound))

    alone, (beside, other) = asyncio.run(engine.sample(free)), asyncio.run(both())
    assert beside == alone and other[0].text in EVERY


def test_decoding_ahead_keeps_to_it_beside_others(lm, monkeypatch):
    """As on a GPU: the device is a step ahead, and waits for those who need a schema."""
    ends = (lm.tokenizer.eos_token_id,)
    free = [Request(tuple(lm.tokenizer.encode("Free.")), max_tokens=30, key=f"f{k}") for k in range(2)]
    bound = [Request(free[0].prompt, max_tokens=60, stop_ids=ends, schema=json.dumps(COLOURS), key=f"{k}")
             for k in range(3)]  # fmt: skip

    def said():
        return [done.text for (done,) in run(LocalEngine(lm, 3, 200), [*free, *bound])]

    usual = said()
    monkeypatch.setattr("trailmark.engines.local.AHEAD", True)
    assert said() == usual and set(usual[2:]) <= EVERY


def test_our_server_keeps_to_it_too(lm):
    with serving(LocalEngine(lm, 4, 200), name="small") as url:
        there = HttpEngine(url, "small")
        here = LocalEngine(lm, 4, 200)
        assert [ask(there, k) for k in range(3)] == [ask(here, k) for k in range(3)]
        with pytest.raises(SchemaError, match="'small' does not write JSON by this schema: .*Invalid type: colour"):
            asyncio.run(Client(there).ask("?", 9, schema={"type": "colour"}))


@pytest.mark.parametrize("schema, says", [
    ({"type": "colour"}, "this JSON schema cannot be kept to: Invalid type: colour."),
    ({"$ref": "#/nowhere"}, "Pointer '/nowhere' does not exist"), ({"not": {"type": "string"}}, "Unimplemented keys"),
    ({"type": "array", "items": {"minLength": 10**9}}, "minLength 1000000000 is more than 10000"),
    ({"enum": ["x" * 70_000]}, "it has more than 65536 letters"),
    ({"anyOf": [{"properties": {f"k{i}{j}": {"type": "number"} for j in range(10)}, "type": "object"}
                for i in range(150)]}, "Parser Error: Current row has 7050 items; max is 2000"),
])  # fmt: skip
def test_a_schema_that_cannot_be_kept_to(lm, schema, says):
    with pytest.raises(SchemaError) as problem:
        asyncio.run(Client(LocalEngine(lm, 2, 200)).ask("?", 9, schema=schema))
    assert says in str(problem.value) and problem.value.code == 2 and "\n" not in str(problem.value)


def test_forms_of_an_answer_that_a_request_names(lm):
    with serving(LocalEngine(lm, 4, 200), name="small") as url:

        def post(form, **more):
            body = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 30, "seed": 1, **more}
            done = httpx.post(f"{url}/v1/chat/completions", json={**body, "response_format": form}, timeout=60)
            said = done.json()
            return said["choices"][0]["message"]["content"] if done.status_code == 200 else said["error"]["message"]

        assert post({"type": "text"}) == post(None) and post({"type": "json_object"}).startswith("{")
        schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": 7}}}
        assert post(schema) == "7"
        assert "a search cannot keep to a schema" in post(schema, search={"best_of": 2})
        assert "needs a token that ends the text" in post(schema, min_tokens=2)
        assert "'response_format'" in post({"type": "xml"})


def test_what_does_not_go_with_a_schema(lm):
    engine = LocalEngine(lm, 2, 200)
    for more in ({}, {"stop_ids": (3,), "law": SamplingLaw(allowed=(1, 2))}):
        with pytest.raises(EngineError, match="a JSON schema needs a token that ends the text"):
            asyncio.run(engine.sample(Request((1, 2), schema="{}", **more)))


def test_without_the_library(make_lm, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(SchemaError, match=r"a JSON schema needs llguidance: pip install 'trailmark\[schema\]'"):
        asyncio.run(Client(LocalEngine(make_lm("llama"), 2, 100)).ask("?", 9, schema=COLOURS))
