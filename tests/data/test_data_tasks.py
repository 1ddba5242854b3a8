"""Questions: which files, how much of each is shown, and how an answer is read."""

import random

import pytest
from data_fixtures import packages

from trailmark.methods.reflect.explore.tasks import MOST_TOKENS, Repository, asked_about, excerpt, generate
from trailmark.methods.reflect.teacher import Offline, read_tasks
from trailmark.texts import token_count


@pytest.mark.parametrize("path, wanted", [
    ("a.py", True), ("a/b/c.py", True), ("a/b/c/d.py", False), ("a/__init__.py", False), ("tests/a.py", False),
    ("a/test_b.py", False), ("testing.py", True), ("out/a.py", False), ("layout.py", True),
])  # fmt: skip
def test_which_files(path, wanted):
    assert asked_about(path) is wanted


def test_how_much_of_a_file():
    count, draw = token_count(), random.Random(0)
    assert excerpt("r", "a.py", "x" * 199, count, draw) is None
    small = "word\n" * 100
    assert excerpt("r", "a.py", small, count, draw).window == small
    rows = "".join(f"{i:05d},{i * i:09d}\n" for i in range(3000))
    data = excerpt("r", "a.csv", rows, count, draw)
    assert data.window == rows[: 20 * 16] and data.text == rows
    windows = [excerpt("r", "a.py", rows, count, random.Random(k)).window for k in range(200)]
    assert all(w in rows and w.endswith("\n") for w in windows)  # whole lines
    sizes = {sum(count(line) + 1 for line in w.splitlines(keepends=True)) for w in windows}
    assert sizes == {MOST_TOKENS}  # 5 tokens a line: every window is full, so none begins too late
    assert len(set(windows)) > 100


def test_lists_of_questions():
    said = """Some words first.
1. **QUERY1:** How hot does it get?
   And when?
**ANSWER1:** Very,
soon.
QUERY2: No answer to this
QUERY3:
ANSWER3: no question to this
Then there is a QUERY in the middle of a line.
- ANSWER4: belongs to the question above
Query5: the word is written otherwise"""
    assert read_tasks(said) == [("How hot does it get? And when?", "Very, soon.")]
    assert read_tasks("QUERY 1 - a?\nANSWER 1 - b") == [("a?", "b")]
    assert read_tasks("") == read_tasks("ANSWER1: x") == []


def test_offline_questions(tmp_path):
    kettle, garden = packages(tmp_path)
    same = "Fill it at the tap before the first use, and rinse it twice with fresh water.\n"
    (kettle / "NOTES.md").write_text(
        "Notes\n\n" + same + "\n" + "More on this is written elsewhere in the handbook of the house.\n" * 3
    )
    repositories = [Repository("kettle", "1", kettle), Repository("garden", "", garden)]
    records, counts = generate(repositories, Offline(), 0, 100, 2, token_count())
    asked = {(r.repo, r.target, r.query) for r in records}
    assert ("kettle", "src/kettle/boil.py", "Seconds until so much water is as hot as it can get.") in asked
    assert not any(q == same.strip() for _, _, q in asked)  # it fits two files
    assert counts.left_out == {"question that fits several files": 2, "file too short": 1}
    assert counts.kept == {"files asked about": 9, "questions": len(records)}
    assert {r.kind for r in records} == {"docstring", "doc"} and {r.n_files for r in records} == {9, 3}
    per_file = [sum(r.target == t and r.repo == n for r in records) for n, t in {(r.repo, r.target) for r in records}]
    assert max(per_file) == 2
    assert generate(repositories, Offline(), 0, 100, 2, token_count())[0] == records
    few, _ = generate(repositories, Offline(), 0, 1, 1, token_count())
    assert len(few) <= 2 and {r.key for r in few} <= {
        r.key for r in generate(repositories, Offline(), 0, 1, 9, token_count())[0]
    }
