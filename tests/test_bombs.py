"""Files that would grow, never end, or nest without end are refused with one sentence, within seconds."""

import gzip
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trailmark import plain_files
from trailmark.commands.app import app
from trailmark.errors import RecipeError, TrailmarkError
from trailmark.formats.line_file import Lines
from trailmark.recipe import load_yaml
from trailmark.tasks.row_files import file_text

SFT = """method: sft
out: run
data: {data}
steps: 1
batch: 1
model: {{name: tiny, shape: {{layers: 1, width: 16, heads: 2}}}}
"""
ROW = '{"prompt": "1", "response": "2"}\n'


def refused(*words):
    done = CliRunner().invoke(app, [str(w) for w in words])
    assert done.exit_code == 2 and "Traceback" not in done.output + done.stderr, done.output + done.stderr
    assert len(done.stderr) < 2000
    return " ".join(done.stderr.split())


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plain_files, "PATIENCE", 0.1)
    Path("rows.jsonl").write_text(ROW)
    Path("good.yaml").write_text(SFT.format(data="rows.jsonl"))
    os.mkfifo("pipe")
    return tmp_path


@pytest.mark.parametrize("endless", ["/dev/zero", "pipe"])
def test_a_file_that_never_ends_is_refused(endless):
    Path("extends.yaml").write_text(f"extends: {Path(endless).resolve()}\n")
    for words in (
        ["train", "good.yaml", f"data={endless}"],
        ["train", "good.yaml", f"data={endless}", "--dry-run"],
        ["train", endless],
        ["plan", "extends.yaml"],
        ["eval", "tiny", "--task", "prompts", f"path={endless}"],
        ["eval", "tiny", "--task", "logic", "dataset=choice", f"path={endless}"],
        ["convert", endless, "out.jsonl", "--from", "messages", "--to", "episodes", "--tokenizer", "tiny"],
    ):
        refused(*words)
    votes = Path("votes.csv")
    votes.symlink_to(Path(endless).resolve())
    refused("votes", votes)


SMALL = ["checkpoints/000001/state.json", "versions.json", "data.json", "results.json", "models.json", "judge.json"]


@pytest.mark.parametrize("name", ["metrics.jsonl", "episodes/000001.jsonl", ".lock", *SMALL])
@pytest.mark.parametrize("endless", ["/dev/zero", "pipe"])
def test_a_run_whose_files_never_end_is_read_at_once(name, endless):
    (Path("run") / "checkpoints").mkdir(parents=True)
    Path("run/episodes").mkdir()
    Path("run/recipe.yaml").write_text("method: sft\ndata: rows.jsonl\n")
    (Path("run") / name).parent.mkdir(exist_ok=True)
    (Path("run") / name).symlink_to(Path(endless).resolve())
    for words in (
        ["report", "run"],
        ["inspect", "run"],
        ["diff", "run", "run"],
        ["verify", "run"],
        ["train", "good.yaml", "--resume"],
        ["eval", "run", "--task", "arith", "--n", "1"],
    ):
        done = CliRunner().invoke(app, words)
        assert "Traceback" not in done.output + done.stderr, (words, done.stderr)


@pytest.mark.parametrize("endless", ["/dev/zero", "pipe"])
@pytest.mark.parametrize("name", ["optimiser-policy", "policy/model"])
def test_a_checkpoint_whose_weights_never_end_is_read_at_once(name, endless):
    assert CliRunner().invoke(app, ["train", "good.yaml"]).exit_code == 0
    shutil.copytree("run", "kept")
    file = Path(f"run/checkpoints/000001/{name}.safetensors")
    file.unlink()
    file.symlink_to(Path(endless).resolve())
    for words in (["diff", "run", "kept"], ["verify", "run"], ["train", "good.yaml", "steps=2", "--resume"]):
        done = CliRunner().invoke(app, words)
        assert "Traceback" not in done.output + done.stderr and done.exit_code, words
    assert "is a pipe or a device" in " ".join(done.stderr.split())


@pytest.mark.parametrize("endless", ["/dev/zero", "pipe"])
@pytest.mark.parametrize(("task", "name"), [("alfworld", "games.jsonl"), ("alfworld", "games.jsonl.xz"),
                                            ("auto-explore", "tasks.jsonl"), ("auto-explore", "tasks.json"),
                                            ("auto-explore", "file_trees.json")])  # fmt: skip
def test_data_of_a_task_that_never_ends_is_refused(task, name, endless):
    Path("data").mkdir()
    Path("data", name).symlink_to(Path(endless).resolve())
    for key, value in (("games", "data"), ("games", f"data/{name}")) if task == "alfworld" else (("data", "data"),):
        refused("eval", "tiny", "--task", task, f"{key}={value}", "--n", "1")


