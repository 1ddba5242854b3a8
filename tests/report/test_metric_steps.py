"""A line of metrics.jsonl whose step is none is named where the steps are needed; the report leaves it
out."""

import pytest
from report_runs import make_run
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.errors import DataError
from trailmark.runs.store import Run, read_metrics, truncate_metrics

BAD = {
    "huge": "1000000000000",
    "beyond 64 bits": "1" + "0" * 30,
    "thousands of digits": "1" * 5000,
    "negative": "-1",
    "fractional": "1.5",
    "not finite": "1e400",
    "NaN": "NaN",
    "text": '"2"',
    "a truth value": "true",
    "null": "null",
    "a list": "[2]",
}
LINE = '{{"step":{},"reward":0.5}}\n'


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("steps") / "run"
    make_run(path, steps=4, done=2, checkpoint=False)
    return path


@pytest.mark.parametrize("file", ["metrics", "timings"])
@pytest.mark.parametrize("step", [*BAD.values(), None], ids=[*BAD, "none"])
def test_a_step_that_is_no_step_is_a_sentence_with_file_and_line(run, tmp_path, file, step):
    path, other = run / f"{file}.jsonl", run / ("timings.jsonl" if file == "metrics" else "metrics.jsonl")
    good, beside = path.read_bytes(), other.read_bytes()
    path.write_bytes(good + (LINE.format(step) if step is not None else '{"reward":0.5}\n').encode())
    try:
        words = ["curves", run, "--metrics", "reward", "--out", tmp_path / "c.png"]
        if file == "metrics":
            done = CliRunner().invoke(app, [*map(str, words)])
            assert done.exit_code == 2 and f"{path}:3: " in done.stderr and "bug" not in done.stderr
            assert len(done.stderr) < 400 and not (tmp_path / "c.png").exists()
        for use in (lambda: read_metrics(path), lambda: truncate_metrics(Run.open(run), 1)):
            with pytest.raises(DataError, match=rf"{file}.jsonl:3: ") as said:
                use()
            assert len(str(said.value)) < 400
        plots = "--plots" if step == BAD["huge"] else "--no-plots"  # they are drawn of the same lines, in a second
        done = CliRunner().invoke(app, ["report", str(run), "--out", str(tmp_path / "r.html"), plots])
        assert done.exit_code == 0, done.stderr
        assert f"{file}.jsonl" in (tmp_path / "r.html").read_text("utf-8")  # a warning counts the line
    finally:
        assert path.read_bytes().startswith(good) and other.read_bytes() == beside
        path.write_bytes(good)


def test_verify_says_which_line(run):
    path = run / "metrics.jsonl"
    good = path.read_bytes()
    path.write_bytes(good + LINE.format(10**12).encode())
    try:
        done = CliRunner().invoke(app, ["verify", str(run)])
        assert done.exit_code == 1 and "must be a whole number from 0 to" in " ".join(done.stdout.split())
    finally:
        path.write_bytes(good)
