"""Method vrcli: every row of its comparison against the same numbers made another way."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.config import ModelConfig
from trailmark.methods.vrcli import method
from trailmark.methods.vrcli.plan_controls import own_gain
from trailmark.methods.vrcli.plans import plans_of, read_scored_rows, score_plans, score_reader
from trailmark.models.load import load_model
from trailmark.runs.store import read_segment
from trailmark.score.likelihood import TextScorer
from trailmark.seats.model_names import locate

MODEL = "{name: tiny, tokenizer: hints/tokenizer, shape: {layers: 1, width: 16, heads: 2, context: 256}}"
REWARD = (
    '{kind: likelihood, context: "{information}{write}", plan: "{information}{plan_heading}{answer}{write_from_plan}", '
    'empty: "{information}{write_from_plan}", markers: ["In summary:"], steps: [[0.001, 1.0]]}'
)
WORDS = ["method=vrcli", "data=hints/train.jsonl", "task.options.val=hints/val.jsonl", f"reward={REWARD}",
         f"model={MODEL}", "steps=1", "prompts_per_step=2", "n=4", "sampling.max_tokens=6", "engine.max_num_seqs=8",
         "out=run"]  # fmt: skip


def call(*words, code=0):
    done = CliRunner().invoke(app, list(map(str, words)))
    assert done.exit_code == code, done.output
    return done.output


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A run of one step, with a model that imitates as its reader. Its recipe.yaml does not make the folder a run."""
    place = tmp_path_factory.mktemp("vrcli")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        call("data", "hints", "--train", 6, "--val", 5, "--test", 1, "--lessons", 12)
        (place / "recipe.yaml").write_text("method: vrcli\n")
        (place / "sft.yaml").write_text("method: sft\n")
        call("train", "sft.yaml", "data=hints/sft_train.jsonl", f"model={MODEL}", "steps=2", "batch=3", "out=sft",
             "learner.optim.lr=0.05")  # fmt: skip
        call("train", "recipe.yaml", *WORDS, "final.readers.sft=sft", "learner.optim.lr=0.05")
        yield place


def played(home, name):
    return read_segment(home / "run" / "evaluation" / f"{name}.jsonl")


def scorer(home):
    return TextScorer(
        load_model(ModelConfig.model_validate({"name": "tiny", "tokenizer": str(home / "hints/tokenizer"),
                                               "shape": {"layers": 1, "width": 16, "heads": 2, "context": 256}}))
    )  # fmt: skip


def test_rewards_are_the_improvements_of_the_plans(home):
    """Those of `trailmark improvement`, which reads the files of rows itself."""
    rows = read_scored_rows(home / "hints/val.jsonl")
    for name in ("start", "trained", "other-plan", "random-words", "no-plan", "gold"):
        episodes = played(home, name)
        assert sorted(e.task.id for e in episodes) == sorted(rows)
        plans, _ = plans_of([(e.task.id, e.turns[-1].text) for e in episodes], ["In summary:"])
        for e, score in zip(episodes, score_plans(scorer(home), rows, plans), strict=True):
            assert e.outcome.reward == pytest.approx(score["improvement"] / 100, abs=1e-6)
            assert e.turns[-1].reward == e.outcome.reward
    assert {e.players["policy"].kind for e in played(home, "trained")} == {"trained"}
    assert {e.players["policy"].kind for e in played(home, "gold")} == {"scripted"}
    assert [e.turns[-1].text for e in played(home, "gold")] == [e.task.data["gold"] for e in played(home, "gold")]


def test_the_reader_is_scored_without_a_plan(home):
    rows = read_scored_rows(home / "hints/val.jsonl")
    reader = TextScorer(load_model(ModelConfig(name=locate(str(home / "sft")).folder)))
    want = {s["id"]: s["improvement"] / 100 for s in score_reader(scorer(home), reader, rows)}
    found = {e.task.id: e.outcome.reward for e in played(home, "sft")}
    assert found == pytest.approx(want, abs=1e-6) and all(abs(v) > 1e-6 for v in want.values())


def test_plans_that_explain_less(home):
    plan = lambda e: e.turns[-1].text.rpartition("In summary:")[2].strip()
    trained = played(home, "trained")
    other = {e.task.id: e.turns[-1].text for e in played(home, "other-plan")}
    mine = {e.task.id: plan(e) for e in trained}
    assert sorted(other.values()) == sorted(mine.values())  # each plan once, and none for its own row
    if len(set(mine.values())) == len(mine):
        assert all(other[i] != mine[i] for i in mine)
    for e, r in zip(trained, played(home, "random-words")):
        known = re.findall(r"\w+", e.task.data["information"].lower())
        words = r.turns[-1].text.split()
        assert len(words) == len(re.findall(r"\w+", plan(e))) and set(words) <= set(known)


