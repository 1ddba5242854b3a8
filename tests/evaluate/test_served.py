"""Models behind an API: what a reply means, what they are sent, and that a server and this process play the same
game."""

import json
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.commands.serve import serving
from trailmark.config import ModelConfig
from trailmark.engines.http import HttpEngine
from trailmark.engines.local import LocalEngine
from trailmark.evaluate.run import evaluate
from trailmark.evaluate.zero_shot import ZeroShot, read_choice
from trailmark.methods.reflect.play import Talk, two_players
from trailmark.models.load import load_model
from trailmark.models.tiny import tiny_tokenizer
from trailmark.rollout.play import Seat
from trailmark.tasks import get_task, taxi
from trailmark.types import SamplingLaw

LABELS = tuple("012345")


@pytest.mark.parametrize(
    ("reply", "label"),
    [
        ("Action: 3", "3"),
        ("I saw 2 walls. ACTION: 4.", "4"),
        ("**Action:** 5 because", "5"),
        ("My action is number 0", "0"),
        ("first 7 steps, then go 3", "3"),  # 7 is no label
        ("take 2", "2"),
        ("Action: (3)", "3"),
        ("Action:\n\n`1`", "1"),
    ],
)
def test_what_a_reply_means(reply, label):
    assert read_choice(reply, LABELS, random.Random(0)) == (label, False)


def test_letters_and_nothing():
    assert read_choice("a thing: Action: b", ("a", "b"), random.Random(0)) == ("b", False)
    assert read_choice("let us take b", ("b", "c"), random.Random(0)) == ("b", False)
    for two in ("Action: 17 or 4", "action 1, then action: later 2"):
        assert read_choice(two, LABELS, random.Random(0))[1]
    assert read_choice("", LABELS, random.Random(1)) == read_choice("9", LABELS, random.Random(1))


