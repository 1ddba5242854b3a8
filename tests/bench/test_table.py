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


def test_the_work_of_a_gradient_is_counted_and_a_missing_profile_is_named():
    """A prompt of 2 and 3 rows of 1, by hand: 5 places against 9, and 2 + 3 * 2.5 pairs against 3 * (2 + 2.5)."""
    weights, vocabulary = 24 * (2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864), 151_936 * 896
    assert TABLE["work"](2, 1, 3, True) == 6 * weights * 5 + 8 * vocabulary * 3 + 14 * 24 * 896 * 9.5
    assert TABLE["work"](2, 1, 3, False) == 6 * weights * 9 + 6 * vocabulary * 3 + 14 * 24 * 896 * 13.5
    row = {**ROW, "name": "gpu_training/grpo 512", "what": "16 samples of 512 after 512; 1 GiB"}
    page = TABLE["section"]("gpu_training", [row, {**ROW, "name": "gpu_training/profile 512"}])
    assert "| grpo 512 | 29.5 | 44.4 | 1.50 | 1.88 |" in page and "--profile --cases 4096,12000`" in page