def test_results_by_hand(home):
    rows = {(r["arm"], r["metric"]): r["value"] for r in json.loads((home / "run/results.json").read_text())}
    assert {arm for arm, _ in rows} == {"start", "trained", "other-plan", "random-words", "no-plan", "gold", "sft"}
    for name in ("trained", "gold", "sft"):
        mean = np.mean([e.outcome.reward for e in played(home, name)])
        assert rows[name, "improvement"] == pytest.approx(100 * mean)
    assert rows["gold", "words"] == 3.0 and rows["gold", "words_in_prompt"] == pytest.approx(1 / 3)  # "The fox sleeps."
    assert rows["sft", "words"] == 0.0 and rows["random-words", "words_in_prompt"] in (0.0, 1.0)
    reward = lambda name: {e.task.id: 100 * e.outcome.reward for e in played(home, name)}
    want = own_gain(*zip(*((own, reward("other-plan")[i]) for i, own in reward("trained").items())))
    assert len(want) == 3 and {k: rows["trained", k] for k in want} == pytest.approx(want)


def test_a_run_whose_plans_are_not_about_their_rows_says_so_at_its_end(home, monkeypatch, tmp_path):
    """As if the plans of other rows, random words and no plan at all had improved as much as the rows' own."""
    copy = tmp_path / "home"
    shutil.copytree(home, copy)
    monkeypatch.chdir(copy)
    monkeypatch.setattr(method, "numbers", lambda *_: {"improvement": 24.0})
    monkeypatch.setattr(method, "improvements", lambda played: {e.task.id: 24.0 for e in played})
    said = call("train", "recipe.yaml", *WORDS, "final.readers.sft=sft", "learner.optim.lr=0.05", "--resume")
    assert "warning: the plan of another row improves the gold texts by 24.0 %, the row's own by 24.0 %" in said
    assert "random words of the prompt by 24.0 %; no plan at all by 24.0 %. So plans are not shown" in said
    rows = {(r["arm"], r["metric"]): r["value"] for r in json.loads(Path("run/results.json").read_text())}
    assert rows["trained", "own_plan_gain"] == 0.0


def test_a_finished_run_keeps_its_comparison(home, monkeypatch):
    monkeypatch.chdir(home)
    before = (home / "run/evaluation/start.jsonl").read_bytes(), (home / "run/results.json").read_bytes()
    call("train", "recipe.yaml", *WORDS, "final.readers.sft=sft", "learner.optim.lr=0.05", "--resume")
    assert before == ((home / "run/evaluation/start.jsonl").read_bytes(), (home / "run/results.json").read_bytes())


def test_mistakes_are_one_sentence(home, monkeypatch):
    monkeypatch.chdir(home)
    (home / "own.py").write_text("def score(answer): return len(answer)\n")
    said = call("train", "recipe.yaml", *WORDS, "reward=own.py:score", "out=bad", code=2)
    assert "method vrcli needs reward: {kind: likelihood, …}" in said
    said = call("train", "recipe.yaml", *WORDS, "final.readers.gold=sft", "out=bad2", code=2)
    assert "final.readers.gold: the comparison has a row of this name already: choose another." in said


def test_the_quickstart_from_end_to_end(tmp_path, monkeypatch):
    """With a few rows and steps: its table, its files and its page; and again, where nothing is left to do."""
    from trailmark.methods.vrcli.stories import hints

    few = hints.Hints
    monkeypatch.setattr(hints, "Hints", lambda seed: few(6, 4, 1, 30, seed=seed))
    monkeypatch.setattr("trailmark.report.plots._save", lambda figure, path: path)  # drawing takes a second
    shorter = {"reader": ["steps=2", "batch=4"], "sft": ["steps=1", "batch=2", "eval.every=0"],
               "vrcli": ["steps=1", "prompts_per_step=2", "n=4", "eval.every=0", "engine.max_num_seqs=8"]}  # fmt: skip
    monkeypatch.setattr("trailmark.methods.quickstart.further", shorter.get)
    words = ["quickstart", "--method", "vrcli", "--out", tmp_path / "q", "--seed", 3]
    said = call(*words)
    result = json.loads((tmp_path / "q/quickstart.json").read_text())
    names = ["random words of the prompt", "VR-CLI's plan for another row", "before training", "VR-CLI", "SFT, no plan"]
    assert [r["name"] for r in result["rows"]] == names == list(result["files"])
    for row in result["rows"]:
        rewards = [e.outcome.reward for e in read_segment(Path(result["files"][row["name"]]))]
        assert row["episodes"] == 4 and row["metrics"]["reward"]["value"] == pytest.approx(np.mean(rewards))
    assert Path(result["report"]).read_text().startswith("<!doctype html>") and "Read next: docs/vrcli.md" in said
    weights = lambda: sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / "q").rglob("*.safetensors"))
    before = weights()
    again = json.loads(CliRunner().invoke(app, [*map(str, words), "--resume", "--json"]).stdout)
    assert again["rows"] == result["rows"] and weights() == before
