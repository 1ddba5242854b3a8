"""A stand-in for a judge's server: it speaks OpenAI's chat, answers by a rule, and remembers what it was asked."""

import contextlib
import json
import re
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from trailmark.methods.vrcli.pairs import CRITERIA, compare_pair
from trailmark.run_async import wait
from trailmark.score.base import Play
from trailmark.score.config import ModelJudgeConfig
from trailmark.score.judge import ModelJudge
from trailmark.types import Episode, Invalid, Task


def plays(n):
    made = []
    for k in range(n):
        e = Episode(f"e{k}", Task(f"t{k}"), "g", (), {"self": Invalid("")})
        made.append(Play(e, f"Question {k}?", f"answer <{k}> {{answer}}", {"gold": str(k)}))
    return made


def judge_at(url, cache=None, **more):
    server = {"address": url, "model": "wise", "retries": 2, "backoff": 0.01, "deadline": 10}
    return ModelJudge(ModelJudgeConfig.model_validate({"server": server, **more}), cache=cache)


def number(messages):
    """Which play a conversation is about, and how often it was asked already."""
    return int(re.search(r"answer <(\d+)>", messages[0]["content"]).group(1)), len(messages) // 2


def name(messages):
    return re.findall(r'"id": "(\w+)"', messages[0]["content"])[-1]


@contextlib.contextmanager
def serving_judge(answer):
    """`answer(messages)` gives the reply: a text, or a number that is the status of a refusal. Yields the address and a
    Counter of (play, time asked)."""
    asked, lock = Counter(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def send(self, status, body):
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            with contextlib.suppress(OSError):  # who asked was killed
                self.end_headers()
                self.wfile.write(data)

        def do_GET(self):
            self.send(200, {"object": "list", "data": [{"id": "wise", "owned_by": "others"}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                asked[number(body["messages"])] += 1
            reply = answer(body["messages"])
            if isinstance(reply, int):
                return self.send(reply, {"error": {"message": "no"}})
            said = {"role": "assistant", "content": reply}
            self.send(200, {"choices": [{"index": 0, "message": said, "finish_reason": "stop"}]})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()


def compared(judge, pairs, criteria=CRITERIA):
    """What the judge says of each pair (prompt, first answer, second answer)."""
    return [wait(compare_pair(judge, *pair, criteria)) for pair in pairs]
