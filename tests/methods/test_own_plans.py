"""Is a plan about its row? The comparison with other plans, in evaluations, results and the report."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.learn.watch import Watch
from trailmark.methods.vrcli.plan_controls import not_about_the_row, own_gain, plans_of_others, t_975, words_at_random
from trailmark.report.concerns import concerns
from trailmark.report.page import build
from trailmark.runs.store import read_metrics, read_segment
from trailmark.types import Annotation

RECIPES = Path(__file__).parents[2] / "recipes"
NOISE = {"improvement": 24.0, "other_plan_improvement": 23.8, "random_words_improvement": 19.7,
         "own_plan_gain": 0.2, "own_plan_gain_low": -1.0, "own_plan_gain_high": 1.4}  # fmt: skip


def call(*words):
    done = CliRunner().invoke(app, list(map(str, words)))
    assert done.exit_code == 0, done.output
    return done.output


def test_the_interval_by_hand():
    """Gaps 1, 2, 3, 6: mean 3, deviation sqrt(14 / 3), t with 3 degrees 3.182."""
    found = own_gain([2, 4, 6, 9], [1, 2, 3, 3])
    half = 3.182 * np.sqrt(14 / 3 / 4)
    assert found["own_plan_gain"] == 3 and found["own_plan_gain_low"] == pytest.approx(3 - half, abs=0.05)
    assert found["own_plan_gain_high"] == pytest.approx(3 + half, abs=0.05)
    assert own_gain([2.0], [1.0]) == {"own_plan_gain": 1.0} and own_gain([float("nan")], [1.0]) == {}
    for v, want in ((1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042), (1000, 1.962)):
        assert t_975(v) == pytest.approx(want, abs=0.05)


def test_no_row_gets_its_own_plan():
    rows, plans = list("aabbccd"), [f"plan {k}" for k in range(7)]
    for seed in range(20):
        given = plans_of_others(rows, plans, seed)
        assert all(rows[plans.index(p)] != row for row, p in zip(rows, given))
    assert words_at_random("The hen.", 3, 0, "r").split() != [] and words_at_random("", 3, 0, "r") == ""


def test_a_warning_where_another_rows_plan_does_as_well():
    said = not_about_the_row(NOISE)
    assert "the plan of another row improves the gold texts by 23.8 %, the row's own by 24.0 %" in said
    assert "(difference 0.2 [-1.0, 1.4]); random words of the prompt by 19.7 %. So" in said
    assert not not_about_the_row({**NOISE, "own_plan_gain_low": 0.1})
    for name, words in (("random_words", "random words of the prompt"), ("empty", "no plan at all")):
        said = not_about_the_row({**NOISE, "own_plan_gain_low": 0.1, f"{name}_improvement": 24.0})
        assert f"; {words} by 24.0 %" in said
    assert not not_about_the_row({**NOISE, "improvement": -3.0}) and not not_about_the_row({})
    watch, seen = Watch(), {f"eval/{k}": v for k, v in NOISE.items()}
    assert len(watch.look(seen)) == 1
    assert watch.look({}) == watch.look(seen) == []  # said once
    assert watch.look({**seen, "eval/own_plan_gain_low": 0.1}) == [] and len(watch.look(seen)) == 1
    curves = [{"name": k, "train": [], "eval": [[10, v]]} for k, v in NOISE.items()]
    (found,) = concerns(curves, [], {}, "finished", 10, {})
    assert found["level"] == "warn" and found["text"].startswith("Step 10: the plan of another row")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    place = tmp_path_factory.mktemp("own")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        call("data", "hints", "--train", 6, "--val", 5, "--test", 1, "--lessons", 6)
        call("train", RECIPES / "vrcli-laptop.yaml", "data=hints/train.jsonl", "task.options.val=hints/val.jsonl",
             "model={name: tiny, tokenizer: hints/tokenizer, shape: {layers: 1, width: 16, heads: 2, context: 256}}",
             "engine={max_num_seqs: 8, max_len: 200}", "steps=2", "prompts_per_step=2", "n=2",
             "sampling.max_tokens=5", "eval.every=2",
             "out=run")  # fmt: skip
        yield place


def test_every_evaluation_compares_its_plans(home):
    row = read_metrics(home / "run")[-1]
    notes = {}
    for a in read_segment(home / "run/evaluation/000002.annotations.jsonl", Annotation):
        notes.setdefault(a.name, {})[a.episode] = a.values[0]
    plays = read_segment(home / "run/evaluation/000002.jsonl")
    for name in ("other_plan_improvement", "random_words_improvement", "improvement", "empty_improvement"):
        assert set(notes[name]) == {e.id for e in plays}
        assert row[f"eval/{name}"] == pytest.approx(np.mean(list(notes[name].values())))
    gaps = [notes["improvement"][e.id] - notes["other_plan_improvement"][e.id] for e in plays]
    assert row["eval/own_plan_gain"] == pytest.approx(np.mean(gaps))
    assert row["eval/own_plan_gain_low"] < row["eval/own_plan_gain"] < row["eval/own_plan_gain_high"]


def test_the_comparison_at_the_end_warns_in_the_report(home):
    results = home / "run" / "results.json"
    arms = {"trained": 24.0, "other-plan": 23.8, "random-words": 19.7}
    rows = [{"arm": a, "metric": "improvement", "value": v} for a, v in arms.items()]
    rows += [{"arm": "trained", "metric": k, "value": v} for k, v in NOISE.items() if k.startswith("own")]
    results.write_text(json.dumps(rows))
    told = [c["text"] for c in build(home / "run")["concerns"]]
    assert any(t.startswith("At the end: the plan of another row improves the gold texts by 23.8 %") for t in told)
    for broken in ("{", "[3]", '{"a": 1}', "[]"):
        results.write_text(broken)
        assert not [c for c in build(home / "run")["concerns"] if c["text"].startswith("At the end")]
    results.unlink()


@pytest.mark.slow
def test_the_floor_of_the_page(tmp_path, monkeypatch):
    """docs/vrcli.md, Rows of your own: sixty rows without anything to find do not pass, the planted hint does."""
    monkeypatch.chdir(tmp_path)
    whys = [(a, v, b) for a in ("hen", "fox", "owl", "cat", "dog", "pig") for v, b in
            (("wait", "road"), ("laugh", "wind"), ("run", "farm"), ("sing", "moon"), ("sleep", "barn"),
             ("jump", "fence"), ("cry", "rain"), ("hide", "storm"), ("smile", "sun"), ("turn", "gate"))]  # fmt: skip
    talk = lambda ask, gold: {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": gold}]}
    rows = [talk(f"Why did the {a} {v}?", f"Because the {b} was near.") for a, v, b in whys]
    Path("talks.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    call("data", "stories", "talks.jsonl", "--out", "stories", "--val", "0.3")
    call("train", RECIPES / "vrcli-laptop.yaml", "out=noise")
    assert read_metrics("noise")[-1]["eval/own_plan_gain_low"] <= 0
    call("quickstart", "--method", "vrcli", "--out", "hint", "--seed", 3)
    found = {r["metric"]: r["value"] for r in json.loads(Path("hint/vrcli/results.json").read_text())
             if r["arm"] == "trained"}  # fmt: skip
    assert found["own_plan_gain_low"] > 50 and found["improvement"] > 5
