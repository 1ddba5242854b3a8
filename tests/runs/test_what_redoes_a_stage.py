"""A stage is made again if something changes that it reads, and for nothing else: every key of every recipe in stages
is changed, and compared with what was read while the stage was made."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import yaml

from trailmark import methods
from trailmark.config import Config, dump, resolve
from trailmark.errors import TrailmarkError
from trailmark.methods import get_config
from trailmark.methods.pipeline import some
from trailmark.runs import stages as pipeline
from trailmark.runs.launch import launch
from trailmark.runs.store import Run

SOLVER = f"{Path(__file__).parents[1] / 'methods/lpr_careless.py'}:careless"
TINY = {"name": "tiny", "shape": {"layers": 1, "width": 16, "heads": 2, "context": 96}}
SCRIPT = {"kind": "scripted", "function": SOLVER}
LPR = {
    "method": "lpr", "steps": 1, "model": TINY, "task": {"name": "arith", "options": {"level": 2}},
    "seats": {"teacher": SCRIPT, "policy": SCRIPT}, "teacher": {"prompts": 4, "n": 3, "sampling": {"max_tokens": 40}},
    "sft": {"steps": 1, "batch": 2}, "sample": {"prompts": 4, "n": 6}, "sampling": {"max_tokens": 40},
    "engine": {"max_num_seqs": 8, "max_len": 96}, "states": {"start": 0.0, "ratio": 1.0, "shards": 2},
    "labels": {"dev_shards": [0]}, "prm": {"steps": 1, "batch": 4},
    "pairs": {"margin": 0.0, "best_of": 9, "max_wrong": 9, "states": {"margin": 0.0}},
    "preference": {"steps": 1, "batch": 2}, "eval": {"every": 1, "n": 2, "split": "test"},
    "rl": {"algorithm": "ppo", "steps": 1, "prompts_per_step": 2, "rewards": {"right": 1.0}},
}  # fmt: skip
ROUNDS = {
    "method": "oreo_rounds", "steps": 2, "training": 1, "batch": 2, "model": TINY, "seed": 0,
    "task": {"name": "arith", "options": {"level": 1}}, "collect": {"prompts": 2, "n": 2,
    "sampling": {"max_tokens": 8}},
    "engine": {"max_num_seqs": 4, "max_len": 96},
}  # fmt: skip
REFLECT = {
    "method": "reflect", "steps": 1, "task": {"name": "taxi", "options": {"mode": "pickup"}}, "thought": 64,
    "model": {"name": "tiny", "shape": {"layers": 1, "width": 16, "heads": 2, "context": 1024}},
    "engine": {"max_num_seqs": 4, "max_len": 1024}, "teacher": {"prompts": 2}, "rl": {"prompts_per_step": 2,
    "replay": 0},
    "sft": {"reflector": 1, "policy": 1, "batch": 2}, "eval": {"every": 1, "n": 2}, "final": {"n": 1},
}  # fmt: skip
EPO = {
    "method": "epo_rounds", "steps": 2, "training": 1, "batch": 2,
    "task": {"name": "negotiation", "options": {"max_turns": 4}},
    "model": {"name": "tiny", "shape": {"layers": 1, "width": 16, "heads": 2, "context": 2048}},
    "prompts": {"strategist": "{scene}", "agent": "{scene}"},
    "seats": {"strategist": {"kind": "local", "trained": True, "sampling": {"max_tokens": 2}},
              "agent": {"kind": "scripted", "function": "trailmark.tasks.negotiation.players:advised",
                        "sampling": {"max_tokens": 120}}},
    "collect": {"prompts": 2, "n": 2}, "judge": {"kind": "rule"}, "eval": {"every": 1, "n": 2},
    "shape": {"least": -1.0},
    "teach": {"function": "trailmark.tasks.negotiation.players:anything", "prompts": 2, "steps": 1},
}  # fmt: skip
# other roads through LPR: the task's own solutions, worse versions, pairs of steps or of values
WORSE = {"kind": "scripted", "function": f"{SOLVER.removesuffix('careless')}worse"}
STEPS = {**LPR, "teacher": {"gold": True, "prompts": 4}, "seats": {"policy": SCRIPT, "worsener": WORSE}, "worsen": {},
         "pairs": {"steps": {"by": "score", "margin": 0.0}}}  # fmt: skip
VALUES = {**LPR, "complete": {"sampling": {"max_tokens": 40}}, "pairs": {"values": {"same": 0.9, "encoder": "tiny"}},
          "preference": {"steps": 1, "batch": 2, "objective": "rejection"}, "prm": {"kind": "outcome", "steps": 1}}
PLAIN = {**LPR, "pairs": {"process": False}, "read": {"classes": [2, 3]}, "rl": None}
GIVEN = {"lpr": LPR, "lpr plain": PLAIN, "lpr steps": STEPS, "lpr values": VALUES, "oreo_rounds": ROUNDS,
         "reflect": REFLECT, "epo_rounds": EPO}  # fmt: skip
# read where the list of stages is made
BUILDS = {"training", "anchor", "critic_from", "learn_from", "teacher.gold", "teacher.replay"}
SECTIONS = {"sft", "prm", "preference", "rl"}  # recipes of trainings
LEFT = BUILDS | SECTIONS


def listed(config):
    return methods.get_method(config.method).stages(config, Run(Path(config.out)))


@pytest.fixture(scope="module", params=GIVEN)
def made(request, tmp_path_factory):
    """A finished run of a recipe in stages, its recipe, and what each stage read of it: class and field."""
    given = GIVEN[request.param]
    root = tmp_path_factory.mktemp(request.param.replace(" ", "_")) / "run"
    config = resolve({**given, "out": str(root)}, get_config(given["method"]))
    reads, now, make = {}, [], pipeline._make

    def spy(self, name):
        if now and name in type(self).model_fields:
            reads.setdefault(now[-1], set()).add((type(self).__name__, name))
        return object.__getattribute__(self, name)

    def making(place, say, again=False):
        inner = place.stage.make

        def build(folder):
            now.append(place.stage.name)
            try:
                return inner(folder)
            finally:
                now.pop()

        place.stage = dataclasses.replace(place.stage, make=build)
        return make(place, say, again)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Config, "__getattribute__", spy)
        patch.setattr(pipeline, "_make", making)
        launch(methods.get_method(given["method"]), config)
    return config, reads


def leaves(value, path=()):
    """Every key of a recipe with the class and the name of its field."""
    for name in type(value).model_fields:
        inner = object.__getattribute__(value, name)
        if isinstance(inner, Config):
            yield from leaves(inner, (*path, name))
        else:
            yield (*path, name), (type(value).__name__, name), inner


def others(value):
    """Other values that a key may have."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1, value / 2, value * 0.9, 1, 0.5]
    if isinstance(value, str):
        return ["other", "1", *(w for w in WORDS if w != value)]
    if isinstance(value, list | tuple):
        return [[], [0], ["x"], [0.8, 0.9]]
    return [1, 0.5, "other", {}, [0], True]


