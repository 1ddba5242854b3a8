"""What a name of a model means, and what is said where it means nothing."""

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.config import ModelConfig, dump, resolve
from trailmark.errors import ModelError, RecipeError
from trailmark.methods import get_method
from trailmark.methods.reflect.chains import chain
from trailmark.runs.diff import diff_runs
from trailmark.runs.launch import launch
from trailmark.runs.store import Run
from trailmark.score.value_models import locate_value
from trailmark.seats.model_names import locate, models_in, stored_model
from trailmark.seats.pinned_models import pin_models

TINY = {"name": "tiny", "shape": {"layers": 1, "width": 16, "heads": 2, "context": 64}}
ARITH = {
    "method": "policy_gradient", "task": {"name": "arith"}, "prompts_per_step": 2, "n": 2, "steps": 2, "model": TINY,
    "checkpoint": {"every": 1, "keep_last": 9},
    "sampling": {"max_tokens": 3, "stop": ["####"]}, "engine": {"max_num_seqs": 4, "max_len": 48},
    "objective": {"kind": "clipped", "beta": 0.1},
}  # fmt: skip


def train(out, resume=False, **more):
    method = get_method("policy_gradient")
    config = resolve({**ARITH, **more, "out": str(out)}, method.Config)
    launch(method, config, resume)
    return config


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    train(root / "first")
    return root


