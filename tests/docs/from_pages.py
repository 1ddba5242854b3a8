"""What the tests of the pages in docs/from share: the commands and the tables of a page, and what is checked alike on
all of them."""

import contextlib
import json
import re
import runpy
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.evaluate.study import find_study, load_study
from trailmark.methods.vrcli.pair_judge import DIMENSIONS

ROOT = Path(__file__).parents[2]


def commands(page):
    """The lines of its blocks of shell commands."""
    blocks = re.findall(r"```sh\n(.*?)```", page, re.S)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def table(page, heading):
    """The rows of the table under a heading, without its head."""
    part = page.split(f"## {heading}")[1].split("\n## ")[0]
    return [line for line in part.splitlines() if line.startswith("| ")][1:]


def first_cell(line):
    return line.split("|")[1].strip()[:40]


def keys_of(line):
    """The keys that a row (theirs, ours, note) names in the cell of ours, and those in its note. A row names one, or
    says that there is none."""
    flag, ours, note = (cell.strip() for cell in line.strip("|").split("|"))
    keys = re.findall(r"`([\w.]+=[^`]+)`", f"{ours} {note}")
    assert keys or ours == "—", flag
    return [k for k in keys if k in ours], [k for k in keys if k not in ours]


def value_at(config, name):
    for part in name.split("."):
        config = getattr(config, part)
    return config


def shell(*words):
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, f"{words}: {done.output}"
    return done.output


def own_questions(folder):
    """The files of the page's own questions for LPR, in this folder, the current one; its section."""
    section = (ROOT / "docs/lpr.md").read_text().split("## Questions of your own")[1].split("\n## ")[0]
    for text, name in re.findall(r"^```\w+\n(# (my.*?\.\w+).*?)^```$", section, re.S | re.M):
        (folder / name).write_text(text)
    runpy.run_path(str(folder / "my_questions.py"))
    return section


def load_the_study(words):
    """`trailmark study NAME` as far as it costs nothing: the study is there, and claims something."""
    assert load_study(find_study(words[1]))[2]


def serve_up_to_the_port(words):
    """`trailmark serve … --port N` does all that comes before listening, and then finds the port taken."""
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        at = words.index("--port") + 1
        done = CliRunner().invoke(app, [*words[:at], port, *words[at + 1 :]])
    assert done.exit_code == 2 and f"cannot listen on 127.0.0.1:{port}" in done.output


@contextlib.contextmanager
def answering(reply):
    """A stand-in for a server that speaks OpenAI's chat: `reply(text of the first message)` is its answer."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def send(self, body):
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            self.send({"object": "list", "data": [{"id": "wise", "owned_by": "others"}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            said = {"role": "assistant", "content": reply(body["messages"][0]["content"])}
            self.send({"choices": [{"index": 0, "message": said, "finish_reason": "stop"}]})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def prefers_more_words(text):
    """A judge of `trailmark judge` that likes the text with more words, in every dimension."""
    name = re.findall(r'"id": "(\w+)"', text)[-1]
    a, b = re.search(r"Answer A:\n(.*)\n\nAnswer B:\n(.*?)\n\nReply with", text, re.S).groups()
    size = len(a.split()) - len(b.split())
    return json.dumps({"id": name, **dict.fromkeys(DIMENSIONS, "A" if size > 0 else "B" if size < 0 else "tie")})
