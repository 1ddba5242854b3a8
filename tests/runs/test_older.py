"""Recipes in older words: refused by `train` with the new ones, understood by everything that opens a run."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.config import dump, resolve
from trailmark.methods import complete, get_config, get_method
from trailmark.runs import older
from trailmark.runs.diff import diff_runs
from trailmark.runs.launch import launch
from trailmark.runs.store import Run
from trailmark.seats.locate import locate

TINY = {"name": "tiny", "shape": {"layers": 1, "width": 32, "heads": 2, "context": 64}}
BANDIT = {
    "method": "policy_gradient", "out": "run", "model": TINY, "steps": 2, "starts": 2, "n": 4,
    "task": {"name": "solved", "options": {"kind": "bandit", "rewards": [0, 1]}}, "engine": {"slots": 4, "max_len": 64},
    "eval": {"every": 2, "n": 4}, "checkpoint": {"every": 1, "keep_last": 9},
}  # fmt: skip
OREO = {  # what a resolved recipe of method oreo held when it was also the home of DPO
    "method": "oreo", "data": "scored.jsonl", "beta": None, "level": "token", "states": None, "split": "newline",
    "kl": {"kind": "reverse", "alpha": 0.01, "target": None, "lr": 0.001, "start": 0.0},
    "reward": {"mul": 1.0, "add": 0.0}, "importance": "none", "clip_log": None, "hinge": 0.0, "target": "policy",
    "freeze": 0.0, "critic_only": False, "critic": {"name": None, "lora": None, "optim": None}, "pairs": 3,
    "desirable": 1.0, "undesirable": 1.0, "final": {"start": False, "search": [], "temperature": 1.0},
}  # fmt: skip


def call(*words):
    return CliRunner().invoke(app, list(map(str, words)))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run as an older version left it: the same numbers under the method's old name."""
    monkeypatch.chdir(tmp_path)
    launch(get_method("policy_gradient"), resolve(BANDIT, get_config("policy_gradient")))
    age(Path("run"))
    return Path("run")


def age(run):
    file = run / "recipe.yaml"
    file.write_text(file.read_text().replace("method: policy_gradient\n", "method: online\n"))
    assert yaml.safe_load(file.read_text())["method"] == "online"


def test_translation():
    assert older.translate({"method": "online", "n": 3}) == {"method": "policy_gradient", "n": 3}
    assert older.translate({"method": "reflect", "restrict": False}) == {"method": "reflect", "head": "vocabulary"}
    dpo = older.translate({**OREO, "objective": "dpo"})
    assert dpo == {
        "method": "preference", "objective": "dpo", "data": "scored.jsonl", "beta": None, "pairs": 3, "desirable": 1.0,
        "undesirable": 1.0, "final": {"start": False},
    }  # fmt: skip
    oreo = older.translate({**OREO, "objective": "oreo"})
    assert oreo == {k: v for k, v in OREO.items() if k not in ("pairs", "desirable", "undesirable")}
    for now in (dpo, oreo):
        assert older.translate(now) == now
        resolve(now, get_config(now["method"]))


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        (
            "method: reflect\nrestrict: true\n",
            "old.yaml:2: key 'restrict': restrict is now called head: write 'head: listed'.",
        ),
        ("method: reflect\nrestrict: false\n", "write 'head: vocabulary'."),
        ("method: online\n", "old.yaml:1: key 'method': method online is now called policy_gradient: write"),
        (
            "method: oreo\nobjective: dpo\n",
            "old.yaml:2: key 'objective': dpo is now an objective of method preference: write",
        ),
        ("method: oreo\nobjective: rejection\n", "write 'method: preference' and 'objective: rejection'"),
        (
            "method: oreo\nobjective: oreo\n",
            "old.yaml:2: key 'objective': method oreo has one objective, so leave this key out",
        ),
    ],
)
def test_train_says_the_new_words(tmp_path, monkeypatch, recipe, says):
    monkeypatch.chdir(tmp_path)
    Path("old.yaml").write_text(f"{recipe}data: x.jsonl\n")
    done = call("train", "old.yaml")
    assert done.exit_code == 2 and says in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["old.yaml"]


def test_an_older_run_is_opened_by_every_command(run):
    assert locate("run").method == "policy_gradient"
    done = call("eval", "run", "--json")
    assert done.exit_code == 0 and json.loads(done.stdout)["rows"][0]["scored"] == 4, done.output
    done = call("verify", "run", "--json")
    assert done.exit_code == 0 and json.loads(done.stdout)["method"] == "policy_gradient", done.output
    assert call("report", "run").exit_code == 0 and call("inspect", "run").exit_code == 0
    assert call("compare", "run", "run").exit_code == 0


def test_an_older_run_is_the_run_of_today(run, tmp_path):
    config = resolve({**BANDIT, "out": "again"}, get_config("policy_gradient"))
    launch(get_method("policy_gradient"), config)
    assert diff_runs("run", "again") == [] and call("diff", "run", "again").stdout == "identical\n"
    lacks = yaml.safe_load(Path("run/recipe.yaml").read_text())
    del lacks["old"], lacks["eval"]["patience"]  # as a version would leave it that did not have these keys
    Path("run/recipe.yaml").write_text(yaml.safe_dump(lacks))
    assert call("diff", "run", "again").stdout == "identical\n"
    assert complete(lacks) == {**config.model_dump(mode="json"), "out": "run"}
    lacks["gamma"] = 0.5
    Path("run/recipe.yaml").write_text(yaml.safe_dump(lacks))
    assert call("diff", "run", "again").stdout == "recipe.yaml: key 'gamma': 0.5 and 1.0\n"


def test_an_older_run_goes_on(run):
    whole = resolve({**BANDIT, "steps": 3, "out": "whole"}, get_config("policy_gradient"))
    launch(get_method("policy_gradient"), whole)
    Path("r.yaml").write_text(dump(whole.model_copy(update={"out": "run"})))
    done = call("train", "r.yaml", "--resume")
    assert done.exit_code == 0, done.output
    assert Run("run").recipe.startswith("method: policy_gradient\n")
    assert [str(d) for d in diff_runs("run", "whole") if d.file.startswith("episodes")] == []
    changed = call("train", "r.yaml", "--resume", "gamma=0.5")
    assert changed.exit_code == 2 and "belongs to another recipe (key 'gamma': 1.0 and 0.5)" in changed.stderr


def test_files_that_moved_are_compared_by_their_names_of_today(run, monkeypatch):
    launch(get_method("policy_gradient"), resolve({**BANDIT, "out": "again"}, get_config("policy_gradient")))
    Path("run/episodes/000002.jsonl").rename("run/episodes/old-000002.jsonl")
    assert len(diff_runs("run", "again")) == 2
    monkeypatch.setattr(older, "MOVED", [(r"^episodes/old-", "episodes/")])
    assert diff_runs("run", "again") == []
