"""The page of benchmarks is what the generator prints, and says what the results say."""

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = runpy.run_path(str(ROOT / "bench" / "table.py"))
ROW = {
    "name": "speed/a", "ours": 20.0, "peer": 5.0, "peer_name": "other", "ratio": 4.0, "unit": "tokens/s",
    "device": "a CPU",
    "versions": {"torch": "2.13"}, "commit": "abc", "repeats": 3, "spread": [3.5, 4.25], "what": "rows",
}  # fmt: skip


def test_the_committed_page_is_what_the_generator_prints():
    assert (ROOT / "docs" / "benchmarks.md").read_text("utf-8") == TABLE["page"]()


def test_every_result_has_its_fields():
    for name in ("sampling", "training"):
        found = TABLE["rows"](ROOT / "bench" / "results" / f"{name}.jsonl")
        assert found
        for row in found:
            assert row["name"].startswith(f"{name}/") and row["spread"][0] <= row["ratio"] <= row["spread"][1]
            assert row["repeats"] >= 3 and row["commit"] and row["versions"]["torch"]


def test_the_newest_row_of_a_name_counts(tmp_path):
    lines = [{**ROW, "ratio": 1.0}, ROW, {**ROW, "name": "speed/b", "ours": 1234.5}, {"name": "something else"}]
    (tmp_path / "speed.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    page = TABLE["page"](tmp_path)
    assert "| a | 20 | 5 | tokens/s | **4.00** | 3.50 – 4.25 | rows |" in page and "**1.00**" not in page
    assert "| b | 1,234 |" in page and "Measured on a CPU; torch 2.13; commit abc; 3 repeats." in page


def test_a_comparison_is_a_ratio_of_neighbours(tmp_path, monkeypatch, capsys):
    """Clock ticks by hand: ours takes 1, 2, 4 s and the peer 2, 2, 2 s for the same work."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    common = pytest.importorskip("common")
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    now = [0.0]
    spans = {"ours": iter([9, 1, 2, 4]), "peer": iter([9, 2, 2, 2])}
    monkeypatch.setattr(common, "clock", lambda: now[0])

    def side(name):
        def go():
            now[0] += next(spans[name])
            return 8.0

        return go

    row = common.compare("speed/a", side("ours"), side("peer"), "other", "tokens/s", repeats=3)
    assert (row["ours"], row["peer"], row["ratio"], row["spread"]) == (4.0, 4.0, 1.0, [0.5, 2.0])
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "speed.jsonl").read_text()) == row
    assert set(row) >= TABLE["FIELDS"]
