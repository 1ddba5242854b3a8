"""Studies with a method that only counts: expansion, budgets, verdicts, resuming, sharing, pages."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import forked
import pytest
import yaml
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.errors import DataError, RecipeError, RunError
from trailmark.evaluate.claims import Claim, RunMeasure, arm_interval, difference, holm, p_value, parse_claim
from trailmark.evaluate.pages import page, read_study
from trailmark.evaluate.study import _flat, load_study, run_study
from trailmark.runs.store import Run

METHOD = '''
"""Counts. Success is `skill` plus a little that depends on the seed and the step."""
import json
from trailmark.config import RunConfig
from trailmark.methods.base import Method
from trailmark.runs.store import append_line, read_metrics, to_json, write_segment
from trailmark.types import Episode, Scored, Task, Turn

class Config(RunConfig):
    skill: float = 0.5
    cost: int = 2
    passes: int = 1
    stop_at: int = 0

def played(name, skill, n, seed):
    return [Episode(f"{name}/{i}", Task(f"t{i}"), f"t{i}", (Turn("policy", (1,), (2,) * n),),
                    {"self": Scored(float((i * 7 + seed) % 10 < 10 * skill), (i * 7 + seed) % 10 < 10 * skill)},
                    seed=1) for i in range(40)]

class Counting(Method):
    Config = Config

    @classmethod
    def train(cls, config, run, resume=False):
        for step in range(len(read_metrics(run.path)) + 1, config.steps + 1):
            if config.stop_at and step > config.stop_at:
                break
            write_segment(run.episodes_dir, step, played(f"{step}", config.skill, config.cost, config.seed)[:5])
            skill = config.skill * step / config.steps
            write_segment(run.path / "evaluation", step, played("e", skill, 1, config.seed))
            run.log(step, {"success": skill + 0.01 * (config.seed % 3)}, {"seconds": 1.0})
            with open(run.path / "ran.txt", "a") as f:
                f.write(f"{step}\\n")
        for name, skill in (("low", 0.2), ("high", 0.8)):
            lines = "".join(to_json(e) + "\\n" for e in played(name, skill, 1, config.seed))
            (run.path / "evaluation" / f"{name}.jsonl").write_text(lines)
        (run.path / "results.json").write_text(json.dumps([{"arm": "high", "metric": "score", "value": config.skill}]))
        return {}
'''
STUDY = {
    "recipe": "count.yaml",
    "arms": {"low": {"set": {"skill": 0.3}}, "high": {"set": {"skill": 0.9}}},
    "seeds": [0, 1, 2],
    "budget": {"steps": 4},
    "measures": {"success": {"metric": "success", "last": 2}},
    "claims": ["high > low on success"],
}


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Write a study (STUDY with changes) and run it."""
    (tmp_path / "counting_method.py").write_text(METHOD)
    (tmp_path / "count.yaml").write_text("method: counting_method\nname: count\nsteps: 9\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)

    def go(name="s", overrides=(), **changes):
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**STUDY, **changes}, sort_keys=False))
        return run_study(path, overrides, poll=0.01)

    return go


def values(result, measure="success"):
    return {a["name"]: a["values"][measure]["value"] for a in result["arms"]}


def test_a_study_by_hand(study):
    result, folder = study()
    # the last two of four steps: skill * (3/4 + 4/4) / 2, and 0.01 for the mean seed
    assert values(result) == {"low": pytest.approx(0.3 * 0.875 + 0.01), "high": pytest.approx(0.9 * 0.875 + 0.01)}
    (claim,) = result["claims"]
    assert claim["verdict"] == "holds" and claim["value"] == pytest.approx(0.6 * 0.875)
    assert result["arms"][0]["steps"] == [4, 4, 4] and result["notes"] == []
    table = (folder / "table.md").read_text().splitlines()
    assert table[0] == "| arm | success |" and table[2] == "| low | 0.272 [0.248, 0.297] |"
    assert table[-1].startswith("| high > low on success | +0.525 [+0.525, +0.525] | **holds**")
    assert json.loads((folder / "study.json").read_text()) == json.loads(json.dumps(result))
    assert (folder / "picture.png").read_bytes()[:4] == b"\x89PNG" and b"<svg" in (folder / "picture.svg").read_bytes()


def test_verdicts(study):
    result, _ = study(claims=["low > high > low on success", "low < high", {"claim": "high > high", "over": "seeds"}])
    assert [(c["claim"], c["verdict"]) for c in result["claims"]] == [
        ("low > high on success", "reversed"), ("high > low on success", "holds"), ("low < high on success", "holds"),
        ("high > high on success", "unclear"),
    ]  # fmt: skip


