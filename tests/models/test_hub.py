"""A name on the hub: an existing model is downloaded, a missing one is asked for once, and the hub's errors are passed
on."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading

import pytest

from trailmark.config import ModelConfig, ModelShape
from trailmark.models.load import load_model

TINY = ModelConfig(name="tiny", shape=ModelShape(layers=1, width=32, heads=2, context=64))
COMMIT = "0" * 40
# Each line of names is asked for in a process of its own, which knows nothing of the lines before.
LOAD = """
import os, sys
from trailmark.config import ModelConfig
from trailmark.errors import ModelError
from trailmark.models.load import load_model
for line in sys.stdin:
    if os.fork():
        print(os.wait()[1], flush=True)
        continue
    for name in line.split():
        try:
            print(load_model(ModelConfig(name=name)).fingerprint())
        except ModelError as problem:
            print(problem)
    sys.stdout.flush()
    os._exit(0)
"""


@pytest.fixture
def hub(tmp_path):
    """One model, `me/tiny`; `me/gated` is forbidden; everything else is not found."""
    lm = load_model(TINY)
    lm.model.save_pretrained(tmp_path / "model")
    lm.tokenizer.save_pretrained(tmp_path / "model")

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            words = self.path.removeprefix("/api/models").split(
                "/"
            )  # /me/tiny/revision/main, /me/tiny/resolve/COMMIT/FILE
            name, found = "/".join(words[1:3]), tmp_path / "model" / words[-1]
            if name == "me/gated":
                self.say(403, {"X-Error-Code": "GatedRepo"})
            elif name != "me/tiny":
                self.say(404, {"X-Error-Code": "RepoNotFound"})
            elif words[3] == "revision":
                self.say(200, {}, json.dumps({"id": "me/tiny", "sha": COMMIT}).encode())
            elif words[3] == "resolve" and found.is_file():
                body = found.read_bytes()
                self.say(200, {"ETag": f'"{hashlib.sha256(body).hexdigest()}"'}, body)
            else:
                self.say(404, {"X-Error-Code": "EntryNotFound"})

        do_GET = do_HEAD

        def say(self, status, headers, body=b""):
            self.send_response(status)
            for key, value in {**headers, "X-Repo-Commit": COMMIT, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    server.fingerprint = lm.fingerprint()
    yield server
    server.server_close()


def start(hub, home):
    env = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    env["HF_ENDPOINT"] = f"http://127.0.0.1:{hub.server_port}"
    ends = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, "-c", LOAD], env=env, text=True, **ends)


def ask(process, *names):
    process.stdin.write(" ".join(names) + "\n")
    process.stdin.flush()
    said = [process.stdout.readline().rstrip("\n") for _ in names]
    assert process.stdout.readline() == "0\n", process.stderr.read()
    return said


def test_a_hub_that_answers_and_one_that_is_gone(hub, tmp_path):
    process = start(hub, tmp_path / "home")
    loaded, gated, absent = ask(process, "me/tiny", "me/gated", "me/absent")
    assert loaded == hub.fingerprint
    assert "'me/gated'" in gated and "gated repo. Make sure to have access to it at" in gated
    assert "'me/absent'" in absent and "not a valid model identifier" in absent and "hf auth login" in absent

    hub.shutdown()
    hub.server_close()
    cached, absent = ask(process, "me/tiny", "me/absent")
    noise = process.communicate()[1]
    assert cached == hub.fingerprint
    assert "neither a local folder nor reachable on the hub (We couldn't connect to 'http://127.0.0.1" in absent
    assert "Retrying" not in noise and "thrown while requesting" not in noise