WORDS = ("min", "react", "any", "finish", "keep", "discard", "before", "none", "tree", "linear", "step", "start",
         "fresh", "all", "sentence", "float64", "cpu", "bf16", "permute", "alphabet", "ema", "behaviour")  # fmt: skip


def changes(config):
    """The recipe with every key changed, one at a time."""
    text = yaml.safe_load(dump(config))
    for path, field, value in leaves(config):
        if path[0] in ("method", "name", "out", "trackers", "files") or {path[-1], ".".join(path)} & LEFT:
            continue
        for new in others(value):
            raw = json.loads(json.dumps(text))
            at = raw
            for part in path[:-1]:
                at = at[part]
            at[path[-1]] = new
            try:
                yield ".".join(path), field, resolve(raw, type(config))
                break
            except TrailmarkError:
                continue


def touched(config, other):
    """The stages whose settings a change makes others, and for each stage those that it is made from."""
    root, direct, above = Path(config.out), set(), {}
    before = {s.name for s in listed(config)}
    for stage in listed(other):
        named = [Path(p) for p in stage.inputs.values()]
        named = [p.relative_to(root) for p in named if p.is_relative_to(root)]
        names = {part for p in named for part in p.parts}
        above[stage.name] = names | {f"collect-{int(n[:6])}" for n in names if n[:6].isdigit()}
        if stage.name in before:
            record = json.loads(pipeline.record_of(root, stage.name).read_text())
            wanted = {**record, "settings": pipeline._plain(stage)}
            direct |= {stage.name} if pipeline._changes(*pipeline._compared(stage, record, wanted)) else set()
    return direct, above


def and_behind(stages, above):
    found = set(stages)
    for name, before in above.items():  # in their order
        found |= {name} if before & found else set()
    return found


def test_no_key_makes_a_stage_again_that_does_not_read_it(made):
    config, reads = made
    wrong, seen = [], set()
    for key, field, other in changes(config):
        direct, above = touched(config, other)
        # their keys become those of the training's recipe
        whole = field[0] in (type(config).__name__, "ImitationConfig", "TeachConfig")
        names = lambda s: {name for _, name in reads[s]} | {"reflector", "policy"}
        right = {s for s in direct if field in reads[s] or (whole and field[1] in names(s))}
        wrong += [f"{key}: {s}" for s in sorted(direct - and_behind(right, above))]
        seen |= direct
    assert seen and not wrong, "\n".join(wrong)


def test_what_a_stage_reads_of_its_own_sections_makes_it_again(made):
    config, reads = made
    own = {"LprTeacher", "LprSample", "LprClean", "LprStates", "LprComplete", "LprLabels", "LprPairs", "LprStatePairs",
           "CollectConfig", "TeacherConfig", "KlConfig", "RewardConfig", "MarkConfig", "ShapeConfig",
           "TeachConfig"}  # fmt: skip
    allowed = {"replay_data", "models", "options", "margins"}  # nothing is named there
    missed = []
    for key, field, other in changes(config):
        again = and_behind(*touched(config, other))
        for stage, found in reads.items():
            if field in found and field[0] in own and field[1] not in allowed and stage not in again:
                missed.append(f"{key}: {stage}")
    assert not missed