def test_claims_that_share_an_error_rate(study):
    """Holm by hand, and p as the error rate at which an interval of t just touches 0."""
    assert holm([0.03, 0.01, 0.04, 0.5]) == [0.09, 0.04, 0.09, 0.5] and holm([]) == [] and holm([0.6, 0.9]) == [1, 1]
    claim, seen = Claim("a", "b", "m"), lambda *x: [RunMeasure(v) for v in x]
    a, b = seen(1.0, 2.0, 3.0), seen(0.0, 0.0, 0.0)  # the mean is 2, t is 2 sqrt 3 with 2 degrees of freedom
    p = p_value(claim, a, b, [0, 1, 2])
    assert p == pytest.approx(1 - (12 / (2 + 12)) ** 0.5, rel=2e-3)  # P(|t| > x) = 1 - x / sqrt(2 + x^2)
    assert p_value(claim, b, a, [0, 1, 2]) == p and p_value(claim, a, a, [0, 1, 2]) == 1.0
    assert p_value(claim, a[:1], b[:1], [0]) == 1.0
    claims = ["high > low", *["low > low"] * 3]
    result, folder = study(claims=claims, correct="holm")
    assert [(c["verdict"], c["alone"]) for c in result["claims"]] == [("holds", "holds"), *[("unclear", "unclear")] * 3]
    assert result["claims"][0]["p"] == pytest.approx(4e-6) and result["claims"][1]["p"] == 1.0
    assert "| +0.525 [+0.525, +0.525] | 4e-06 | **holds** |" in (folder / "table.md").read_text()
    result["claims"][0] |= {"p": 0.06, "verdict": "unclear"}
    assert "the interval alone would decide, but not after the correction" in page(result, "x.png")
    assert "p" not in study("plain", claims=claims)[0]["claims"][0]


def test_episodes_results_and_arms_of_one_run(study):
    measures = {"success": {"episodes": "evaluation/high.jsonl"}, "score": {"metric": "score", "results": True}}
    arms = {
        "high": {"set": {"skill": 0.4}},
        "low": {"of": "high", "episodes": "evaluation/low.jsonl", "result": "high"},
    }
    claims = ["high > low on success", {"claim": "high > low on success", "over": "starts"},
              {"claim": "high > low on success", "over": "seeds"}, {"claim": "high > low on success", "paired": False},
              "high > low on score"]  # fmt: skip
    result, folder = study(measures=measures, arms=arms, claims=claims)
    assert values(result) == {"high": pytest.approx(0.8), "low": pytest.approx(0.2)}
    assert values(result, "score") == {"high": pytest.approx(0.4), "low": pytest.approx(0.4)}
    assert [c["verdict"] for c in result["claims"]] == ["holds"] * 4 + ["unclear"]
    assert sorted(p.name for p in (folder / "runs").iterdir()) == ["high"]
    single, _ = study("one", measures=measures, arms=arms, claims=claims, seeds=[5])
    assert single["claims"][0]["method"] == "paired proportions" and "One seed" in single["notes"][0]
    assert [c["verdict"] for c in single["claims"]] == ["one seed"] * 5  # whatever the interval over starts is
    told = page(single, "x.png")
    assert "**one seed**" in told and "**holds**" not in told and "**reversed**" not in told
    assert single["arms"][0]["values"]["success"]["method"] == "wilson"
    with pytest.raises(DataError, match="arm 'high', seed 0 has no evaluation/hgh.jsonl. Did you mean"):
        study(measures={"x": {"episodes": "evaluation/hgh.jsonl"}}, arms=arms, claims=[])
    with pytest.raises(DataError, match="logged no 'succes'. Did you mean 'success'"):
        study(measures={"x": {"metric": "succes"}}, arms=arms, claims=[])


