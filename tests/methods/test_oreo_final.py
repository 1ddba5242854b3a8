"""Evaluations at the end of an OREO run: the start, and searches with the value that was learnt."""

import json
from pathlib import Path

import pytest
import yaml

from trailmark.config import load_recipe, resolve
from trailmark.errors import RecipeError
from trailmark.evaluate.run import value_of
from trailmark.methods.oreo import method as oreo
from trailmark.runs.launch import launch
from trailmark.runs.store import read_segment

RECIPE = {
    "method": "oreo", "data": "scored.jsonl", "out": "run", "steps": 2, "batch": 4, "seed": 3,
    "task": {"name": "arith", "options": {"level": 1}}, "sampling": {"temperature": 0, "max_tokens": 6},
    "eval": {"every": 2, "n": 5},
    "model": {"name": "tiny", "shape": {"layers": 1, "width": 32, "heads": 2, "context": 64}},
    "engine": {"max_num_seqs": 8, "max_len": 64}, "final": {"start": True, "search": ["beam:2", "best_of:3"]},
}  # fmt: skip


def config(**changes):
    Path("r.yaml").write_text(yaml.safe_dump({**RECIPE, **changes}))
    return resolve(load_recipe("r.yaml"), oreo.OreoRecipe)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    row = {"prompt": "1+1=?\n", "response": "1+1=2\n#### 2"}
    Path("scored.jsonl").write_text("".join(json.dumps({**row, "reward": k % 2}) + "\n" for k in range(6)))


def test_files_of_the_end():
    launch(oreo.OreoMethod, config())
    found = {p.stem: read_segment(p) for p in Path("run/evaluation").glob("*.jsonl")}
    assert set(found) == {"000002", "start", "beam-2", "best_of-3"}
    ids = [e.task.id for e in found["000002"]]
    assert all([e.task.id for e in es] == ids for es in found.values())  # equal starts, so they can be compared
    for e in found["best_of-3"]:
        assert e.info["search"]["of"] == 3 and value_of(e, "drawn") >= 3 > 1
        assert value_of(e, "drawn") == e.info["search"]["tokens"] >= value_of(e, "tokens")
    assert all(value_of(e, "drawn") == value_of(e, "tokens") for e in found["start"])  # nothing was searched
    assert [e.turns[0].tokens for e in found["start"]] != [e.turns[0].tokens for e in found["beam-2"]]


def test_what_is_there_is_not_made_again_and_what_is_missing_is():
    launch(oreo.OreoMethod, config())
    start, beam = Path("run/evaluation/start.jsonl"), Path("run/evaluation/beam-2.jsonl")
    as_made = beam.read_bytes()
    start.write_text("kept\n")
    beam.unlink()
    launch(oreo.OreoMethod, config(), resume=True)
    assert start.read_text() == "kept\n" and beam.read_bytes() == as_made


def test_searches_of_a_run_that_goes_on_are_made_again():
    launch(oreo.OreoMethod, config())
    start = Path("run/evaluation/start.jsonl").read_bytes()
    launch(oreo.OreoMethod, config(steps=3), resume=True)
    for name in ("beam-2", "best_of-3"):
        found = read_segment(Path(f"run/evaluation/{name}.jsonl"))
        assert len(found) == 5 and {t.version for e in found for t in e.turns} == {3}
    assert Path("run/evaluation/start.jsonl").read_bytes() == start


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"task": None}, "final needs a task"),
        ({"format": "pairs"}, "method preference"),
        ({"final": {"search": ["beam"]}}, "expected beam:B"),
    ],
)
def test_what_does_not_fit(changes, said):
    with pytest.raises(RecipeError, match=said):
        config(**changes)