def stub(answer):
    """A server that knows chat completions only, and keeps what it was sent."""
    heard = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(404)

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            heard.append((self.path, dict(self.headers), body))
            text = answer(body["messages"])
            choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            sent = json.dumps({"choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, f"http://127.0.0.1:{server.server_port}", heard


MAPS = {taxi.draw(s): s for s in taxi.starts()}


def oracle(messages):
    """Finds the map in what it is shown, and knows the way to the passenger."""
    text = messages[-1]["content"]
    state = next(s for drawn, s in MAPS.items() if drawn in text)
    return f"The passenger waits, 9 lives. Action: {taxi.optimal_action(state, 'pickup')}"


def shell(*words):
    done = CliRunner().invoke(app, list(words))
    assert "Traceback" not in done.output, done.output
    return done


def test_an_oracle_behind_an_api_wins_and_azure_headers_are_sent(monkeypatch):
    monkeypatch.setenv("AZURE_KEY", "secret")
    server, url, heard = stub(oracle)
    try:
        done = shell(
            "eval", url, "mode=pickup", "history=none", "--task", "taxi", "--n", "8", "--served", "gpt", "--react",
            "--json", "--header", "api-key=env:AZURE_KEY", "--query", "api-version=2024-10-21", "--max-tokens", "20",
        )  # fmt: skip
    finally:
        server.shutdown()
    result = json.loads(done.stdout)
    assert result["rows"][0]["metrics"]["success"]["value"] == 1.0 and result["guessed"] == 0
    path, headers, body = heard[0]
    assert path == "/v1/chat/completions?api-version=2024-10-21" and headers["api-key"] == "secret"
    assert body["model"] == "gpt" and body["max_tokens"] == 20 and body["messages"][0]["role"] == "system"
    assert len(heard) == 2 * result["decisions"]  # an analysis, then a choice
    analysis, choice = heard[0][2]["messages"][-1]["content"], heard[1][2]["messages"][-1]["content"]
    menus = [("0. south" in b["messages"][-1]["content"]) for _, _, b in heard]
    assert menus.count(True) == menus.count(False) and analysis != choice


def test_garbage_is_random_and_is_counted():
    server, url, _ = stub(lambda messages: "I would rather not say.")
    try:
        done = shell("eval", url, "mode=pickup", "history=none", "--task", "taxi", "--n", "60", "--json")
    finally:
        server.shutdown()
    result = json.loads(done.stdout)
    assert result["guessed"] == result["decisions"] > 60 and result["rows"][0]["metrics"]["success"]["value"] < 0.15


def engine():
    shape = {"layers": 1, "width": 32, "heads": 2, "context": 1024}
    return LocalEngine(load_model(ModelConfig(name="tiny", shape=shape)), 8, 1024)


@pytest.mark.parametrize("react", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_served_model_plays_as_it_does_here(react, temperature):
    """Same weights behind the server and in this process: the same replies, actions, success."""
    source, law = get_task("taxi", mode="pickup", history="none"), SamplingLaw(temperature)
    here = ZeroShot(react)
    local = evaluate(source, [Seat("policy", engine(), law, 12)], here.protocol(), n=6)
    with serving(engine(), "tiny") as url:
        there = ZeroShot(react)
        seat = Seat("policy", HttpEngine(url, "tiny"), law, 12, kind="remote")
        served = evaluate(source, [seat], there.protocol(), n=6)
    said = lambda report: [[(t.text, t.tokens, t.action) for t in e.turns] for e in report.episodes]
    assert said(local) == said(served) and here.guessed == there.guessed
    assert local.row["metrics"]["success"] == served.row["metrics"]["success"] and local.row["scored"] == 6


def test_a_served_policy_scores_labels_as_it_does_here():
    """The trained way, label by label: our server draws under the listed labels, and gives the same log-probs."""
    source, tokenizer = get_task("taxi", mode="pickup", history="none", menu=False), tiny_tokenizer()
    local = evaluate(source, [Seat("policy", engine())], two_players(Talk(False)), n=20)
    with serving(engine(), "tiny") as url:
        seat = Seat("policy", HttpEngine(url, "tiny", tokenizer, exact=True))
        served = evaluate(source, [seat], two_players(Talk(False)), n=20)
    assert [e.turns for e in local.episodes] == [e.turns for e in served.episodes]


def test_the_model_of_a_server():
    """The only one is taken where none is named; another one is refused."""
    with serving(engine(), "small") as url:
        words = [
            "eval", url, "mode=pickup", "history=none", "--task", "taxi", "--n", "2", "--max-tokens", "4", "--json",
        ]
        row = json.loads(shell(*words).stdout)["rows"][0]
        assert row["scored"] == 2
        done = shell(*words, "--served", "large")
    assert (
        done.exit_code == 2 and "serves 'small', but no model 'large'. Name one of them with --served." in done.output
    )


def test_rows_that_need_no_model():
    words = ["mode=pickup", "history=none", "--task", "taxi", "--split", "all", "--json"]
    both = json.loads(shell("eval", "oracle", "random", *words).stdout)["rows"]
    assert [r["name"] for r in both] == ["oracle", "random"] and both[0]["metrics"]["success"]["value"] == 1.0
    assert both[1]["episodes"] == 300 and both[1]["metrics"]["success"]["value"] < 0.05


def test_a_whole_address_of_azure(monkeypatch):
    monkeypatch.setenv("AZURE_KEY", "secret")
    server, url, heard = stub(oracle)
    try:
        done = shell("eval", f"{url}/openai/deployments/gpt/chat/completions?api-version=2024-10-21", "mode=pickup",
                     "history=none", "--task", "taxi", "--n", "4", "--header", "api-key=env:AZURE_KEY",
                     "--json")  # fmt: skip
    finally:
        server.shutdown()
    assert json.loads(done.stdout)["rows"][0]["metrics"]["success"]["value"] == 1.0
    assert {path for path, _, _ in heard} == {"/openai/deployments/gpt/chat/completions?api-version=2024-10-21"}


def test_the_oracle_of_the_repository_world(tmp_path):
    (tmp_path / "notes" / "src").mkdir(parents=True)
    (tmp_path / "notes" / "src" / "heat.py").write_text("def boil():\n    return 100\n")
    (tmp_path / "notes" / "README.md").write_text("The kettle sings.\n")
    words = [f"repo={tmp_path / 'notes'}", "target=src/heat.py", "--task", "auto-explore", "--split", "all", "--json"]
    (best,) = json.loads(shell("eval", "oracle", *words).stdout)["rows"]
    assert best["metrics"]["success"]["value"] == 1.0 and best["metrics"]["cost"]["value"] == 3 - 15


def test_mistakes_are_sentences():
    for words, said in [
        (["http://127.0.0.1:9", "--task", "taxi", "--header", "x"], "--header 'x': expected NAME=VALUE"),
        (["http://127.0.0.1:9", "--task", "taxi", "--key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY is not set"),
        (["http://127.0.0.1:9"], "which task?"),
        (["oracle", "--task", "arith"], "does not know its best action"),
    ]:
        done = shell("eval", *words, "--n", "2")
        assert said in done.stderr + done.stdout, (words, done.output)
