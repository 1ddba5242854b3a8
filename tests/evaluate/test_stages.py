"""Stages of a world in tables and in measures of a study."""

import json
from pathlib import Path
from types import SimpleNamespace

from trailmark.evaluate.measures import Measure, measure_run
from trailmark.evaluate.run import stage_rows
from trailmark.runs.episode_json import to_json
from trailmark.types import Episode, Scored, Task


def episode(k, stage, won):
    meta = {"stage": stage} if stage else {}
    return Episode(f"e{k}", Task(f"t{k}", meta=meta), "g", (), {"self": Scored(float(won), won)}, seed=1)


PLAYED = [episode(k, "near" if k < 4 else "far", k in (0, 1, 2, 5)) for k in range(8)]


def test_a_row_for_all_and_one_for_each_stage():
    rows = stage_rows(PLAYED, "x")
    assert [(r["name"], r["episodes"], r["metrics"]["success"]["value"]) for r in rows] == [
        ("x", 8, 0.5), ("x, near", 4, 0.75), ("x, far", 4, 0.25),
    ]  # fmt: skip
    assert len(stage_rows(PLAYED[:4], "x")) == 1  # one stage needs no row of its own
    assert len(stage_rows([episode(0, "", True)], "x")) == 1
    json.dumps(rows, allow_nan=False)


def test_a_measure_of_one_stage(tmp_path):
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / "last.jsonl").write_text("".join(to_json(e) + "\n" for e in PLAYED))
    spec = SimpleNamespace(reads=SimpleNamespace(episodes="evaluation/last.jsonl"), name="a")
    values = {s: measure_run(Path(tmp_path), Measure(episodes="evaluation", stage=s), spec, None, "a").value
              for s in ("near", "far", None)}  # fmt: skip
    assert values == {"near": 0.75, "far": 0.25, None: 0.5}
