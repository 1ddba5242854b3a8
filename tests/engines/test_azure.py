"""Addresses of Azure (a deployment's path, `api-version` after "?", the key as `api-key`) for everything that takes the
address of a server. The test server refuses everything else, like Azure."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.config import ServerConfig
from trailmark.engines.http import EngineStatus, HttpEngine
from trailmark.engines.http_client import address
from trailmark.score.values import HttpValues, Line
from trailmark.seats.open import connect

PATH, VERSION = "/openai/deployments/gpt-4/chat/completions", "2024-10-21"


@pytest.fixture
def azure():
    """The address of a deployment that wants path, version and key exactly so, and what it refused."""
    refused = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            refused.append(self.path)
            self.answer(404, {"error": {"code": "404", "message": "Resource not found"}})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            at = urlsplit(self.path)
            if (at.path, parse_qs(at.query)) != (PATH, {"api-version": [VERSION]}):
                refused.append(self.path)
                return self.answer(404, {"error": {"code": "404", "message": "Resource not found"}})
            if self.headers["api-key"] != "secret" or "Authorization" in self.headers:
                refused.append(dict(self.headers))
                return self.answer(401, {"error": {"code": "401", "message": "Access denied"}})
            text = f"Where am I? Action: {len(body['messages']) % 4}"
            said = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            self.answer(200, {"choices": [said]})

        def answer(self, status, content):
            sent = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", refused
    server.shutdown()
    server.server_close()
    thread.join()


FORMS = {
    "the deployment, with its version": (f"/openai/deployments/gpt-4?api-version={VERSION}", []),
    "the deployment and a slash": (f"/openai/deployments/gpt-4/?api-version={VERSION}", []),
    "the whole endpoint": (f"{PATH}?api-version={VERSION}", []),
    "the version as an option": ("/openai/deployments/gpt-4", ["--query", f"api-version={VERSION}"]),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("key", [["--key-env", "AZURE_KEY"], ["--header", "api-key=env:AZURE_KEY"]])
def test_eval_of_a_deployment(azure, monkeypatch, form, key):
    url, refused = azure
    end, more = FORMS[form]
    monkeypatch.setenv("AZURE_KEY", "secret")
    words = ["mode=pickup", "history=none", "--task", "taxi", "--n", "2", "--served", "gpt-4", "--json", *more, *key]
    done = CliRunner().invoke(app, ["eval", url + end, *words])
    assert done.exit_code == 0 and not refused, done.output
    result = json.loads(done.stdout)
    assert result["rows"][0]["scored"] == 2 and result["guessed"] == 0


@pytest.mark.parametrize(
    ("end", "more"),
    [("/openai/deployments/gpt-4", ["--api-version", VERSION]),
    (f"/openai/deployments/gpt-4?api-version={VERSION}", []),
     (f"{PATH}?api-version={VERSION}", [])],
)  # fmt: skip
def test_a_deployment_as_teacher(azure, tmp_path, end, more):
    url, refused = azure
    words = ["--starts", "1", "--perturb", "0", "--model", "gpt-4", "--api-key", "secret", "--retries", "0", *more]
    done = CliRunner().invoke(app, ["data", "taxi", "--out", str(tmp_path / "out"), "--teacher", url + end, *words])
    assert done.exit_code == 0 and not refused, done.output
    assert "Where am I?" in (tmp_path / "out" / "answers.jsonl").read_text()


def test_a_deployment_in_a_recipe_and_a_wrong_key(azure, monkeypatch):
    url, refused = azure
    monkeypatch.setenv("AZURE_KEY", "secret")
    base = f"{url}/openai/deployments/gpt-4?api-version={VERSION}"
    engine = connect(ServerConfig(address=base, model="gpt-4", api_key_env="AZURE_KEY"))
    said = [{"role": "user", "content": "hi"}]
    assert asyncio.run(engine.chat(said))[0].text == "Where am I? Action: 1" and not refused
    with pytest.raises(EngineStatus, match="answered 401: Access denied"):
        asyncio.run(HttpEngine(base, "gpt-4", api_key="wrong").chat(said))


def test_whose_key_is_sent_how():
    assert address("https://x.openai.azure.com/openai/v1").key("k") == {"api-key": "k"}
    assert address("https://x.openai.azure.com/openai/v1").base == "https://x.openai.azure.com/openai"
    assert address("https://h/v1?api-version=preview").key("k") == {"api-key": "k"}
    assert address("https://api.openai.com/v1").key("k") == {"Authorization": "Bearer k"}
    assert address("https://h/v1").key(None) == {}


def test_a_query_behind_the_address_of_values(azure):
    url, refused = azure
    with pytest.raises(EngineStatus, match="404"):
        asyncio.run(HttpValues(f"{url}/v1?team=a").score([Line((1,), (2,))]))
    assert refused == ["/v1/values?team=a"]
