"""A stand-in for the hub that takes uploads, for `trailmark convert --push`."""

import base64
import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

MADE, FILES = {}, {}  # repositories and files of the stand-in


class Hub(BaseHTTPRequestHandler):
    """A stand-in for the hub: it makes repositories and takes commits. A repository called 'closed' is refused."""

    def log_message(self, *_):
        pass

    def answer(self, value, status=200):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer({"error": "There is no such repository."}, 404)

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            if asked["name"] == "closed":
                return self.answer({"error": "You may not write here."}, 403)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            MADE[name] = asked
            return self.answer({"url": f"http://{self.headers['Host']}/{name}", "id": name, "name": name})
        if "/preupload/" in self.path:
            asked = json.loads(body)["files"]
            listed = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in asked]
            return self.answer({"files": listed})
        if "/commit/" in self.path:
            for line in map(json.loads, body.decode().splitlines()):
                if line["key"] == "file":
                    FILES[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            url = f"http://{self.headers['Host']}/{'/'.join(self.path.split('/')[3:5])}/commit/1"
            return self.answer({"success": True, "commitOid": "1" * 40, "commitUrl": url, "hookOutput": ""})
        self.answer({"error": self.path}, 404)


@contextlib.contextmanager
def hub_at():
    """The address of the stand-in. The hub's library talks to it in this time."""
    from huggingface_hub import constants

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    MADE.clear(), FILES.clear()
    url = f"http://127.0.0.1:{server.server_port}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", url)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setenv("HF_TOKEN", "hf_standin")
        try:
            yield url
        finally:
            server.shutdown()
            server.server_close()
