"""Wrong counts, shares, splits and output paths are refused before any work."""

import os
from pathlib import Path

import pytest
from data_fixtures import packages
from typer.testing import CliRunner

from trailmark.commands.app import app


def refused(*words):
    done = CliRunner().invoke(app, ["data", *map(str, words)])
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output and "bug of trailmark" not in done.output
    return done.output


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("n", ["-4", "0", "1e3", "nan", "999999999999"])
def test_gold_of_no_rows_is_refused_and_nothing_is_written(here, n):
    said = refused("gold", "arith", "a.jsonl", "level=1", "--n", n)
    assert "--n" in said and list(here.iterdir()) == []


COUNTS = {
    "auto-explore": ["--files", "--per-file", "--horizon", "--at-once"],
    "taxi": ["--starts", "--at-once"],
    "alfworld": ["--starts", "--at-once"],
    "sft": ["--horizon"],
    "experts": ["--n"],
}


@pytest.mark.parametrize(("command", "option"), [(c, o) for c, options in COUNTS.items() for o in options])
def test_counts(here, command, option):
    first = {
        "auto-explore": ["repo"],
        "sft": ["in.jsonl", "out", "--repos", "repos"],
        "experts": ["in.json", "out.jsonl"],
    }
    for value in ("0", "-1", "nan", "99999999999999"):
        assert option in refused(command, *first.get(command, []), option, value)
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(("option", "values"), [
    ("--perturb", ["-0.1", "1.1", "nan", "inf"]), ("--temperature", ["-1", "nan", "inf", "1e9"]),
    ("--top-p", ["0", "1.5", "nan"]),
    ("--deadline", ["0", "-1", "nan", "inf"]), ("--retries", ["-1", "10000000"]),
])  # fmt: skip
def test_shares_and_times(here, option, values):
    for value in values:
        assert option in refused("taxi", option, value)
    assert list(here.iterdir()) == []


def test_a_split_that_nobody_gave_is_refused_before_any_work(here):
    packages(here)
    said = refused("auto-explore", "kettle", "--split", "given", "--out", "out")
    assert "--split given needs --tasks" in said and not Path("out").exists()
    Path("tasks.jsonl").write_text('{"repo": "kettle", "query": "Where?", "target": "README.md"}\n')
    said = refused("auto-explore", "kettle", "--tasks", "tasks.jsonl", "--split", "given", "--out", "out")
    assert "says split ''" in said and not Path("out").exists()
    Path("tasks.jsonl").write_text('{"repo": "kettle", "query": "Where?", "target": "README.md", "split": "test"}\n')
    said = refused("auto-explore", "kettle", "--tasks", "tasks.jsonl", "--split", "given", "--out", "out")
    assert "tasks.jsonl: has no record of split train" in said and not Path("out").exists()


def test_a_split_without_train_is_found_before_the_walks(here):
    packages(here)
    done = None
    for seed in range(40):  # one question falls into train with 7 of 10 seeds
        words = ["auto-explore", "garden", "--files", "1", "--per-file", "1", "--seed", seed, "--out", f"out{seed}"]
        done = CliRunner().invoke(app, ["data", *map(str, words)])
        if done.exit_code:
            break
    assert done is not None and done.exit_code == 2 and "records falls into train" in done.output
    assert not Path(f"out{seed}/trajectories.jsonl").exists()


def written(place):
    """Every command that writes one file or folder, with the place it is to write to; their inputs are not there."""
    yield ["gold", "arith", place, "level=1"]
    yield ["experts", "in.json", place]
    yield ["rollouts", "in", "--out", place]
    yield ["records", "in.jsonl", place]
    yield ["sft", "in.jsonl", place, "--repos", "repos"]


def test_a_place_that_is_taken_is_found_first(here):
    Path("file").write_text("mine")
    Path("folder").mkdir()
    for place, why in (("file", "exists"), ("folder", "folder"), ("file/below", "file is not a folder")):
        for words in written(place):
            assert why in refused(*words), words
    for words in (["taxi"], ["auto-explore", "folder"]):
        assert "not a folder" in refused(*words, "--out", "file/below"), words
    assert Path("file").read_text() == "mine" and list(Path("folder").iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_to(here):
    Path("closed").mkdir(mode=0o500)
    for words in written("closed/out"):
        assert "does not allow it" in refused(*words), words
