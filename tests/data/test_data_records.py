"""Records: ours and the reference's, both ways, and the filter over them."""

import json

import pytest
from data_fixtures import packages, rows

from trailmark.errors import DataError
from trailmark.methods.reflect.explore.records import Record, Walk, read_records, write_records
from trailmark.methods.reflect.explore.tasks import Repository, filter_records
from trailmark.tasks.auto_explore.records import load_records

STEPS = [{"reflection": "", "cmd": "ls"}, {"reflection": "Into src.", "cmd": "cd src"}, {"cmd": 'cat "my file.py"'}]
REFERENCE = {
    "question": " Where is it? ", "answer": "There.", "optimal_path": ["ls", "cd src", "ls", 'cat "my file.py"'],
    "filename": 'src/"my file.py"', "root": "data/repos/kettle/", "n_level": 1, "model": "gpt-4", "level_old": 3,
    "trajectories": [{"model_name": "gpt-4", "trajectory": STEPS, "filename": "./src/other.py", "info": "positive"}],
}  # fmt: skip


def test_the_references_json(tmp_path):
    (tmp_path / "data.json").write_text(json.dumps([REFERENCE]))
    (record,) = read_records(tmp_path / "data.json")
    walk = Walk("gpt-4", (("Into src.", "cd src"), ("", 'cat "my file.py"')), "src/other.py", "positive")
    assert record == Record("kettle", "Where is it?", "src/my file.py", "There.", model="gpt-4", walks=(walk,))
    assert record.optimal_path == ["cd src", 'cat "my file.py"', 'id "my file.py"'] and record.depth == 1
    assert record.targets == ["src/my file.py", "src/other.py"]

    write_records(tmp_path / "again.json", [record])
    (again,) = json.loads((tmp_path / "again.json").read_text())
    assert list(again) == [k for k in REFERENCE if k != "level_old"]
    assert (again["filename"], again["root"], again["n_level"]) == ("src/my file.py", "kettle", 1)
    assert read_records(tmp_path / "again.json") == [record]
    (theirs,), dropped = load_records(tmp_path / "again.json")  # the world reads it as well
    assert (theirs.query, set(theirs.targets), dropped) == ("Where is it?", set(record.targets), {})


def test_our_lines(tmp_path):
    record = Record(
        "kettle", "Where?", "a.py", also=("b.py",), walks=(Walk("m", (("r", "cat a.py"),), "c.py", "positive0"),)
    )
    write_records(tmp_path / "t.jsonl", [record])
    (row,) = rows(tmp_path / "t.jsonl")
    assert row["target"] == ["a.py", "b.py", "c.py"] and row["id"] == record.id and len(record.id) == 12
    (back,) = read_records(tmp_path / "t.jsonl")
    assert (back.targets, back.walks, back.key) == (record.targets, record.walks, record.key)
    (theirs,), _ = load_records(tmp_path / "t.jsonl")
    assert (theirs.key, list(theirs.targets)) == (record.key, record.targets)
    shared = {"repo": "requests", "version": "2.0", "kind": "doc", "query": "q", "target": "a/b.md", "depth": 1,
              "n_files": 9, "id": 7,
              "split": "train"}  # fmt: skip
    (tmp_path / "s.jsonl").write_text(json.dumps(shared) + "\n")
    assert read_records(tmp_path / "s.jsonl")[0].to_json() == {
        **shared,
        "id": "7",
        "answer": "",
        "model": "",
        "trajectories": [],
    }


@pytest.mark.parametrize("row, said", [
    ({"repo": "r", "query": "q"}, "key 'target': is missing"),
    ({"repo": "r", "query": 3, "target": "t"}, "key 'query': must be text"),
    ({"repo": "r", "query": "q", "target": []}, "key 'target': must be a list that is not empty"),
    ({"repo": "r", "query": "q", "target": "t", "id": None}, "key 'id': must be text or a whole number"),
    ({"question": "q", "root": "r"}, "key 'filename': is missing"),
    ({"question": "q", "root": "r", "filename": "f", "trajectories": 3}, "key 'trajectories': must be a list"),
    ({"question": "q", "root": "r", "filename": "f", "trajectories": [{"trajectory": [{"reflection": "x"}]}]},
     r"key 'trajectories\[0\].trajectory\[0\].cmd': is missing"),
    ([1], "must be an object"),
])  # fmt: skip
def test_broken_rows(tmp_path, row, said):
    (tmp_path / "t.jsonl").write_text("\n" + json.dumps(row) if not isinstance(row, list) else "3")
    with pytest.raises(DataError, match=said):
        read_records(tmp_path / "t.jsonl")


def test_filter(tmp_path):
    kettle, _ = packages(tmp_path)
    told = [
        Record("kettle", "one", "README.md", walks=(Walk("a", (), "README.md", "positive3"),)),
        Record("kettle", " ", "README.md"),
        Record("teapot", "one", "README.md"),
        Record("kettle", "one", "gone.md"),
        Record("kettle", "one", "logo.svg"),
        Record("kettle", "one", ".github/a.md"),
        Record("kettle", "one", "README.md", walks=(Walk("b", (), None, "negative7"), Walk("b", (), None, "positive"))),
    ]
    kept, counts = filter_records(told, [Repository("kettle", "", kettle)])
    assert [[w.info for w in r.walks] for r in kept] == [["positive0", "negative0", "positive1"]]
    assert counts.left_out == {
        "empty question": 1, "repository that is missing": 1, "target that is missing or not text": 1,
        "target of an unsupported suffix": 1, "target under a hidden name": 1, "question asked twice": 1,
    }  # fmt: skip
    with pytest.raises(DataError, match="no record is left .*1 empty question"):
        filter_records(told[1:2], [Repository("kettle", "", kettle)])
