"""What a stage depends on follows from what it says that it reads; and the metrics of rounds."""

import json
from pathlib import Path

import pytest

from trailmark.config import resolve
from trailmark.methods.configs import SftRecipe
from trailmark.methods.offline_configs import PreferenceRecipe
from trailmark.methods.oreo.config import RoundsRecipe
from trailmark.methods.pipeline import Rounds, numbers, recipe_stage, round_of, training_stage
from trailmark.runs.stages import run_stages, stage_state
from trailmark.runs.store import Run, read_metrics

ROUNDS = {"method": "oreo_rounds", "collect": {"prompts": 3, "sampling": {"max_tokens": 9}}, "seed": 4}


def stage(root, keys, after=(), inputs=None, **more):
    return recipe_stage("s", lambda folder: None, resolve({**ROUNDS, **more}, RoundsRecipe), root, keys, after, inputs)


def test_settings_are_the_values_of_the_keys(tmp_path):
    found = lambda *keys, **more: stage(tmp_path, keys, **more).settings
    assert found("collect", "seed") == {"collect": {"prompts": 3, "sampling": {"max_tokens": 9}}, "seed": 4}
    assert found("collect.prompts", "steps") == {"collect": {"prompts": 3}}  # defaults are left out
    assert found("collect", "-collect.sampling") == {"collect": {"prompts": 3}}
    assert found("task", task={"name": "arith", "options": {"path": f"{tmp_path}/x"}}) == {
        "task": {"name": "arith", "options": {"path": "{root}/x"}}
    }
    with pytest.raises(AssertionError, match="no key colect"):
        found("colect.starts")


def test_files_and_models_are_those_that_the_keys_name(tmp_path):
    (tmp_path / "model").mkdir()
    more = {"model": {"name": str(tmp_path / "model")}, "task": {"name": "prompts", "options": {"path": "rows.jsonl"}}}
    found = stage(tmp_path, ["model", "task"], ["before"], {"file": "x"}, **more)
    assert found.inputs == {"before": tmp_path / "before", "model.name": str(tmp_path / "model"), "file": "x"}
    assert found.files == {"task.options.path": Path("rows.jsonl")}
    for keys in (["seed"], ["model.name"], ["model", "-model.name"]):
        assert stage(tmp_path, keys, **more).inputs == {} and stage(tmp_path, keys, **more).files == {}


def preference(root, **more):
    given = {"method": "preference", "data": f"{root}/made/train.jsonl", "format": "episodes", **more}
    return training_stage("policy", resolve(given, PreferenceRecipe), root)


def test_a_training_reads_what_its_recipe_names_below_the_folder(tmp_path):
    found = preference(tmp_path, model={"name": f"{tmp_path}/first"}, pair_file="mine.jsonl")
    assert found.inputs == {"first": tmp_path / "first", "made/train.jsonl": tmp_path / "made/train.jsonl"}
    assert found.settings["data"] == "{root}/made/train.jsonl" and found.files == {"pair_file": Path("mine.jsonl")}
    assert "desirable" in found.unread and "desirable" not in preference(tmp_path, objective="kto").unread
    value = {"task": {"name": "arith"}, "final": {"choose": 2, "value": f"{tmp_path}/prm"}}
    recipe = resolve({"method": "preference", "data": "x", "format": "episodes", **value}, PreferenceRecipe)
    inputs = lambda *unread: training_stage("p", recipe, tmp_path, unread).inputs
    assert inputs() == {"prm": tmp_path / "prm"} and inputs("final") == {}


def test_a_file_of_episodes_is_read_with_its_annotations(tmp_path):
    (tmp_path / "made").mkdir()
    for name in ("train", "train.annotations"):
        (tmp_path / "made" / f"{name}.jsonl").write_text("{}\n")
    given = {"method": "sft", "data": f"{tmp_path}/made/train.jsonl"}
    made = training_stage("policy", resolve(given, SftRecipe), tmp_path)
    run_stages(tmp_path, [type(made)(made.name, lambda folder: None, made.settings, made.inputs)])
    assert stage_state(tmp_path, made) == "done"
    (tmp_path / "made/train.annotations.jsonl").write_text('{"other": 1}\n')
    assert stage_state(tmp_path, made) == (
        "to do again: input 'made/train.jsonl' has changed (train.annotations.jsonl)"
    )


def test_names_of_stages_say_their_round():
    assert [round_of(n) for n in ("sft", "states-1", "a-b-12", "-1", "x-y")] == [
        ("sft", 0), ("states", 1), ("a-b", 12), ("-1", 0), ("x-y", 0),
    ]  # fmt: skip
    assert numbers({"step": 3, "a": 1, "b": 0.5, "c": True, "d": "x"}) == {"a": 1, "b": 0.5}


def test_a_round_is_logged_once_and_again_where_it_has_changed(tmp_path):
    with Run.create(tmp_path / "run", "method: x\n") as run:
        for _ in range(2):
            rounds = Rounds(run)
            for k in (1, 2):
                rounds.add(k, {"a/n": k}, False)
                rounds.add(k, {"b/n": 0}, True)
            assert read_metrics(run.path) == [{"step": k, "a/n": k, "b/n": 0} for k in (1, 2)]
        rounds = Rounds(run)
        rounds.add(1, {"a/n": 7}, True)  # what follows is not true any more
        assert [json.loads(line) for line in run.metrics_file.read_text().splitlines()] == [{"step": 1, "a/n": 7}]
