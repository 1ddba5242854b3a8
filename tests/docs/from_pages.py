"""What the tests of the pages in docs/from share: the commands and the tables of a page, and what is checked alike on
all of them."""

import re
import socket
from pathlib import Path

from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.evaluate.study import find_study, load_study

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
