"""A disk that fills while a run works: one sentence, exit code 1, and with room again the run goes on as if nothing
had been."""

import contextlib
import errno
import os
import resource
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.runs.diff import diff_runs

TINY = "model: {name: tiny, shape: {layers: 1, width: 16, heads: 2, context: 64}}\n"
TINY += "engine: {max_num_seqs: 4, max_len: 64}\n"
PLAYED = """
method: policy_gradient
out: OUT
steps: 3
prompts_per_step: 3
n: 4
task: {name: arith, options: {level: 1}}
sampling: {max_tokens: 8}
checkpoint: {every: 1, keep_last: 9}
learner: {optim: {lr: 1e-3}}
"""
ROUNDS = """
method: oreo_rounds
out: OUT
steps: 2
training: 2
batch: 8
task: {name: solved, options: {kind: bandit, form: turns, rewards: [0, 0, 0, 1]}}
collect: {prompts: 2, n: 8, sampling: {max_tokens: 4}}
"""


@contextlib.contextmanager
def files_of_at_most(size):
    """Larger files cannot be written, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def shell(*words):
    done = CliRunner().invoke(app, list(words))
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as m:
        m.chdir(home)
        for name, text in (("played", PLAYED), ("rounds", ROUNDS)):
            Path(f"{name}.yaml").write_text(text + TINY)
            assert shell("train", f"{name}.yaml", f"out=whole-{name}").exit_code == 0
    return home


def goes_on(name, out, full):
    """Fill the disk, then make room."""
    words = ["train", f"{name}.yaml", f"out={out}"]
    with full:
        done = shell(*words)
    said = done.stderr.strip().splitlines()
    assert done.exit_code == 1 and said[-1].startswith("error: cannot write"), done.stderr
    assert "make room" in said[-1] and "--resume" in said[-1]
    done = shell(*words, *["--resume"] * Path(out).exists())
    assert done.exit_code == 0, done.stderr
    assert diff_runs(f"whole-{name}", out) == []


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("played", "episodes/000001.jsonl"), ("played", "checkpoints/000001/state.json"),
        ("played", "checkpoints/000001/policy/model.safetensors"),
        ("played", "checkpoints/000001/optimiser-policy.safetensors"), ("rounds", "episodes/000002.jsonl"),
        ("rounds", "round-1/checkpoints/000002/state.json"),
        ("rounds", "round-1/checkpoints/000002/optimiser-critic.safetensors"),
    ],
)  # fmt: skip
def test_no_room_for_a_large_file(home, monkeypatch, name, file):
    monkeypatch.chdir(home)
    size = Path(f"whole-{name}", file).stat().st_size
    goes_on(name, f"{name}-{file.replace('/', '-')}", files_of_at_most(size - 1))


@contextlib.contextmanager
def room_for(writes):
    """The disk is full after so many writes."""
    left, write = [writes], os.write

    def full(fd, data):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    with pytest.MonkeyPatch.context() as m:
        m.setattr(os, "write", full)
        yield


@pytest.mark.parametrize(("name", "writes"), [(n, k) for n in ("played", "rounds") for k in (1, 3, 4, 6, 7, 9, 12)])
def test_a_disk_that_fills_in_the_middle(home, monkeypatch, name, writes):
    monkeypatch.chdir(home)
    goes_on(name, f"{name}-{writes}", room_for(writes))
