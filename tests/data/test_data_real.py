"""A complete data set from two real packages, without a model; and the stored tasks."""

import json
import os
from pathlib import Path

import pytest
from data_fixtures import rows
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.methods.reflect.decisions import FIVE, read_decisions
from trailmark.methods.reflect.explore.explorer import Explorer
from trailmark.methods.reflect.explore.records import read_records

pytestmark = pytest.mark.data


@pytest.fixture(scope="module")
def data():
    if "TRAILMARK_DATA" not in os.environ:
        pytest.skip("TRAILMARK_DATA names no folder")
    return Path(os.environ["TRAILMARK_DATA"]) / "autoexplore"


def make(out, *words):
    done = CliRunner().invoke(app, ["data", "auto-explore", "--out", str(out), *map(str, words)])
    if "is not available" in done.stderr:
        pytest.skip("no index of packages, and they are not in the cache")
    assert done.exit_code == 0, done.output
    return out


def check(out, walks):
    records = {r.key: r for r in read_records(out / "train.jsonl")}
    explorer, decisions = Explorer(out / "repos", out / "train.jsonl"), read_decisions(out)
    assert sum(len(r.walks) for r in records.values()) == walks
    for d in decisions[:: max(1, len(decisions) // 200)]:
        walk = next(w for w in records[d.task].walks if w.info == d.trajectory)
        seeker = explorer.start(records[d.task], [c for _, c in walk.steps[: d.step]])
        assert seeker.seen.state == d.state and seeker.do(d.action) == walk.steps[d.step][1]
    assert len(rows(out / "sft" / "oracle" / f"{FIVE[0]}.jsonl")) == len(decisions)


def test_two_packages(tmp_path, data):
    trees = json.loads((data / "file_trees.json").read_text())
    words = [f"{n}=={trees[n]['version']}#sha256={trees[n]['sha256']}" for n in ("itsdangerous", "pluggy")]
    out = make(tmp_path / "out", *words)
    report = json.loads((out / "reports" / "walks.json").read_text())["kept"]
    assert report["records"] == report["positive walks to the target"] >= 40 and report["negative walks"] >= 60
    check(out, json.loads((out / "reports" / "sft.json").read_text())["kept"]["walks"])


def test_the_stored_tasks(tmp_path, data):
    out = make(tmp_path / "out", "--tasks", data / "tasks_visible_test.jsonl", "--no-filter", "--split", "exact")
    kept = json.loads((out / "reports" / "walks.json").read_text())["kept"]
    assert kept["records"] == kept["positive walks to the target"] == 97
    check(out, json.loads((out / "reports" / "sft.json").read_text())["kept"]["walks"])