def test_every_kind_of_name(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(runs)
    run, newest = (runs / "first").resolve(), Path("first/checkpoints/000002")
    for name, kind in (
        ("first", "run"),
        ("first/", "run"),
        (str(newest), "checkpoint"),
        (f"{newest}/policy", "folder"),
    ):
        found = locate(name)
        assert (found.kind, found.folder, found.checkpoint, found.run) == (kind, f"{newest}/policy", newest, run)
        assert (found.method, found.engine.max_len, found.sampling.stop, found.dtype) == (
            "policy_gradient",
            48,
            ["####"],
            "float32",
        )
    assert locate("first/checkpoints/000001").folder == "first/checkpoints/000001/policy"
    for name, kind in (("tiny", "made"), ("smollm2", "made"), ("org/model", "hub"), ("http://h:1", "server")):
        found = locate(name)
        assert (found.kind, found.folder, found.run, found.recipe) == (kind, name, None, {})
    alone = tmp_path / "model"
    shutil.copytree(runs / newest / "policy", alone)
    found = locate(str(alone))
    assert (found.kind, found.folder, found.run, found.checkpoint) == ("folder", str(alone), None, None)
    assert models_in(runs / newest) == {"policy": runs / newest / "policy"}


def test_what_is_not_there_is_named(runs, tmp_path):
    newest = runs / "first/checkpoints/000002"
    for name in ("first/checkpoints/000009", "first/checkpoints/000009/policy", "first/policy"):
        said = f"model.name: there is no {runs / name}. Checkpoints of {runs / 'first'}: 000001, 000002."
        with pytest.raises(ModelError, match=re.escape(said)):
            locate(str(runs / name), key="model.name")

    def refused(name, seat="policy", key=""):
        with pytest.raises(ModelError) as problem:
            locate(str(name), seat, key)
        return str(problem.value)

    assert (
        refused(runs / "first", "critic", "critic.name")
        == f"critic.name: {newest} holds no critic, but: policy. Name one of these folders."
    )
    assert "name the run, or one of them" in refused(newest.parent)
    young = Run.create(tmp_path / "young", "method: policy_gradient\n")
    assert refused(young.path).startswith(f"{young.path} has no checkpoint yet")
    (young.checkpoints_dir / "000003").mkdir()
    assert "no complete checkpoint: 000003 lacks its state.json" in refused(young.path)
    copy = tmp_path / "copy"
    shutil.copytree(runs / "first", copy)
    (copy / "checkpoints/000002/policy/config.json").unlink()
    said = refused(copy)
    assert f"{copy}/checkpoints/000002/policy is damaged" in said and "Other checkpoints of this run: 000001." in said
    outer = tmp_path / "outer"
    shutil.copytree(runs / "first", outer / "round-1")
    (outer / "recipe.yaml").write_text("method: oreo_rounds\n")
    assert "but runs inside it: round-1. Name one of these." in refused(outer)
    (copy / "recipe.yaml").write_text("- a list\n")
    with pytest.raises(RecipeError, match="a recipe is a mapping"):
        locate(str(copy / "checkpoints/000001"))
    with pytest.raises(ModelError, match="--value nowhere: there is no such run or folder"):
        locate_value("nowhere")


def test_a_stored_model_keeps_its_own_tokenizer(runs):
    folder = runs / "first/checkpoints/000002/policy"
    section = ModelConfig(name="tiny", tokenizer="other", shape=TINY["shape"])
    assert stored_model(section, folder).model_dump(include={"name", "tokenizer", "shape"}) == {
        "name": str(folder), "tokenizer": None, "shape": None,
    }  # fmt: skip
    assert stored_model(section, runs).tokenizer == "other"


def test_train_takes_a_run_and_remembers_which_checkpoint_it_was(runs, monkeypatch):
    """`second` names the run `first`, which goes on before `second` is resumed. `exact` names the checkpoint's folder
    from the start: the two must be the same, bit for bit, and so must their references."""
    monkeypatch.chdir(runs)
    shutil.copytree("first", "grows")
    train("second", model={"name": "grows"}, steps=1)
    assert json.loads(Path("second/models.json").read_text()) == {
        "model.name": {"name": "grows", "folder": "grows/checkpoints/000002/policy"}
    }
    assert re.search(r"^  name: grows$", Path("second/recipe.yaml").read_text(), re.MULTILINE)
    train("grows", steps=3, resume=True)
    assert locate("grows").checkpoint.name == "000003"
    train("second", model={"name": "grows"}, steps=3, resume=True)
    train("exact", model={"name": "first/checkpoints/000002/policy"}, steps=3)
    assert not Path("exact/models.json").exists()
    for file in Path("exact/episodes").glob("*"):  # the only trace of the other name
        file.write_text(file.read_text().replace('"first/', '"grows/'))
    assert [str(d) for d in diff_runs("second", "exact")] == [
        """recipe.yaml: key 'model.name': "grows" and "first/checkpoints/000002/policy\""""
    ]
    assert [(link.run.name, link.until) for link in chain("second")] == [("grows", 2), ("second", None)]
    config = resolve(
        {**ARITH, "model": {"name": "grows"}, "out": "second", "steps": 3}, get_method("policy_gradient").Config
    )
    assert pin_models(config, Run("second"), write=False).model.name == "grows/checkpoints/000002/policy"
    assert pin_models(config).model.name == "grows/checkpoints/000003/policy" and "name: grows" in dump(config)
    shutil.rmtree("grows/checkpoints/000002")
    with pytest.raises(
        ModelError, match=r"model.name: this run began from grows/checkpoints/000002/policy .* which is gone"
    ):
        train("second", model={"name": "grows"}, steps=4, resume=True)
    assert len(Run("second").recipe) and (runs / "second/checkpoints/000003").is_dir()  # nothing of it is lost


def test_the_command_says_what_a_name_lacks(runs, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump(resolve({**ARITH, "out": str(tmp_path / "out")}, get_method("policy_gradient").Config)))

    def told(*words, code=2):
        done = CliRunner().invoke(app, ["train", str(recipe), *words])
        assert (done.exit_code == code and not (tmp_path / "out").is_dir()) or not any(
            (tmp_path / "out").glob("*.yaml")
        )
        return done.output

    assert "model.name: http://127.0.0.1:9 is a server" in told("model={name: 'http://127.0.0.1:9'}")
    Run.create(tmp_path / "empty", "method: policy_gradient\n").close()
    for words in ([], ["--dry-run"]):
        assert f"model.name: {tmp_path}/empty has no checkpoint yet" in told(
            f"model={{name: {tmp_path}/empty}}", *words
        )
    dry = told(f"model={{name: {runs}/first}}", "--dry-run", code=0)
    assert f"model: {runs}/first/checkpoints/000002/policy (llama" in dry and f"name: {runs}/first\n" in dry


def test_the_best_checkpoint(runs, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(runs / "first", run)
    with pytest.raises(ModelError, match="has no best checkpoint: nothing was evaluated"):
        locate(f"{run}/checkpoints/best")
    state = run / "checkpoints/000002/state.json"
    held = json.loads(state.read_text())
    state.write_text(json.dumps({**held, "best": [[0.5, 1], [0.25, 2]]}))
    found = locate(f"{run}/checkpoints/best")
    assert (found.kind, found.folder) == ("checkpoint", f"{run}/checkpoints/000001/policy") and found.run == run
    shutil.rmtree(run / "checkpoints/000001")
    with pytest.raises(ModelError, match="its best checkpoint, 000001, was not kept"):
        locate(f"{run}/checkpoints/best")
