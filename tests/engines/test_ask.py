"""One way to ask a language model: what is sent, stored, counted and asked again, whoever asks."""

import ast
import asyncio
import json
from pathlib import Path

import pytest
from data_fixtures import teaching

import trailmark
from trailmark.ask.client import Client, Question, Unreadable
from trailmark.ask.store import Store
from trailmark.engines.base import SchemaError
from trailmark.engines.http import HttpEngine
from trailmark.engines.scripted import ScriptedEngine
from trailmark.models.tiny import tiny_tokenizer
from trailmark.types import SamplingLaw

ROOT = Path(trailmark.__file__).parent
WIRES = {"engines/http.py", "score/values.py"}  # the second asks for values, not in words
CONNECT = {"seats/open.py", "ask/client.py", "score/judge.py", "score/model_server.py"}
PLAYS = {"ask/client.py", "rollout/desk.py", "evaluate/search.py"}  # a question, a turn, a search


def calls(file):
    """The names that a module calls, under whatever name it imported them; methods with a dot."""
    tree = ast.parse(file.read_text())
    named = {a.asname or a.name: a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
    for f in (n.func for n in ast.walk(tree) if isinstance(n, ast.Call)):
        if isinstance(f, ast.Attribute):
            yield from (f.attr, f".{f.attr}")
        elif isinstance(f, ast.Name):
            yield named.get(f.id, f.id)


def test_one_package_holds_clients_for_questions():
    found = {str(f.relative_to(ROOT)): set(calls(f)) for f in ROOT.rglob("*.py")}
    calling = lambda *names: {name for name, called in found.items() if called & set(names)}
    assert calling("Wire") == WIRES and calling("connect") == CONNECT
    assert {name for name, called in found.items() if ".chat" in called} == PLAYS


def scripted(answer):
    return ScriptedEngine(lambda prompt, draw: answer(prompt), tiny_tokenizer(), "script")


def test_it_is_told_why_and_asked_again():
    def read(text):
        if not text.isdigit():
            raise Unreadable("That is no number")
        return int(text)

    prompts = []

    def answer(prompt):
        prompts.append(prompt)
        return "12" if "no number" in prompt else "twelve"

    client = Client(scripted(answer))
    ask = lambda **how: asyncio.run(client.ask("How many?", 9, form="Say a number.", read=read, **how))
    with pytest.raises(Unreadable, match="That is no number"):
        ask()
    assert ask(again=1) == 12 and ask(again=1) == 12
    assert prompts[0].count("Say a number.") == 1 and prompts[1].count("Say a number.") == 2
    assert "That is no number.\n\nSay a number." in prompts[1] and len(prompts) == 2 == client.used.asked


def test_tokens_are_counted_and_cost_what_they_cost(tmp_path):
    client = Client(scripted(lambda prompt: "abc"), Store(tmp_path / "a"), price=(2.0, 10.0))
    one = asyncio.run(client.ask("Why?", 9))
    head = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    n = len(tiny_tokenizer().encode(head))
    assert (one.text, one.tokens, one.prompt_tokens, one.stop) == ("abc", 4, n, "stopped")  # with the end of the turn
    assert client.used.as_dict() == {"asked": 1, "prompt_tokens": n, "tokens": 4, "cost": (2 * n + 10 * 4) / 1e6}
    again = Client(scripted(lambda prompt: "no"), Store(tmp_path / "a"))
    assert asyncio.run(again.ask("Why?", 9)) == one and again.used.as_dict()["cost"] is None and again.used.asked == 0


def test_a_question_is_known_by_all_that_its_answer_depends_on():
    talk = [{"role": "user", "content": "?"}]
    each = [Question(talk, 9), Question(talk, 8), Question(talk, 9, SamplingLaw(0.5)), Question(talk, 9, seed=1),
            Question(talk, 9, SamplingLaw(top_p=0.5)), Question(talk, 9, draw="x"), Question(talk, 9, stops=("\n",)),
            Question(talk, 9, SamplingLaw(top_k=3)), Question(talk, 9, schema={}), Question([*talk, *talk], 9),
            Question(talk, 9, schema={"type": "object"})]  # fmt: skip
    assert len({q.key("m") for q in each}) == len(each) and each[0].key("m") != each[0].key("n")


def test_what_a_server_is_sent():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    with teaching(lambda messages: '{"a": 1}') as server:
        client = Client(HttpEngine(server.url, "m", retries=0), law=SamplingLaw(0.5))
        assert asyncio.run(client.ask("?", 9, schema=schema)).text == '{"a": 1}'
        asyncio.run(client.ask("?", 9, stops=["\n"]))
        (_, _, first), (_, _, second) = server.asked
        named = {"name": "answer", "schema": schema, "strict": True}
        assert first["response_format"] == {"type": "json_schema", "json_schema": named}
        assert set(first) - set(second) == {"response_format"} and second["stop"] == ["\n"]
        assert not {"logprobs", "return_token_ids"} & set(second)  # words are all that is wanted


def test_a_server_that_refuses_the_schema(monkeypatch):
    with teaching() as server:
        server.always = 400
        engine = HttpEngine(server.url, "m", retries=0)
        monkeypatch.setattr(engine.wire, "_refusal", lambda r: engine_status("m answered 400: bad json_schema"))
        with pytest.raises(SchemaError, match="'m' does not write JSON by this schema: m answered 400") as problem:
            asyncio.run(Client(engine).ask("?", 9, schema={"type": "x"}))
        assert problem.value.code == 2 and len(server.asked) == 1


def test_a_server_that_knows_no_seed_is_asked_without(monkeypatch):
    with teaching(lambda messages: "Yes.") as server:
        server.faults = [422]
        engine = HttpEngine(server.url, "m", retries=0)
        monkeypatch.setattr(engine.wire, "_refusal", lambda r: engine_status("extra field: seed", 422))
        client = Client(engine)
        assert [asyncio.run(client.ask(q, 9)).text for q in "ab"] == ["Yes.", "Yes."]
        assert ["seed" in body for _, _, body in server.asked] == [True, False, False]


def engine_status(text, status=400):
    from trailmark.engines.http_client import EngineStatus

    return EngineStatus(text, status)


def test_a_store_says_which_line_is_none(tmp_path):
    file = tmp_path / "a"
    store = Store(file, text="text")
    store.add("k", {"text": "\ud800 and ü"})
    assert Store(file, text="text")["k"] == {"text": "\ud800 and ü"} and json.loads(file.read_bytes())["key"] == "k"