# --- one by one, as people met them --------------------------------------------------------------------------------

OF_LPR = pytest.mark.parametrize("made", ["lpr"], indirect=True)


@pytest.fixture
def lpr(made, tmp_path):
    config, _ = made
    shutil.copytree(config.out, tmp_path / "run")

    def go(**more):
        raw = yaml.safe_load(dump(config))
        for key, value in more.items():
            at = raw
            *path, last = key.split("__")
            for part in path:
                at = at[part]
            at[last] = value
        return resolve({**raw, "out": str(tmp_path / "run")}, get_config("lpr"))

    return go


def states(config):
    return {s.name: pipeline.stage_state(config.out, s) for s in listed(config)}


@OF_LPR
def test_the_recipes_temperature_does_not_ask_the_teacher_again_that_has_its_own(lpr):
    found = states(lpr(sampling__temperature=0.5))
    assert found["written"] == found["lessons"] == "done" and "sampling.temperature" in found["solutions-1"]
    assert "teacher.sampling.temperature" in states(lpr(teacher__sampling__temperature=0.5))["written"]


# the stages that ask a seat of their own, and those that clean its answers
ASKS = [("lpr", "written", "lessons"), ("lpr", "solutions-1", "cleaned-1"), ("lpr steps", "rewritten-1", "worsened-1")]
CLEANS = [("split", "sentence"), ("react", "finish"), ("clean", WORSE["function"]),
          ("min_steps", 1), ("distinct", True)]  # fmt: skip


@pytest.mark.parametrize("key, value", CLEANS, ids=[key for key, _ in CLEANS])
@pytest.mark.parametrize("made, asks, cleans", ASKS, indirect=["made"])
def test_another_way_to_clean_answers_does_not_ask_for_them_again(lpr, asks, cleans, key, value):
    found = states(lpr(**{f"clean__{key}": value}))
    assert found[asks] == "done" and f"'clean.{key}' was" in found[cleans]


@OF_LPR
def test_the_teacher_s_answers_are_cleaned_again_as_they_lie(lpr, capsys):
    before = {p: p.read_bytes() for p in (Path(lpr().out) / "written").rglob("*")}
    launch(some(methods.get_method("lpr"), ("written", "lessons")), lpr(clean__distinct=True), resume=True)
    said = capsys.readouterr().err
    assert "'lessons' is made again: key 'clean.distinct'" in said and "'written'" not in said
    assert before and {p: p.read_bytes() for p in (Path(lpr().out) / "written").rglob("*")} == before


@OF_LPR
@pytest.mark.parametrize(
    "key, value",
    [("eval__n", 3), ("eval__split", "all"), ("engine__max_num_seqs", 4), ("engine__batch_invariant", False)],
)
def test_what_measures_an_imitation_does_not_redo_it(lpr, key, value):
    assert states(lpr(**{key: value}))["sft"] == "done"


@OF_LPR
@pytest.mark.parametrize(
    "key, value", [("eval__n", 3), ("eval__split", "all"), ("eval__patience", 2), ("eval__first", True),
                   ("checkpoint__minutes", 30), ("failures", 0.5)]
)  # fmt: skip
def test_how_one_would_evaluate_redoes_nothing_without_evaluations(lpr, key, value):
    def compared(config):
        stages = listed(config)
        return {s.name: pipeline.without_keys(pipeline._plain(s), s.unread) for s in stages}

    assert compared(lpr(eval__every=0)) == compared(lpr(eval__every=0, **{key: value}))


@OF_LPR
def test_steps_that_a_model_calls_one_are_paired_again_with_another_model(lpr):
    same = {"pairs__states": None, "pairs__values": {"same": 0.9}}
    pairs = lambda c: next(s for s in listed(c) if s.name == "pairs-1")
    one, other = pairs(lpr(**same)), pairs(lpr(**same, model__dtype="float64"))
    assert pipeline._plain(one) != pipeline._plain(other) and "sft" in one.inputs


@OF_LPR
def test_how_a_reward_model_is_read_does_not_train_it_again(lpr, capsys):
    c = lpr(read__over="min")
    before = states(c)
    assert before["prm-1"] == before["scores-1"] == before["policy-1"] == "done" and "read.over" in before["pairs-1"]
    path = Path(c.out) / "prm-1"
    weights = {p: p.stat().st_mtime_ns for p in path.rglob("*.safetensors")}
    launch(methods.get_method("lpr"), c, resume=True)
    assert weights and {p: p.stat().st_mtime_ns for p in path.rglob("*.safetensors")} == weights
    assert yaml.safe_load((path / "recipe.yaml").read_text())["read"]["over"] == "min"  # as a search reads it
    said = capsys.readouterr().err
    assert "'pairs-1' is made again: key 'read.over'" in said and "'prm-1'" not in said and "'scores-1'" not in said
    assert set(states(c).values()) == {"done"}
    assert set(states(lpr(read__over="product"))["prm-1"].split()) == {"done"}
