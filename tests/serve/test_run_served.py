"""What the server takes from a run: length, dtype, stop texts, and how chats become prompts."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import forked
import httpx
import openai
import pytest
import torch
from serve_calls import ENV, refused

from trailmark import methods
from trailmark.commands.serve import serving
from trailmark.config import resolve
from trailmark.engines.base import Request, run
from trailmark.engines.http import HttpEngine
from trailmark.engines.local import LocalEngine
from trailmark.errors import ModelError
from trailmark.learn.checkpoint import save_model
from trailmark.models.tiny import tiny_tokenizer
from trailmark.rollout.play import stop_ids
from trailmark.runs.launch import launch
from trailmark.seats.model_names import Located, locate
from trailmark.serve.prompt_format import PromptFormat, format_of_run, plain_format
from trailmark.serve.run_settings import longest, served_model
from trailmark.types import SamplingLaw

TINY = {"name": "tiny", "shape": {"layers": 1, "width": 32, "heads": 2, "context": 256}}
GREEDY = SamplingLaw(temperature=0)
TOKENIZER = tiny_tokenizer()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of one step: raw text with LoRA, a conversation, imitation of raw text and of chats."""
    root = tmp_path_factory.mktemp("runs")

    def train(name, **recipe):
        method = methods.get_method(recipe["method"])
        config = resolve({"out": str(root / name), "steps": 1, "model": TINY, **recipe}, method.Config)
        launch(method, config)

    small = {"prompts_per_step": 1, "n": 2, "engine": {"max_num_seqs": 2, "max_len": 77}}
    arith = {"method": "policy_gradient", "task": {"name": "arith"}, **small}
    train("text", **arith, sampling={"max_tokens": 4, "stop": ["####"]}, model={**TINY, "lora": {"rank": 2}})
    talk = {"name": "gym", "options": {"id": "FrozenLake-v1", "markov": False, "max_steps": 2}}
    train(
        "talk",
        method="policy_gradient",
        task=talk,
        sampling={"max_tokens": 4},
        **{**small, "engine": {"max_num_seqs": 2}},
    )
    rows = [{"prompt": f"{k}+1=?\n\n", "response": f"#### {k + 1}"} for k in range(4)]
    (root / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    for name, chat in (("lessons", False), ("chats", True)):
        train(name, method="sft", data=str(root / "rows.jsonl"), chat=chat, batch=2)
    return root


def test_a_run_of_another_dtype(runs):
    home = Located(
        "tiny", "made", "tiny", run=runs, recipe={"model": {"dtype": "float64"}, "engine": {"dtype": "bfloat16"}}
    )
    assert served_model(home, "cpu", None, None, None).dtype == "float64" and home.engine.dtype == "bfloat16"
    assert served_model(home, "cpu", "float32", None, None).dtype == "float32"
    with pytest.raises(ModelError, match="--dtype: Input should be"):
        served_model(home, "cpu", "float3", None, None)
    with pytest.raises(ModelError, match="is served already"):
        served_model(locate("http://127.0.0.1:9"), "cpu", None, None, None)


def test_a_model_without_a_run_has_the_length_of_its_context(make_lm, monkeypatch):
    lm = make_lm("llama", context=2048)
    assert longest(lm, 16) == 2048
    monkeypatch.setattr("trailmark.serve.run_settings.free_memory", lambda device: 2 * 16 * 1024 * 512.0)
    assert longest(lm, 16) == 1024 and longest(lm, 8) == 2048
    assert longest(lm, 10**9) == 256 and lm.dtype == torch.float32


def test_in_a_container_its_limit_counts(make_lm, monkeypatch):
    monkeypatch.setattr("trailmark.memory._in_container", lambda: 2 * 16 * 1024 * 512)
    assert longest(make_lm("llama", context=2048), 16) == 1024


@pytest.mark.parametrize(
    ("name", "kind", "ending"),
    [("text", "text", "\n"), ("talk", "template", ""), ("lessons", "plain", "\n\n"), ("chats", "template", "")],
)
def test_a_run_knows_how_it_was_prompted(runs, name, kind, ending):
    prompt_format = format_of_run(locate(str(runs / name)), TOKENIZER)
    assert (prompt_format.kind, prompt_format.ending) == (kind, ending) and "as its run was" in prompt_format.why


def test_a_method_of_ones_own_that_imitates_is_asked_as_it_was_taught(runs, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    text = "from trailmark.methods.sft import SftMethod\n\n\nclass Copies(SftMethod):\n    pass\n"
    (tmp_path / "copies.py").write_text(text)
    home = locate(str(runs / "lessons"))
    mine = replace(home, recipe={**home.recipe, "method": "copies:Copies"})
    taught = PromptFormat("plain", "\n\n", why="as its run was trained")
    assert format_of_run(mine, TOKENIZER) == format_of_run(home, TOKENIZER) == taught
    gone = replace(home, recipe={**home.recipe, "method": "copied:Gone"})
    assert format_of_run(gone, TOKENIZER).kind == "template"  # it is served all the same


def test_without_stored_prompts_the_task_says_it(runs, tmp_path):
    home = locate(str(runs / "text"))
    bare = replace(home, run=tmp_path)
    assert format_of_run(bare, TOKENIZER) == PromptFormat("text", "\n", why="as its task prompts")
    broken = replace(bare, recipe={**home.recipe, "task": {"name": "no:such"}})
    assert (
        format_of_run(broken, TOKENIZER).kind == "template" and "does not show" in format_of_run(broken, TOKENIZER).why
    )
    lost = replace(bare, recipe={"method": "sft", "chat": False, "data": "gone.jsonl"})
    assert format_of_run(lost, TOKENIZER).kind == "plain" and "gone.jsonl" in format_of_run(lost, TOKENIZER).why
    other = tiny_tokenizer()
    other.chat_template = None
    assert plain_format(other).kind == "plain" and "no chat template" in plain_format(other).describe()


def test_what_is_said_is_encoded_as_the_run_was():
    ids = lambda text: tuple(TOKENIZER.encode(text, add_special_tokens=False))
    user, assistant = ({"role": r, "content": c} for r, c in (("user", "1+1=?"), ("assistant", "2")))
    text, plain = PromptFormat("text", "\n", bos=(7,)), PromptFormat("plain", "\n")
    assert text.prompt(TOKENIZER, [user]) == (7, *ids("1+1=?\n"))
    assert text.prompt(TOKENIZER, [{**user, "content": "1+1=?\n"}]) == (7, *ids("1+1=?\n"))
    assert text.with_answer(TOKENIZER, [user], "2") == ((7, *ids("1+1=?\n2")), 7)
    assert plain.prompt(TOKENIZER, [user]) == ids("1+1=?\n")
    assert plain.prompt(TOKENIZER, [user, assistant, user]) == ids("1+1=?\n2<|im_end|>1+1=?\n")
    assert plain.with_answer(TOKENIZER, [user], "2") == (ids("1+1=?\n2"), 6)


def test_chat_with_a_model_of_raw_text_answers_as_its_completion_does(make_lm):
    lm = make_lm("llama", pad_is_eos=False)
    local = LocalEngine(lm, 4, 64)
    prompt = tuple(lm.tokenizer.encode("7+1-6=?\n"))
    want = run(local, [Request(prompt, GREEDY, 1, 20, stop_ids(lm.tokenizer))])[0][0]
    with serving(LocalEngine(lm, 4, 64), "m", prompt_format=PromptFormat("text", "\n")) as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=60) as client:
            asked = {"model": "m", "temperature": 0, "max_tokens": 20}
            for content in ("7+1-6=?", "7+1-6=?\n", [{"type": "text", "text": "7+1-6=?"}]):
                say = [{"role": "user", "content": content}]
                answer = client.chat.completions.create(messages=say, **asked)
                pieces = client.chat.completions.create(messages=say, stream=True, **asked)
                assert (
                    answer.choices[0].message.content
                    == want.text
                    == "".join(c.choices[0].delta.content or "" for c in pieces)
                )
                assert answer.usage.prompt_tokens == len(prompt)
            assert client.completions.create(prompt="7+1-6=?\n", **asked).choices[0].text == want.text
            for more in ([{"role": "system", "content": "Be brief."}], [{"role": "user", "content": "x"}] * 2):
                with pytest.raises(openai.BadRequestError, match="trained on prompts of raw text"):
                    client.chat.completions.create(messages=[*more, {"role": "user", "content": "1"}], **asked)
            assert client.models.retrieve("m").prompts == "text"
        scored = httpx.post(
            f"{url}/v1/score", json={"messages": [{"role": "user", "content": "7+1-6=?"}], "completion": "2"}
        )
        assert (
            scored.json()["data"][0]["token_logprobs"]
            == local.score_rows([(*prompt, *lm.tokenizer.encode("2"))], [8])[0]
        )


def test_stop_texts_of_a_run_end_an_answer(make_lm):
    lm = make_lm("llama", pad_is_eos=False)
    free = run(LocalEngine(lm, 4, 64), [Request((5, 6), GREEDY, 1, 20, ())])[0][0]
    stop = free.text[4]
    with serving(LocalEngine(lm, 4, 64), "m", stop=[stop]) as url:
        body = {"prompt": [5, 6], "temperature": 0, "max_tokens": 20, "ignore_eos": True}
        ask = lambda **more: httpx.post(f"{url}/v1/completions", json={**body, **more}, timeout=60).json()["choices"][
            0
        ]["text"]
        assert ask() == free.text[: free.text.index(stop)] and ask(stop=[]) == free.text == ask(stop="\0never")
        assert run(HttpEngine(url, "m", lm.tokenizer), [Request((5, 6), GREEDY, 1, 20, ())]) == [
            [free]
        ]  # as in this process


def test_the_command_serves_a_run_as_it_was_trained(runs, make_lm, tmp_path):
    """A LoRA run from inside one of its checkpoints, with a value model beside it."""
    lm = make_lm("llama", pad_is_eos=False, context=256)
    lm.add_head("value")
    save_model(lm, tmp_path / "value", tmp_path / "base")
    policy = runs / "text/checkpoints/000001/policy"
    command = [sys.executable, "-m", "trailmark", "serve", str(policy), "--port", "0", "--slots", "2"]
    process = forked.Popen(
        [*command, "--value", str(tmp_path / "value"), "--name", "m"], env=ENV, stdout=subprocess.PIPE, text=True
    )
    try:
        first, second = process.stdout.readline(), process.stdout.readline()
        assert "2 slots of 77 tokens, as its run has it" in first and "ending in '\\n' (as its run was" in second
        url = re.search(r"http://\S+(?=/v1)", first)[0]
        (model,) = httpx.get(f"{url}/v1/models").json()["data"]
        assert (model["max_model_len"], model["prompts"], model["prompts_end"]) == (77, "text", "\n")
        say = {"messages": [{"role": "user", "content": "1+1=?"}], "temperature": 0, "max_tokens": 9}
        chat = httpx.post(f"{url}/v1/chat/completions", json=say, timeout=60).json()
        text = httpx.post(
            f"{url}/v1/completions", json={"prompt": "1+1=?\n", "temperature": 0, "max_tokens": 9}, timeout=60
        )
        assert chat["choices"][0]["message"]["content"] == text.json()["choices"][0]["text"]
        assert len(httpx.post(f"{url}/v1/values", json={"states": ["a", "b"]}, timeout=60).json()["values"]) == 2
    finally:
        process.kill()
        process.communicate(timeout=30)


def test_prompts_that_cannot_be(tmp_path, make_lm):
    assert "choose auto, template, text or plain" in refused("tiny", "--port", 0, "--prompts", "morse")
