"""What a redone stage sets aside is a run that opens; and a refusal comes before anything is moved."""

import json

from trailmark.runs.stages import BEFORE, Stage, begun_from, run_stages


def made(value):
    def make(folder):
        (folder / "x.txt").write_text(str(value))
        return {}

    return Stage("policy", make, {"value": value})


def test_what_is_set_aside_keeps_its_recipe_and_its_judge(tmp_path):
    run = tmp_path / "run"
    (run / "judge").mkdir(parents=True)
    (run / "judge" / "judge.json").write_text("{}")
    (run / "recipe.yaml").write_text("value: 1\n")
    (run / "versions.json").write_text("{}")
    (run / "report.html").write_text("of the first run")
    run_stages(run / "stages", [made(1)], say=lambda line: None)
    begun_from(run, [made(1)])
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n")
    (run / "stages" / BEFORE).write_text("value: 1\n")  # as `continue_run` keeps it
    (run / "recipe.yaml").write_text("value: 2\n")
    run_stages(run / "stages", [made(2)], say=lambda line: None)
    said = []
    begun_from(run, [made(2)], said.append)
    old = run / "replaced" / "run-1"
    assert str(old) in said[0]
    assert (old / "recipe.yaml").read_text() == "value: 1\n" and (run / "recipe.yaml").read_text() == "value: 2\n"
    assert {p.name for p in old.iterdir()} == {"recipe.yaml", "versions.json", "judge", "metrics.jsonl", "report.html"}
    assert not (run / "report.html").exists() and not (run / "stages" / BEFORE).exists()
    assert (run / "judge" / "judge.json").exists()
