"""Data sets by name, as LLaMA-Factory's dataset_info.json lists them."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from trailmark.errors import DataError
from trailmark.formats.dataset_info import find_sets, names_in, read_info
from trailmark.formats.speakers import TAGS, Tags

OURS = {"file_name": "a.json", "formatting": "sharegpt"}


def folder(tmp_path, **sets):
    (tmp_path / "dataset_info.json").write_text(json.dumps(sets))
    (tmp_path / "a.json").write_text("[]")
    return tmp_path


def test_names_files_and_tags(tmp_path):
    other = {**OURS, "columns": {"messages": "talk"}, "tags": {"role_tag": "role", "assistant_tag": "model"}}
    place = folder(tmp_path, one=OURS, two=other)
    one, two = find_sets("one, two", place)
    assert (one.name, one.files, one.tags) == ("one", (place / "a.json",), TAGS)
    assert two.tags == Tags(messages="talk", role="role", assistant="model")  # the others keep their defaults
    assert two.tags.roles["human"] == "user" and two.tags.roles["model"] == "assistant"


def test_a_folder_in_the_place_of_a_hub(tmp_path):
    (tmp_path / "mirror").mkdir()
    for name in ("b.jsonl", "a.json", "notes.txt"):
        (tmp_path / "mirror" / name).write_text("")
    place = folder(tmp_path, rl={"hf_hub_url": "mirror", "formatting": "sharegpt"})
    assert [p.name for p in find_sets("rl", place)[0].files] == ["a.json", "b.jsonl"]


@pytest.mark.parametrize("listed", ["a,", ",a", "a,,b", "", " "])
def test_a_name_is_missing_at_a_comma(listed):
    with pytest.raises(DataError, match="a name is missing at a comma: write NAME or NAME,NAME"):
        names_in(listed)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"file_name": "a.json"}, "key 'x.formatting': is 'alpaca', and only sharegpt is read"),
        ({"formatting": "sharegpt"}, "key 'x.file_name': is missing"),
        ({**OURS, "file_name": "b.json"}, "key 'x.file_name': there is no file"),
        ({**OURS, "num_samples": 5}, "key 'x.num_samples': is not read here"),
        ({**OURS, "columns": {"system": "s"}}, "key 'x.columns.system': is not read here"),
        ({**OURS, "columns": {"mesages": "s"}}, "key 'x.columns.mesages': is not known. Did you mean 'messages'?"),
        ({**OURS, "tags": {"user_tags": "s"}}, "key 'x.tags.user_tags': is not known. Did you mean 'user_tag'?"),
        ({**OURS, "tags": {"user_tag": "gpt"}}, "two speakers are called 'gpt'"),
        ({**OURS, "tags": {"user_tag": 3}}, "key 'x.tags.user_tag': must be a text, not 3"),
        ([], "key 'x': must be an object"),
    ],
)
def test_a_mistake_names_its_key(tmp_path, entry, says):
    with pytest.raises(DataError) as error:
        find_sets("x", folder(tmp_path, x=entry))
    assert says in str(error.value)


def test_unknown_names_and_damaged_lists(tmp_path):
    with pytest.raises(DataError, match="there is no data set 'on'. Did you mean 'one'"):
        find_sets("on", folder(tmp_path, one=OURS))
    with pytest.raises(DataError, match="names 'one' twice"):
        find_sets("one,one", tmp_path)
    with pytest.raises(DataError, match="it lists the data sets"):
        read_info(tmp_path / "gone" / "dataset_info.json")
    (tmp_path / "dataset_info.json").write_text('{\n "a": {"file_name": "a.json"},\n}\n')
    with pytest.raises(DataError) as error:
        find_sets("a", tmp_path)
    said = str(error.value)
    assert said.startswith(f"{tmp_path}/dataset_info.json:") and "comma behind the last entry?" in said


MIRROR = """
import sys
from trailmark.formats.dataset_info import find_sets
(found,) = find_sets("rl", sys.argv[1])
print([p.name for p in found.files], found.files[0].read_text())
"""


def test_a_data_set_of_a_mirror_of_the_hub(tmp_path):
    """A local server in the place of the hub; the process has no other way out."""
    body, sha, asked = b'[{"conversations": []}]', "a" * 40, []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            names = ("rl.json", "big.bin")
            about = {"id": "team/rl-data", "sha": sha, "siblings": [{"rfilename": n} for n in names]}
            tree = [{"type": "file", "path": n, "size": len(body), "oid": "b"} for n in names]
            if self.path.startswith("/api/datasets/team/rl-data"):
                sent, more = json.dumps(tree if "/tree/" in self.path else about).encode(), {}
            elif not self.path.startswith("/datasets/team/rl-data/resolve/"):
                return self.send_error(404)
            else:
                sent, more = body, {"ETag": '"b"', "X-Repo-Commit": sha}
            self.send_response(200)
            for key, value in {"Content-Length": str(len(sent)), **more}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(sent)

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    place = folder(tmp_path, rl={"hf_hub_url": "team/rl-data", "formatting": "sharegpt"})
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        own = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "home")}
        own |= {"HF_HUB_OFFLINE": "0"}
        made = subprocess.run([sys.executable, "-c", MIRROR, str(place)], env=os.environ | own, capture_output=True,
                              text=True, timeout=120)  # fmt: skip
    finally:
        server.shutdown()
        server.server_close()
    assert made.stdout == f"['rl.json'] {body.decode()}\n", made.stderr
    assert not [path for path in asked if "big.bin" in path]
