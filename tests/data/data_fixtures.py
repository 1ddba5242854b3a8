"""Two small packages, and a teacher behind a real socket that gives scripted answers and counts requests."""

import contextlib
import json
import socket
import struct
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

KETTLE = {
    "README.md": (
        "# Kettle\n\nA kettle warms water until it sings, and then it switches itself off again.\n\n"
        "- a list is not prose\n\n```\nCode in a fence is not prose either, however long it may be.\n```\n\n"
        "Fill it at the tap before the first use, and rinse it twice with fresh water.\n"
    ),
    "LICENSE.txt": "Do with it as you please, and let others do the same.\n",
    "decision.py": '"""Choices."""\n\n\ndef pick(cups):\n    """Choose the cup that has been waiting longest on the '
    'shelf."""\n'
    "    best = None\n    for cup in cups:\n        if best is None or cup.waited > best.waited:\n            best "
    "= cup\n"
    "    return best\n\n\ndef second(cups):\n    return sorted(cups)[1]\n",
    "src/kettle/__init__.py": '"""The package of the kettle, with what others may use of it."""\n',
    "src/kettle/boil.py": '"""Heat."""\n\n\ndef boil(litres, power):\n    """Seconds until so much water is as hot '
    'as it can get."""\n'
    "    return litres * 4186 * 80 / power\n\n\nclass Whistle:\n"
    '    """The sound that is made when steam leaves through a narrow hole."""\n\n    def blow(self):\n'
    '        """Blow until the lid is opened by a careful hand."""\n        return "fiii"\n',
    "src/kettle/pour.py": '"""Out."""\n\n\ndef pour(cup, millilitres):\n    """Tilt slowly, so that nothing is '
    'spilled on the table cloth."""\n'
    "    cup.level += millilitres\n    return cup\n\n\ndef drain(cup):\n"
    '    """Empty a vessel into the sink and leave it to dry."""\n    cup.level = 0\n    return cup\n',
    "src/kettle/taps.csv": "tap,flow\n" + "".join(f"kitchen {i},{i * 3 + 1}\n" for i in range(60)),
    "tests/test_boil.py": "def test_nothing():\n    assert 1 + 1 == 2\n" * 8,
}
GARDEN = {
    "guide/soil.rst": "Soil\n====\n\nLoam holds water for a day, sand lets it go within the hour.\n\n.. note:: "
    "Directives are left out.\n\n"
    "Dig in compost every autumn, and let the frost do the rest of the work.\n\nClay is heavy, and cold in spring, "
    "and it cracks in summer.\n",
    "guide/paths.rst": "Paths\n=====\n\nGravel keeps feet dry, and grass between the stones keeps it in its place.\n\n"
    "A path should be wide enough for two people who carry a basket.\n\nLeave room for the wheelbarrow, and for the "
    "cat that sleeps there.\n",
    "beds.py": '"""Beds."""\n\n\nclass Bed:\n    """A long piece of ground in which one kind of plant is grown each '
    'year."""\n\n'
    "    def __init__(self, plant):\n        self.plant = plant\n\n    def turn(self):\n"
    '        """Loosen the ground with a fork before the first sowing in spring."""\n        return self.plant\n',
}


def packages(folder):
    """kettle and garden as folders; their paths."""
    for name, files in (("kettle", KETTLE), ("garden", GARDEN)):
        write_tree(folder / name, files)
    return [folder / "kettle", folder / "garden"]


def write_tree(root, files):
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(text if isinstance(text, bytes) else text.encode())


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def tree(root, but=()):
    """All files under a folder with their bytes."""
    files = sorted(p for p in root.rglob("*") if p.is_file() and p.name not in but)
    return {str(p.relative_to(root)): p.read_bytes() for p in files}


def script(messages):
    """A teacher: one question for each file, a plain thought, and the first file it can point out."""
    last = messages[-1]["content"]
    if "QUERY1" in last:
        name = last.split("'")[3]
        return f"It holds things.\n**QUERY1**: What is told by part {len(name)} of it?\nANSWER1: All of\n{name}."
    if "Answer with its label" in last:
        listed = [line.split(". ", 1) for line in last.splitlines() if ". " in line]
        found = [x for x, command in listed if command.startswith("id ")] or [
            x for x, command in listed if command.startswith("cd ")
        ]
        return f"Action: {found[0]}"
    return "Nothing is known yet; a look at the first file comes next."


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.guard:
            self.server.asked.append((self.path, dict(self.headers), body))
            fault = self.server.faults.pop(0) if self.server.faults else self.server.always
        if fault == "closed":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
            return
        if fault == "slow":
            time.sleep(self.server.wait)
        text = {"empty": " ", "nonsense": "blub 999 blub"}.get(fault) or self.server.script(body["messages"])
        answer = json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()
        answer = {"garbage": b"<html>busy</html>", "hollow": b'{"choices": []}'}.get(fault, answer)
        self.send_response(fault if isinstance(fault, int) else 200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(answer)

    def log_message(self, *args):
        pass


class Teaching(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, script=script):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.faults, self.always, self.wait = script, [], "fine", 0.5
        self.asked, self.guard = [], threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address):
        pass


@contextlib.contextmanager
def teaching(script=script):
    server = Teaching(script)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


if __name__ == "__main__":  # python tests/data/data_fixtures.py FOLDER
    packages(Path(sys.argv[1]))
