"""`trailmark quickstart --method oreo` with runs of one step: its rows and its files."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.methods import quickstart
from trailmark.runs.store import read_segment

SHORT = {
    "sft": ["steps=2", "batch=2", "model.shape.layers=1", "model.shape.width=16", "model.shape.heads=2"],
    "data": ["collect.prompts=2", "collect.n=2", "collect.sampling.max_tokens=4"],
    # none of its own answers is right
    "rejection": ["data=rows.jsonl", "format=trajectories", "steps=1", "batch=1", "eval.n=4"],
    "oreo": ["steps=1", "batch=2", "eval.n=4"],
}


def test_the_quickstart_of_oreo(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quickstart, "further", SHORT.__getitem__)
    monkeypatch.setattr("trailmark.methods.oreo.quickstart.SUMS", 20)
    Path("rows.jsonl").write_text('{"prompt": "1+1?\\n", "response": "2", "reward": 1}\n')
    done = CliRunner().invoke(app, ["quickstart", "--method", "oreo", "--out", "q"])
    assert done.exit_code == 0, done.output
    assert "Read next: docs/oreo.md" in done.output
    assert "It does not show which is better" in " ".join(done.output.split())
    result = json.loads(Path("q/quickstart.json").read_text())
    names = ["SFT", "rejection sampling", "OREO", "OREO, beam of 3 at temperature 1"]
    assert [r["name"] for r in result["rows"]] == names == list(result["files"])
    for row in result["rows"]:
        found = read_segment(Path(result["files"][row["name"]]))
        assert len(found) == row["episodes"] == 4
        right = sum(bool(e.outcome.success) for e in found) / 4
        assert row["metrics"]["success"]["value"] == pytest.approx(right)
    assert len(Path("q/arith.jsonl").read_text().splitlines()) == 20
    assert Path(result["report"]).read_text().startswith("<!")
