"""A run in a folder that may only be read, and a disk that is full: read, or one sentence that says what to do."""

import errno
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.runs.atomic_files import hold
from trailmark.runs.store import Run

RECIPE = """
method: policy_gradient
out: run
steps: 2
prompts_per_step: 1
n: 2
task: {name: arith, options: {level: 1}}
sampling: {max_tokens: 2}
model: {name: tiny, shape: {layers: 1, width: 16, heads: 2, context: 64}}
engine: {max_num_seqs: 2}
eval: {every: 1, n: 2}
checkpoint: {every: 1}
"""


def shell(*words, code=0):
    done = CliRunner().invoke(app, list(map(str, words)))
    assert done.exit_code == code and "Traceback" not in done.stderr, done.output
    return done


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    home = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as m:
        m.chdir(home)
        Path("r.yaml").write_text(RECIPE)
        shell("train", "r.yaml")
        shutil.copytree("run", "second")
    return home


@pytest.fixture
def frozen(trained, monkeypatch):
    """Everything that writes below the runs fails as on a file system that is mounted read-only: root, who may run
    these tests, is stopped by no permissions."""
    monkeypatch.chdir(trained)
    runs = [str(trained / "run"), str(trained / "second")]

    def refuse(path):
        if str(os.path.abspath(os.fspath(path))).startswith(tuple(runs)):
            raise OSError(errno.EROFS, "Read-only file system", str(path))

    opened = os.open

    def os_open(path, flags, *more, **named):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            refuse(path)
        return opened(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", os_open)
    for name in ("unlink", "mkdir", "rename", "rmdir", "replace"):
        own = getattr(os, name)
        monkeypatch.setattr(os, name, lambda path, *a, own=own, **k: (refuse(path), own(path, *a, **k))[1])
    return trained


def test_it_is_read_by_every_command_that_only_reads(frozen):
    for words in (
        ["inspect", "run"], ["diff", "run", "second"], ["compare", "run", "second"], ["eval", "run", "--n", "1"],
        ["eval", "--episodes", "run"], ["curves", "run", "--out", "c.png", "--metrics", "reward"],
        ["report", "run", "--out", "page.html"], ["plan", "r.yaml", "--no-probe"],
    ):  # fmt: skip
        shell(*words)
    done = CliRunner().invoke(app, ["verify", "run"])
    assert (
        done.exit_code < 2
        and "replay" in done.stdout
        and "the report is not stored: cannot write run/verify.json" in done.stderr
    )


def test_what_must_write_says_that_it_cannot(frozen):
    said = shell("report", "run", code=2).stderr
    assert "cannot write run/report.html: read-only file system. To write it elsewhere: --out FILE." in said
    for words in (["prune", "run"], ["train", "r.yaml", "--resume"], ["train", "r.yaml", "steps=3", "--resume"]):
        said = " ".join(shell(*words, code=2).stderr.split())
        assert "cannot write run/.lock: read-only file system. Copy run to where you may write" in said
    assert "cannot write run/new.png" in shell("curves", "run", "--out", "run/new.png", code=2).stderr
    shutil.copytree("run", "copy")
    shell("train", "r.yaml", "steps=3", "out=copy", "--resume")
    shell("prune", "copy")


def test_a_disk_that_was_full_before_the_start(trained, tmp_path, monkeypatch):
    """No run was made, so nothing is to be resumed, and nothing stays."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(trained / "r.yaml", "r.yaml")

    def full(fd, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(os, "write", full)
        said = shell("train", "r.yaml", code=1).stderr
    assert "the disk is full; make room and give the command again" in said
    assert not (tmp_path / "run").exists()
    shell("train", "r.yaml")


def test_a_refused_run_leaves_no_folder(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(trained / "r.yaml", "r.yaml")
    shell("train", "r.yaml", "task.options.level=99", code=2)
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()  # somebody else's folder stays
    shell("train", "r.yaml", "task.options.level=99", code=2)
    assert (tmp_path / "run").is_dir() and not (tmp_path / "run" / "recipe.yaml").exists()


def test_a_lock_that_is_deleted_while_somebody_waits_for_it(tmp_path, monkeypatch):
    """The waiting process got the deleted file: it must lock the one that others see."""
    import fcntl

    first, once = tmp_path / ".lock", []

    def deleted(fd, how):
        if not once:
            once.append(fd)
            first.unlink()

    monkeypatch.setattr(fcntl, "flock", deleted)
    fd = hold(first, "it")
    assert once and os.fstat(fd).st_ino == first.stat().st_ino
    os.close(fd)


def test_the_run_of_a_refused_creation_can_be_made_again(tmp_path):
    run = Run.create(tmp_path / "run", "method: x\n")
    run.discard_if_empty()
    run.close()
    assert not (tmp_path / "run").exists()
    Run.create(tmp_path / "run", "method: x\n").close()
    assert (tmp_path / "run" / "recipe.yaml").exists()