def test_budgets_cut_where_they_are_spent(study):
    # 5 episodes of `cost` tokens a step: 60 tokens are six steps of cost 2, or three of cost 4
    arms = {"cheap": {"set": {"cost": 2}}, "dear": {"set": {"cost": 4}}}
    measures = {"success": {"metric": "success"}, "evaluated": {"episodes": "evaluation"}}
    result, _ = study(arms=arms, budget={"tokens": 60}, measures=measures, claims=["cheap > dear on success"])
    assert [a["steps"] for a in result["arms"]] == [[6] * 3, [3] * 3] and result["claims"][0]["verdict"] == "holds"
    assert values(result) == {"cheap": pytest.approx(0.5 * 6 / 9 + 0.01), "dear": pytest.approx(0.5 * 3 / 9 + 0.01)}
    with pytest.raises(RunError, match="arm 'cheap', seed 0 spent 90 of 1000 tokens in all its steps"):
        study(arms=arms, budget={"tokens": 1000}, claims=[])
    assert study(arms=arms, budget={"seconds": 7.5}, claims=[])[0]["arms"][0]["steps"] == [7, 7, 7]
    arms["dear"]["set"]["passes"] = 3
    assert [a["steps"][0] for a in study("u", arms=arms, budget={"updates": 6}, claims=[])[0]["arms"]] == [6, 2]
    early, _ = study("early", arms={"a": {"set": {"stop_at": 2}}}, claims=[])
    assert early["notes"][0] == "arm 'a', seed 0 ended at step 2 of 4."
    more, _ = study("more", arms={"a": {"extra": 3}}, claims=[], seeds=[0])
    assert more["arms"][0]["steps"] == [7] and more["notes"][0] == "Arm 'a' had 3 steps beside the budget."


def test_a_sweep_is_arms(study):
    result, folder = study(
        arms={}, sweep={"skill": [0.2, 0.6], "cost": [1, 2]}, claims=["skill=0.6,cost=1 > skill=0.2,cost=1"]
    )
    assert list(values(result)) == ["skill=0.2,cost=1", "skill=0.2,cost=2", "skill=0.6,cost=1", "skill=0.6,cost=2"]
    assert result["claims"][0]["verdict"] == "holds" and len(list((folder / "runs").iterdir())) == 4
    both, _ = study("b", sweep={"learner.optim.lr": [1e-3, 1e-4]}, claims=[], seeds=[0])
    assert list(values(both)) == ["low, lr=0.001", "low, lr=0.0001", "high, lr=0.001", "high, lr=0.0001"]


def test_nested_keys_merge_and_kinds_are_set_whole():
    nested = {
        "rl": {"prompts_per_step": 4, "deep": {"x": [1]}},
        "a.b": 1,
        "objective": {"kind": "clipped", "beta": 0.1},
        "e": {},
    }
    assert _flat(nested) == {
        "rl.prompts_per_step": 4, "rl.deep.x": [1], "a.b": 1, "objective": {"kind": "clipped", "beta": 0.1}, "e": {},
    }  # fmt: skip


def test_finished_runs_are_kept_and_changed_ones_are_made_again(study, tmp_path, capsys):
    result, folder = study()
    before = {p: p.stat().st_mtime_ns for p in (folder / "runs").rglob("ran.txt")}
    table = (folder / "table.md").read_bytes()
    assert study()[0] == result and {p: p.stat().st_mtime_ns for p in (folder / "runs").rglob("ran.txt")} == before
    assert (folder / "table.md").read_bytes() == table
    more, _ = study(overrides=["seeds=[0,1,2,3]"])
    assert len(more["arms"][0]["values"]["success"]["seeds"]) == 4
    assert {p: p.stat().st_mtime_ns for p in before} == before
    longer, _ = study(overrides=["budget.steps=6"])  # goes on from step 4
    assert (folder / "runs/low/seed-0/ran.txt").read_text() == "1\n2\n3\n4\n5\n6\n" and longer["arms"][0]["steps"] == [
        6
    ] * 3
    ran = (folder / "runs/low/seed-0/ran.txt").read_bytes()
    study(overrides=["set.cost=5"])
    assert "stage 'runs/low/seed-0' is made again: key 'cost' was not set and is 5." in capsys.readouterr().err
    assert (folder / "runs/low/seed-0/ran.txt").read_text() == "1\n2\n3\n4\n"
    assert (folder / "replaced/runs-low-seed-0-1/ran.txt").read_bytes() == ran
    (folder / "runs/low/seed-1/metrics.jsonl").write_text("")
    with pytest.raises(
        RunError, match=r"arm 'low', seed 1: .*metrics.jsonl of stage 'runs/low/seed-1' was changed after it was made"
    ):
        study(overrides=["set.cost=5"])
    with pytest.raises(RunError, match="is not empty"):
        run_study(tmp_path / "s.yaml", (), resume=False)


def unfinished(run):
    """Make a finished run of a study one in progress."""
    record = run.parents[2] / "stages" / "runs" / run.parent.name / f"{run.name}.json"
    record.rename(record.with_name(f"{run.name}.begun.json"))


