"""Every choice that a key of LPR documents: each recipe takes it or refuses it with a sentence, and what decides the
classes of the reward model goes through the whole road."""

import json
import typing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trailmark import methods
from trailmark.commands.app import app
from trailmark.config import Config, load_recipe, resolve
from trailmark.errors import RecipeError, TrailmarkError
from trailmark.methods import pipeline
from trailmark.methods.lpr.config import LprRecipe
from trailmark.methods.lpr.method import LprMethod
from trailmark.methods.lpr.round import Round
from trailmark.methods.offline_configs import PreferenceRecipe, RewardModelRecipe
from trailmark.methods.online_configs import StepRlRecipe
from trailmark.recipe import merged
from trailmark.runs.launch import launch
from trailmark.runs.store import Run, read_metrics

RECIPES = Path(__file__).parents[2] / "recipes"
SECTIONS = {"preference": PreferenceRecipe, "prm": RewardModelRecipe, "rl": StepRlRecipe}
SCRIPT = {"kind": "scripted", "function": f"{Path(__file__).with_name('lpr_careless.py')}:careless"}
TINY = {
    "method": "lpr", "steps": 1,
    "model": {"name": "tiny", "shape": {"layers": 1, "width": 16, "heads": 2, "context": 96}},
    "task": {"name": "arith", "options": {"level": 2}}, "seats": {"policy": SCRIPT}, "sample": {"prompts": 4, "n": 6},
    "sampling": {"max_tokens": 40}, "engine": {"max_num_seqs": 8, "max_len": 96}, "states": {"start": 0.0,
    "ratio": 1.0},
    "prm": {"steps": 1, "batch": 4}, "pairs": {"margin": 0.0}, "preference": {"steps": 1, "batch": 2},
}  # fmt: skip


def choices(annotation):
    if annotation is bool or typing.get_origin(annotation) is typing.Literal:
        return [True, False] if annotation is bool else list(typing.get_args(annotation))
    return [c for inner in typing.get_args(annotation) for c in choices(inner)]


def keys(schema, path=()):
    """Every key with every value that it lists."""
    for name, field in schema.model_fields.items():
        inside = [c for c in (field.annotation, *typing.get_args(field.annotation)) if isinstance(c, type)]
        for section in (c for c in inside if issubclass(c, Config)):
            yield from keys(section, (*path, name))
        yield from ((".".join((*path, name)), value) for value in choices(field.annotation) if name != "offload")


def every():
    yield from keys(LprRecipe)
    for section, schema in SECTIONS.items():
        yield from (
            (f"{section}.{key}", v) for key, v in keys(schema) if not key.startswith(("model", "task", "seats"))
        )
    yield from (("complete.n", k) for k in (1, 2, 3, 4))


def kept(function):
    """The same function, which remembers its last answer."""
    last = [None, None]

    def ask(config):
        if config is not last[0]:
            last[:] = config, function(config)
        return last[1]

    return ask


@pytest.mark.parametrize("name", sorted(p.stem for p in RECIPES.glob("lpr-*.yaml") if p.stem != "lpr-logiqa2-ppo"))
def test_every_listed_value_is_taken_or_refused_with_a_sentence(name, monkeypatch):
    base = load_recipe(RECIPES / f"{name}.yaml").raw
    taken = set()
    for function in ("named_files", "_models"):  # every stage asks for those of one recipe
        monkeypatch.setattr(pipeline, function, kept(getattr(pipeline, function)))
    for key, value in every():
        change = value
        for part in reversed(key.split(".")):
            change = {part: change}
        try:
            LprMethod.check(resolve(merged(base, change), LprRecipe))
            taken.add((key, value))
        except TrailmarkError as refused:
            assert str(refused) and "\n" not in str(refused)
    wanted = {("labels.binary", True), *(("prm.kind", k) for k in ("outcome", "pairwise", "scalar", "classes"))}
    assert taken >= wanted | {("complete.n", k) for k in (1, 2, 3, 4)} and len(taken) > 100


@pytest.mark.parametrize("name", ["lpr-logiqa2", "lpr-reclor"])
@pytest.mark.parametrize(
    "word",
    ["labels.binary=true", "prm.kind=outcome", "prm.kind=pairwise", "prm.kind=scalar", "complete.n=1", "complete.n=2"],
)
def test_the_papers_recipe_can_be_told_otherwise(name, word):
    config = methods.resolve_recipe(load_recipe(RECIPES / f"{name}.yaml", [word]))
    assert LprMethod.check(config)[0].startswith("stages: written, lessons, sft, solutions-1")
    read = Round(config, Run(Path(config.out))).read().classes
    assert read == {"prm.kind=pairwise": None, "prm.kind=scalar": None, "complete.n=2": [2]}.get(word, [1])


def test_the_papers_recipe_reads_two_or_three_right_completions():
    config = methods.resolve_recipe(load_recipe(RECIPES / "lpr-logiqa2.yaml"))
    assert Round(config, Run(Path(config.out))).read().classes == [2, 3]


OTHERS = [
    ({"labels": {"binary": True}}, [1]),
    ({"complete": {"n": 1}}, [1]),
    ({"complete": {"n": 2}}, [2]),
    ({"prm": {"kind": "outcome"}}, [1]),
    ({"prm": {"kind": "pairwise"}}, None),
    ({"prm": {"kind": "scalar"}}, None),
]


@pytest.mark.parametrize("more, classes", OTHERS)
def test_the_whole_road_with_other_classes(tmp_path, more, classes):
    config = resolve({**merged(TINY, more), "out": str(tmp_path / "run")}, LprRecipe)
    launch(LprMethod, config)
    road = Round(config, Run(tmp_path / "run"))
    rewards, _ = road.rewards(road.solved())
    assert road.read().classes == classes and len(rewards) == len(road.solved())
    assert read_metrics(tmp_path / "run")[-1]["pairs/pairs"] > 0


@pytest.mark.parametrize(
    "more, said",
    [
        ({"labels": {"binary": True}}, "there is no class 2: labels.binary has two. Leave read.classes out"),
        ({"complete": {"n": 1}}, "there is no class 2: complete.n 1 has 2. Leave read.classes out"),
        ({"complete": {"n": 2}}, "there is no class 3: complete.n 2 has 3."),
        ({"prm": {"kind": "outcome"}}, "there is no class 2: prm.kind outcome has 2 outputs."),
        ({"prm": {"kind": "scalar"}}, "there is no class 2: prm.kind scalar has 1 output."),
        (
            {"prm": {"outputs": 7}},
            "key 'outputs' is set by lpr itself (from complete.n and labels.binary): leave it out",
        ),
    ],
)
def test_classes_that_do_not_exist_are_refused_before_anything_is_made(tmp_path, more, said):
    with pytest.raises(RecipeError) as caught:
        resolve({**merged({**TINY, "read": {"classes": [2, 3]}}, more), "out": str(tmp_path / "run")}, LprRecipe)
    assert said in str(caught.value)
    (tmp_path / "r.yaml").write_text(json.dumps(merged({**TINY, "read": {"classes": [2, 3]}}, more)))
    done = CliRunner().invoke(app, ["train", str(tmp_path / "r.yaml"), f"out={tmp_path / 'run'}"])
    assert done.exit_code == 2 and "Traceback" not in done.output and not (tmp_path / "run").exists()
