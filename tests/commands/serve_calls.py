"""Calls of `trailmark serve`, for the tests of the command and of the server."""

import os
import sys

from typer.testing import CliRunner

from trailmark.commands.app import app

ENV = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def command(*words):
    return [sys.executable, "-m", "trailmark", "serve", *map(str, words)]


def refused(*words):
    """The one sentence of a server that cannot start."""
    done = CliRunner().invoke(app, ["serve", *map(str, words)])
    assert done.exit_code == 2 and done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
    return done.stderr