def test_a_half_finished_run_goes_on(study):
    result, folder = study()
    whole = {f.name: f.read_bytes() for f in folder.glob("*.*")}
    run = folder / "runs/high/seed-1"
    unfinished(run)
    (run / "metrics.jsonl").write_text("".join((run / "metrics.jsonl").read_text().splitlines(True)[:2]))
    (folder / "study.json").unlink()
    assert study()[0] == result and {f.name: f.read_bytes() for f in folder.glob("*.*")} == whole
    assert (run / "ran.txt").read_text() == "1\n2\n3\n4\n3\n4\n"


def test_a_busy_run_is_left_alone_and_waited_for(study, capsys):
    result, folder = study()
    run = folder / "runs/low/seed-1"
    unfinished(run)
    held = Run.open(run, lock=True)
    done: list[object] = []
    thread = threading.Thread(target=lambda: done.append(study()[0]))
    thread.start()
    while "waiting for that" not in (said := capsys.readouterr().err):
        assert thread.is_alive() or done == [], said
        time.sleep(0.01)
    assert not done
    held.close()
    thread.join()
    assert done == [result]
    assert (run / "ran.txt").read_text() == "1\n2\n3\n4\n"


def test_the_page(study, tmp_path):
    study(about="What is *asked*.")
    words = ["study", "s.yaml", "--docs", "docs/deep/page.md", "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and len(done.stdout.splitlines()) == 1
    assert json.loads(done.stdout)["claims"][0]["verdict"] == "holds"
    page = (tmp_path / "docs/deep/page.md").read_text()
    assert page.startswith("# s\n\n") and "trailmark study s\n" in page and "![s](page.png)" in page
    assert (tmp_path / "runs/studies/s/table.md").read_text() in page
    recipe = yaml.safe_load((tmp_path / "runs/studies/s/runs/low/seed-2/recipe.yaml").read_text())
    assert recipe["seed"] == recipe["model"]["seed"] == 2 and recipe["name"] == "low, seed 2"
    assert "*high > low on success* holds: the interval" in page and "`skill=0.9`" in page
    assert (tmp_path / "docs/deep/page.png").is_file() and (tmp_path / "docs/deep/page.svg").is_file()
    shown = CliRunner().invoke(app, ["study", "s.yaml", "--seeds", "0,1"])
    assert "holds" in shown.stdout and json.loads(shown.stdout.splitlines()[-1])["seeds"] == [0, 1]


def test_an_arm_that_reads_the_runs_of_another_is_a_short_row(study):
    arms = {
        "high": {"set": {"skill": 0.4}},
        "low": {"of": "high", "episodes": "evaluation/low.jsonl"},
        "again": {"of": "high"},
    }
    rows = lambda result: page(result, "x.png").split("|---|---|---|---|\n")[1].splitlines()
    measures = {"success": {"episodes": "evaluation/high.jsonl"}}
    result, folder = study(arms=arms, measures=measures, claims=[], seeds=[0])
    assert [(a.get("of"), a.get("episodes")) for a in result["arms"]] == [
        (None, None), ("high", "evaluation/low.jsonl"), ("high", None),
    ]  # fmt: skip
    assert rows(result)[:3] == [
        "| high | count.yaml | `skill=0.4`, `steps=4` | 4 |",
        "| low | the runs of high | `evaluation/low.jsonl` | |",
        "| again | the runs of high | - | |",
    ]
    assert read_study(folder) == result
    swept, _ = study("sw", arms=arms, measures=measures, claims=[], seeds=[0], sweep={"cost": [1, 2]})
    assert rows(swept)[3] == "| low, cost=2 | the runs of high, cost=2 | `evaluation/low.jsonl` | |"


def test_bad_studies_are_a_sentence(study, tmp_path):
    for changes, said in [
        ({"budget": {}}, "a budget is one of steps, updates, tokens or seconds"),
        ({"budget": {"steps": 1, "tokens": 1}}, "a budget is one of"),
        ({"seeds": [1, 1]}, "a seed is listed twice"),
        ({"claims": ["high > lwo"]}, "there is no arm 'lwo'. Did you mean 'low'"),
        ({"claims": ["high > low on sucess"]}, "there is no measure 'sucess'. Did you mean 'success'"),
        ({"claims": ["high"]}, "expected 'arm > arm on measure'"),
        ({"arms": {"a": {"skil": 1}}}, "key 'arms.a.skil': is not known"),
        ({"arms": {"a": {"of": "b"}}}, "there is no arm 'b' with runs of its own"),
        ({"arms": {"a b": {}, "a_b": {"set": {"cost": 3}}}}, "would share the folder"),
        ({"recipe": None}, "has no recipe, and neither has the study"),
        ({"recipe": "no.yaml"}, "there is no such recipe"),
        ({"arms": {"a": {"set": {"skil": 1}}}, "claims": []}, "Did you mean 'skill'"),
        ({"sweep": {"skill": []}}, "has no values"),
    ]:
        with pytest.raises(RecipeError, match=said):
            study("bad", **changes)
        assert not (tmp_path / "runs/studies/bad").exists()  # found before anything runs
    done = CliRunner().invoke(app, ["study", "onlin-bandit"])
    assert done.exit_code == 2 and "Did you mean 'policy-gradient-bandit'" in done.stderr
    assert "no such study" in CliRunner().invoke(app, ["study", "no.yaml"]).stderr


def test_intervals_of_arms_and_differences():
    key = lambda i: (f"t{i}", 0, 1)
    same = [RunMeasure(1.0, {key(i): 1.0 for i in range(30)}, True)] * 3
    found = arm_interval(same)
    assert found.high == 1.0 and 0.8 < found.low < 0.95  # nothing varied, and yet 30 starts are only 30
    claim = Claim("a", "b", "m")
    nothing = difference(claim, same, same, [0, 1, 2])
    assert nothing.low < 0 < nothing.high
    own = [RunMeasure(s / 10, {(f"{s}-{i}", 0, 1): s / 10 for i in range(5)}) for s in range(3)]
    lost = [
        RunMeasure(1.0, {k: v for k, v in s.starts.items() if k[0] != "t3"}, True, frozenset([key(3)])) for s in same
    ]
    assert difference(claim, same, lost, [0, 1, 2]).n == 29 and arm_interval(lost).n == 29  # a failed start is left out
    assert arm_interval(own).method == "t"  # each seed had starts of its own
    with pytest.raises(DataError, match="seed 0: the two arms were not evaluated on the same starts"):
        difference(claim, same, own, [0, 1, 2])
    assert difference(Claim("a", "b", "m", paired=False), same, own, [0, 1, 2]).method == "welch"
    assert parse_claim("a > b on on it", ["a", "b"], ["on it", "it"], "f") == [Claim("a", "b", "on it")]


def test_every_study_in_the_repository_is_one():
    files = sorted((Path(__file__).parents[2] / "studies").glob("*.yaml"))
    assert "policy-gradient-bandit" in [f.stem for f in files]
    for f in files:
        load_study(f)


# --- the real thing, killed ---------------------------------------------------------------------------------------

REAL = [
    "study",
    "policy-gradient-bandit",
    "budget.steps=4",
    "set.eval.every=2",
    "set.eval.n=10",
    "set.checkpoint.every=2",
    "--json",
]


def real(folder, *more, seeds="0,1", **env):
    command = [sys.executable, "-m", "trailmark", *REAL, "--seeds", seeds, "--out", str(folder), *more]
    return forked.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def said_without_place(printed):
    (line,) = printed.splitlines()
    return {**json.loads(line), "out": ""}


def outputs(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


def test_killed_half_way_and_resumed_and_two_at_once(tmp_path):
    whole, killed, shared = tmp_path / "whole", tmp_path / "killed", tmp_path / "shared"
    first = real(whole)
    said, problems = first.communicate()
    assert first.returncode == 0, problems
    dying = real(killed, TRAILMARK_KILL_AT="segment.half#14")  # the third of six runs, in the middle of a file
    dying.communicate()
    assert dying.returncode == -9 and not (killed / "study.json").exists()
    assert len(list(killed.glob("stages/runs/*/seed-?.json"))) == 2
    again = real(killed)
    resumed, problems = again.communicate()
    assert again.returncode == 0, problems
    assert said_without_place(resumed) == said_without_place(said) and outputs(killed) == outputs(whole)
    assert set(outputs(whole)) == {"study.json", "table.md", "picture.png", "picture.svg"}
    pair = [real(shared), real(shared)]
    for process in pair:
        printed, problems = process.communicate()
        assert process.returncode == 0, problems
        assert said_without_place(printed) == said_without_place(said)
    assert outputs(shared) == outputs(whole)
    for run in whole.glob("runs/*/seed-*"):
        for other in (killed, shared):
            same = other / run.relative_to(whole)
            assert (same / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()
            assert sorted(p.name for p in (same / "checkpoints").iterdir()) == ["000002", "000004"]