def test_json_files_are_read_with_a_bound():
    """`plain_files.read_json` knows devices, pipes and depth; a plain read_text or read_bytes does not."""
    for file in Path(plain_files.__file__).parent.rglob("*.py"):
        assert not re.search(r"json\.loads\([^\n]*\.read_(text|bytes)\(", file.read_text("utf-8")), file


def test_interpolation_that_doubles_is_refused(folder):
    lines = ["k0: xxxxxxxxxx"] + [f"k{i}: '${{k{i - 1}}}${{k{i - 1}}}'" for i in range(1, 40)]
    Path("text.yaml").write_text("\n".join(lines))
    lists = ["k0: [1]"] + [f"k{i}: ['${{k{i - 1}}}', '${{k{i - 1}}}']" for i in range(1, 40)]
    Path("lists.yaml").write_text("\n".join(lists))
    empty = ["k0: ''"] + [f"k{i}: '${{k{i - 1}}}${{k{i - 1}}}'" for i in range(1, 40)]
    Path("empty.yaml").write_text("\n".join(empty))
    chain = ["k0: 1"] + [f"k{i}: '${{k{i - 1}}}'" for i in range(1, 3000)]
    Path("chain.yaml").write_text("\n".join(reversed(chain)))
    Path("long.yaml").write_text(f"k0: {'x' * 500_000}\nk1: '{'${k0}' * 3}'\n")
    for name in ("text", "lists", "empty", "chain", "long"):
        with pytest.raises(RecipeError, match=rf"{name}\.yaml:.*key 'k"):
            load_yaml(f"{name}.yaml")


def test_overrides_and_aliases_that_nest_are_refused():
    assert "keys below each other" in refused("train", "good.yaml", ".".join("a" * 5000) + "=1")
    for value in ("[" * 5000 + "]" * 5000, "{a: " * 5000 + "1" + "}" * 5000):
        assert "nested too deeply" in refused("train", "good.yaml", f"trackers={value}")
    bomb = ["a0: &a0 [1, 1, 1, 1]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    Path("alias.yaml").write_text("\n".join(bomb))
    assert "too large" in refused("train", "alias.yaml")


def test_a_small_file_that_unpacks_to_gigabytes_is_refused(monkeypatch):
    monkeypatch.setattr(plain_files, "MOST_UNPACKED", 1 << 20)
    Path("rows.jsonl.gz").write_bytes(gzip.compress(ROW.encode() * 100_000))
    with pytest.raises(TrailmarkError, match=r"rows\.jsonl\.gz.*unpacks to more than"):
        file_text(Path("rows.jsonl.gz"))
    Path("rows.jsonl.gz").write_bytes(gzip.compress(ROW.encode()))
    assert file_text(Path("rows.jsonl.gz")) == ROW
    Path("rows.jsonl.gz").write_bytes(gzip.compress(ROW.encode())[:-9])
    with pytest.raises(TrailmarkError, match="cannot be read"):
        file_text(Path("rows.jsonl.gz"))


def test_rows_and_episodes_that_nest_are_refused():
    deep = "[" * 100_000 + "]" * 100_000
    Path("rows.jsonl").write_text(f'{{"prompt": {deep}, "response": "2"}}\n')
    assert "rows.jsonl:1" in refused("train", "good.yaml")
    Path("episodes.jsonl").write_text(f'{{"id": {deep}}}\n')
    assert "episodes.jsonl" in refused("inspect", "episodes.jsonl")
    Path("rows.json").write_text(json.dumps({"a": 1})[:-1] + f', "b": {deep}}}')
    assert "rows.json" in refused("eval", "tiny", "--task", "logic", "dataset=choice", "path=rows.json")


def test_a_line_without_an_end_is_refused(monkeypatch):
    monkeypatch.setattr("trailmark.formats.line_file.LONGEST", 1000)
    Path("rows.jsonl").write_text(ROW + "x" * 2000)
    with pytest.raises(TrailmarkError, match=r"rows\.jsonl:2: a line has more than"):
        Lines("rows.jsonl")


def test_a_pipe_with_rows_is_still_read():
    """`trailmark convert <(…)` reads a pipe once."""
    got, put = os.pipe()
    os.write(put, ROW.encode() * 2)
    os.close(put)
    assert [bytes(x) for x in Lines(f"/dev/fd/{got}")] == [ROW.strip().encode()] * 2
    os.close(got)
