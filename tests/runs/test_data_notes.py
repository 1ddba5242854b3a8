"""data.json: what it holds of each file, when it is written, and the exact sentences if a file is another one."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from trailmark.config import resolve
from trailmark.errors import DataError, RunError
from trailmark.methods.configs import SftRecipe
from trailmark.runs.data_files import changed_files, known_files, must_be_file, named_files, note_files, read_note


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text("aa\n")
    Path("b.jsonl").write_text("bbbb\n")
    run = SimpleNamespace(path=Path("run"), checkpoints_dir=Path("run/checkpoints"))
    run.checkpoints_dir.mkdir(parents=True)
    return run


def config(**more):
    return resolve({"method": "sft", "data": "a.jsonl", **more}, SftRecipe)


def learnt(run):
    """As if a first evaluation had been made."""
    (run.path / "evaluation").mkdir()
    (run.path / "evaluation" / "000001.jsonl").write_text("")


def about(path):
    raw = Path(path).read_bytes()
    return {"path": str(path), "size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}


def test_what_is_noted(here):
    note_files(here, config(eval_data="b.jsonl"))
    assert json.loads(Path("run/data.json").read_text()) == {"data": about("a.jsonl"), "eval_data": about("b.jsonl")}
    assert read_note(here.path) == {"data": about("a.jsonl"), "eval_data": about("b.jsonl")}
    note_files(here, config(eval_data="b.jsonl"), without=("eval_data",))
    assert set(read_note(here.path)) == {"data"}  # nothing was learnt yet, so the note is that of now


def test_the_note_of_a_run_that_has_learnt(here):
    note_files(here, config())
    learnt(here)
    before = Path("run/data.json").read_bytes()
    Path("moved").mkdir()
    Path("a.jsonl").rename("moved/a.jsonl")  # the same content elsewhere is the same file
    note_files(here, config(data="moved/a.jsonl"))
    assert read_note(here.path)["data"] == about("moved/a.jsonl")
    Path("run/data.json").write_bytes(before)
    note_files(here, config(data="gone.jsonl", eval_data="b.jsonl"))  # reading a file that is gone fails elsewhere
    assert read_note(here.path) == {"data": json.loads(before)["data"], "eval_data": about("b.jsonl")}
    Path("a.jsonl").write_text("aaaaaa\n")
    before = Path("run/data.json").read_bytes()
    with pytest.raises(RunError) as found:
        note_files(here, config())
    assert str(found.value) == (
        "data: a.jsonl has changed (3 bytes, now 7) since this run began: it would learn from other data than before. "
        "Put it back as it was, begin another run with out=DIR, or remove run/data.json to go on with it as it is now."
    )
    assert Path("run/data.json").read_bytes() == before


def test_changes_are_listed_by_key(here):
    assert changed_files(here.path, config()) == []  # it has no note
    note_files(here, config(eval_data="b.jsonl"))
    assert changed_files(here.path, config(eval_data="b.jsonl")) == []
    Path("a.jsonl").write_text("x")
    Path("b.jsonl").write_text("cccc\n")
    assert changed_files(here.path, config(eval_data="b.jsonl")) == [
        "data: a.jsonl has changed (3 bytes, now 1)", "eval_data: b.jsonl has changed (5 bytes, now 5)",
    ]  # fmt: skip
    assert changed_files(here.path, config()) == ["data: a.jsonl has changed (3 bytes, now 1)"]


@pytest.mark.parametrize("text, why", [
    ("{", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
    ("[1]", "it is no list of files"), ('{"data": 3}', "it is no list of files"), ('"x"', "it is no list of files"),
    ('{"data": {}}', "it is no list of files"), ('{"data": {"sha256": 3}}', "it is no list of files"),
])  # fmt: skip
def test_a_note_that_cannot_be_used(here, text, why):
    Path("run/data.json").write_text(text)
    with pytest.raises(RunError) as found:
        read_note(here.path)
    assert str(found.value) == f"run/data.json cannot be used ({why}): remove it and go on."


def test_folders_by_content_and_names(here):
    Path("games/inner").mkdir(parents=True)
    Path("games/x").write_text("12")
    Path("games/inner/y").write_text("345")
    (first,) = known_files({"games": Path("games")}).values()
    parts = {"inner/y": hashlib.sha256(b"345").hexdigest(), "x": hashlib.sha256(b"12").hexdigest()}
    whole = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    assert first == {"path": "games", "files": 2, "size": 5, "sha256": whole}
    Path("games/inner/empty").mkdir()
    Path("games").rename("other")
    (again,) = known_files({"games": Path("other")}).values()
    assert again == {**first, "path": "other"}


def test_names_of_files_in_a_recipe(here):
    assert named_files(config(eval_data="b.jsonl")) == {"data": Path("a.jsonl"), "eval_data": Path("b.jsonl")}
    assert named_files(config(eval_data="b.jsonl"), without=("data", "eval_data")) == {}
    assert known_files(named_files(config(data="none.jsonl"))) == {}


def test_a_folder_in_place_of_a_file_names_the_key(here):
    must_be_file(Path("a.jsonl"), "data")
    must_be_file(Path("none.jsonl"), "data")  # whoever reads it says that it is not there
    with pytest.raises(DataError) as found:
        must_be_file(Path("."), "data")
    assert str(found.value) == (
        ".: key 'data': is a folder, and rows are read from a file: name one of its files, such as a.jsonl."
    )
