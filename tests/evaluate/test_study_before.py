"""Stages before the arms of a study: made once for a seed, named in what is set later, shared by all arms."""

import json
from pathlib import Path

import pytest
import yaml

from trailmark.errors import RecipeError
from trailmark.evaluate.study import load_study, run_study

METHOD = '''
"""Writes what it read, and how often it ran."""
import json
from trailmark.config import RunConfig
from trailmark.methods.base import Method

class Config(RunConfig):
    word: str = ""
    data: str = ""

class Saying(Method):
    Config = Config

    @classmethod
    def train(cls, config, run, resume=False):
        read = open(config.data).read() if config.data else ""
        (run.path / "said.txt").write_text(config.word + str(config.seed) + read)
        with open(run.path / "ran.txt", "a") as f:
            f.write("once\\n")
        run.log(config.steps, {"success": float(len(read))})
        return {}
'''
STUDY = {
    "before": {
        "lessons": {"gold": {"task": "arith", "options": {"level": 1}, "n": 3}},
        "first": {"recipe": "say.yaml", "set": {"word": "a", "data": "{lessons}"}},
    },
    "recipe": "say.yaml",
    "set": {"data": "{first}/said.txt"},
    "arms": {"b": {"set": {"word": "b"}}, "c": {"set": {"word": "c"}}},
    "seeds": [0, 1],
    "budget": {"steps": 2},
    "measures": {"success": {}},
    "claims": ["b > c on success"],
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("say_before.py").write_text(METHOD)
    Path("say.yaml").write_text("method: say_before\n")
    return tmp_path


def write(**changes):
    Path("s.yaml").write_text(yaml.safe_dump({**STUDY, **changes}, sort_keys=False))
    return Path("s.yaml")


def test_arms_share_what_was_made_before_them(here):
    result, out = run_study(write())
    for seed in (0, 1):
        lessons = (out / f"before/lessons/seed-{seed}").read_text()
        assert len(lessons.splitlines()) == 3 and "prompt" in json.loads(lessons.splitlines()[0])
        first = (out / f"before/first/seed-{seed}/said.txt").read_text()
        assert first == f"a{seed}{lessons}"
        for arm in "bc":
            assert (out / f"runs/{arm}/seed-{seed}/said.txt").read_text() == f"{arm}{seed}{first}"
    assert (out / "before/lessons/seed-0").read_text() != (out / "before/lessons/seed-1").read_text()
    assert {a["name"]: a["set"][0] for a in result["arms"]}["b"] == 'data="{first}/said.txt"'
    run_study(write())
    assert (out / "before/first/seed-0/ran.txt").read_text() == "once\n"


def test_rows_with_a_hint_are_made_for_each_seed(here):
    few = {"hints": {"train": 3, "val": 2, "lessons": 3}}
    _, out = run_study(write(before={"rows": few}, set={"data": "{rows}/talks.jsonl"}))
    talks = [(out / f"before/rows/seed-{seed}/talks.jsonl").read_text() for seed in (0, 1)]
    assert talks[0] != talks[1] and [len(t.splitlines()) for t in talks] == [7, 7]  # as many of test as of val
    assert (out / "runs/b/seed-1/said.txt").read_text() == f"b1{talks[1]}"
    at = (out / "before/rows/seed-0/talks.jsonl").stat().st_mtime_ns
    run_study(write(before={"rows": few}, set={"data": "{rows}/talks.jsonl"}))
    assert (out / "before/rows/seed-0/talks.jsonl").stat().st_mtime_ns == at


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ({"a b": {"recipe": "say.yaml"}}, "before.a b"),
        ({"a": {}}, "either a recipe or gold"),
        ({"a": {"recipe": "none.yaml"}}, "none.yaml"),
    ],
)
def test_a_wrong_stage_is_said_before_anything_runs(here, stage, said):
    with pytest.raises(RecipeError, match=said):
        run_study(write(before=stage, set={}))
    assert not Path("runs").exists()


def test_a_study_without_stages_is_as_before(here):
    study, specs, _ = load_study(write(before={}, set={}))
    assert study.before == {} and specs[0].words(Path("o"), 0) == list(specs[0].overrides)
