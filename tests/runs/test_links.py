"""Nothing in a run's folder is written through a link, wherever it leads."""

import pytest
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.errors import RunError
from trailmark.runs.store import Run

SFT = """
method: sft
out: run
data: rows.jsonl
steps: 4
batch: 2
checkpoint: {every: 1, keep_last: 9}
model: {name: tiny, shape: {layers: 1, width: 16, heads: 2, context: 64}}
"""


def call(*words):
    done = CliRunner().invoke(app, list(words))
    assert "Traceback" not in done.output + done.stderr, done.output + done.stderr
    return done


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n' * 3)
    (tmp_path / "sft.yaml").write_text(SFT)
    (tmp_path / "target").mkdir()
    (tmp_path / "mine.txt").write_text("mine")
    assert call("train", "sft.yaml").exit_code == 0
    return tmp_path


LINKED = [".lock", "metrics.jsonl", "timings.jsonl", "episodes", "checkpoints", "annotations", "stages", "evaluation"]


@pytest.mark.parametrize("name", LINKED)
def test_a_run_does_not_go_on_through_a_link(folder, name):
    place = folder / "run" / name
    there = folder / "moved"
    if place.exists():
        place.rename(there)
    else:
        there.mkdir()
    place.symlink_to(there)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    done = call("train", "sft.yaml", "steps=5", "--resume")
    assert done.exit_code == 2 and f"run/{name} is a link" in done.stderr, done.stderr
    assert before == {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_lock_that_is_a_link_does_not_empty_a_file(folder):
    lock = folder / "run" / ".lock"
    lock.unlink()
    lock.symlink_to(folder / "mine.txt")
    assert call("prune", "run").exit_code == 2
    assert call("report", "run", "--no-plots").exit_code == 0
    assert (folder / "mine.txt").read_text() == "mine"


def test_plots_are_not_drawn_through_a_link(folder, monkeypatch):
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, file, **_: file.write(b"drawn"))
    (folder / "run" / "plots").symlink_to(folder / "target")
    done = call("report", "run")
    assert done.exit_code == 2 and "run/plots is a link" in done.stderr and not list((folder / "target").iterdir())
    (folder / "run" / "plots").unlink()
    (folder / "run" / "plots").mkdir()
    (folder / "run/report.html").unlink()
    for name in ("plots/loss.png", "plots/all.png", "report.html", "verify.json"):
        (folder / "run" / name).symlink_to(folder / "mine.txt")
    assert call("report", "run").exit_code == 0 and call("verify", "run").exit_code in (0, 1)
    assert (folder / "mine.txt").read_text() == "mine"
    assert not (folder / "run/plots/all.png").is_symlink()


def test_a_metrics_file_that_became_a_link_is_not_appended_to(folder):
    run = Run.open("run", lock=True)
    (folder / "run/metrics.jsonl").unlink()
    (folder / "run/metrics.jsonl").symlink_to(folder / "mine.txt")
    with run, pytest.raises(RunError, match="is a link"):
        run.log(5, {"loss": 1.0})
    assert (folder / "mine.txt").read_text() == "mine"


def test_prune_of_a_checkpoint_that_is_a_link_deletes_the_link_alone(folder):
    first = folder / "run/checkpoints/000001"
    first.rename(folder / "kept")
    first.symlink_to(folder / "kept")
    assert call("prune", "run").exit_code == 0
    assert [p.name for p in (folder / "run/checkpoints").iterdir()] == ["000004"]
    assert (folder / "kept/state.json").is_file()
