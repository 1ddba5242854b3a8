"""What is imitated is what is played, and nothing of it is cut: else a recipe is refused before anything is trained or
written."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.config import resolve
from trailmark.errors import RecipeError
from trailmark.methods import get_method
from trailmark.methods.reflect import method as reflect
from trailmark.methods.reflect.imitation import Players
from trailmark.methods.reflect.lessons import File
from trailmark.runs.launch import launch
from trailmark.tasks import get_task

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests/tasks/alfworld"), str(ROOT / "tests/data")]

PLAIN = {"mode": "full", "history": "none", "menu": False, "walls": False}


def shell(*words, code=0):
    done = CliRunner().invoke(app, list(map(str, words)))
    assert done.exit_code == code, done.output
    return done.output


@pytest.fixture(scope="module")
def lessons(tmp_path_factory):
    """Taxi lessons as the recipe plays (plain), and as the world is by default: walls, menu, actions so far (shown)."""
    folder = tmp_path_factory.mktemp("lessons")
    words = [f"{k}={str(v).lower()}" for k, v in PLAIN.items()]
    shell("data", "taxi", *words, "--starts", "4", "--out", folder / "plain")
    shell("data", "taxi", "--starts", "4", "--out", folder / "shown")
    return folder


def recipe(path, out, steps=1, **more):
    return resolve({
        "method": "reflect", "out": str(out), "steps": steps, "sft": {"reflector": 1, "policy": 1, "batch": 4},
        "thought": 24, "task": {"name": "taxi", "options": PLAIN}, "teacher": {"name": "file", "path": str(path)},
        "rl": {"prompts_per_step": 2}, "final": {"n": 1},
        "model": {"name": "tiny", "shape": {"layers": 1, "width": 16, "heads": 2, "context": 512}},
        "engine": {"max_num_seqs": 4, "max_len": 512}, **more,
    }, reflect.ReflectRecipe)  # fmt: skip


def refused(config):
    with pytest.raises(RecipeError) as problem:
        launch(get_method("reflect"), config)
    # nothing is written
    assert not [p for p in Path(config.out).rglob("*") if p.is_file() and not p.name.endswith(".lock")]
    return str(problem.value)


def test_lessons_with_walls_menu_and_history_are_refused_where_play_has_none(tmp_path, lessons):
    rows = (lessons / "shown" / "steps.jsonl").read_text().splitlines()
    said = refused(recipe(lessons / "shown", tmp_path / "run"))
    assert f"{len(rows)} of {len(rows)} lessons of {lessons / 'shown'} are not what task 'taxi' shows" in said
    assert "step 0 of 'taxi-full-train-0-0': it has 'Actions so far: none' where the task shows" in said
    assert (
        "set task.options.history=actions task.options.menu=true task.options.walls=true, or make lessons with " in said
    )
    assert said.endswith("history=none menu=false walls=false.")


def test_with_the_options_that_were_named_they_are_learnt_from(tmp_path, lessons):
    task = {"name": "taxi", "options": {"mode": "full", "history": "actions", "menu": True, "walls": True}}
    launch(get_method("reflect"), recipe(lessons / "shown", tmp_path / "run", task=task, thought=48))
    for run in (".", "reflector", "policy"):
        assert len((tmp_path / "run" / run / "metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("option", [{"history": "maps"}, {"menu": True}, {"walls": True}, {"rules": True}])
def test_one_option_that_differs_is_named_alone(tmp_path, lessons, option):
    said = refused(recipe(lessons / "plain", tmp_path / "run", task={"name": "taxi", "options": PLAIN | option}))
    ((key, _),) = option.items()
    recorded = json.dumps({**PLAIN, "rules": False}[key]).strip('"')
    wanted = f"task.options.{key}={recorded}"
    assert wanted in said
    others = {"history", "menu", "walls"} - {key}
    assert not any(f"task.options.{other}=" in said for other in others)


def test_lessons_without_their_settings_are_checked_too(tmp_path, lessons):
    bare = tmp_path / "steps.jsonl"
    bare.write_bytes((lessons / "shown" / "steps.jsonl").read_bytes())
    assert "it has 'Actions so far: none' where the task shows" in refused(recipe(bare, tmp_path / "run"))


def test_a_state_that_somebody_changed_is_found(tmp_path, lessons):
    rows = (lessons / "plain" / "steps.jsonl").read_text().splitlines()
    row = json.loads(rows[2])
    rows[2] = json.dumps({**row, "state": row["state"].replace("D", "?")})
    changed = tmp_path / "steps.jsonl"
    changed.write_text("\n".join(rows) + "\n")
    said = refused(recipe(changed, tmp_path / "run"))
    assert f"1 of {len(rows)} lessons" in said and "step 2 of " in said and "?" in said


def test_lessons_of_other_starts_are_not_taken_for_ours(tmp_path, lessons):
    strange = tmp_path / "steps.jsonl"
    strange.write_text((lessons / "plain" / "steps.jsonl").read_text().replace("taxi-full-train", "bus-full-train"))
    assert "this task has no such start" in refused(recipe(strange, tmp_path / "run"))


def test_no_reflection_is_cut_and_thought_is_named(tmp_path, lessons):
    said = refused(recipe(lessons / "plain", tmp_path / "run", thought=5))
    assert "lessons have reflections longer than thought=5 tokens" in said
    needed = int(said.split("set thought=")[1].split(".")[0])
    config = recipe(lessons / "plain", tmp_path / "run", thought=needed)
    method = Players(config, None, ["reflector", "policy"])
    for lesson in method.lessons:  # every word of every reflection is trained, and its end
        sample = method.sample(lesson, "reflector", "1 0")
        said = sample.tokens[sample.streams["weight"] != 0]
        assert method.models["reflector"].tokenizer.decode(said) == lesson.reflection + "<|im_end|>"
    assert "longer than" in refused(recipe(lessons / "plain", tmp_path / "other", thought=needed - 1))


def test_no_state_is_cut_and_the_keys_of_the_context_are_named(tmp_path, lessons):
    shape = {"layers": 1, "width": 16, "heads": 2}
    small = {
        "model": {"name": "tiny", "shape": {**shape, "context": 40}},
        "engine": {"max_num_seqs": 4, "max_len": None},
    }
    said = refused(recipe(lessons / "plain", tmp_path / "run", **small))
    needed = int(said.split("engine.max_len=")[1].split(" ")[0])
    assert f"set engine.max_len={needed} and model.shape.context={needed}" in said and "and 40 fit" in said
    fits = {
        "model": {"name": "tiny", "shape": {**shape, "context": needed}},
        "engine": {"max_num_seqs": 4, "max_len": needed},
    }
    method = Players(recipe(lessons / "plain", tmp_path / "run", **fits), None, ["reflector", "policy"])
    decode = method.models["policy"].tokenizer.decode
    assert not any("[...]" in decode(method.sample(x, "policy", "1 0").tokens) for x in method.lessons)


def test_the_lessons_of_the_scripted_teacher_are_held_to_it_too(tmp_path):
    config = recipe("", tmp_path / "run", teacher={"name": "bfs", "prompts": 3}, thought=4)
    assert "longer than thought=4" in refused(config)


@pytest.fixture
def repositories(tmp_path):
    from data_fixtures import packages

    packages(tmp_path / "repos")
    for k in range(40):
        (tmp_path / "repos/kettle" / f"a_rather_long_name_{k:02}.py").write_text(
            "WATER = 'is wet and it is warm'\n" * 3
        )
    shell(
        "data",
        "auto-explore",
        tmp_path / "repos/kettle",
        tmp_path / "repos/garden",
        "--split",
        "exact",
        "--out",
        tmp_path / "data",
    )
    return tmp_path / "data"


def explore(data, out, **more):
    task = {"name": "auto-explore", "options": {"tasks": str(data), "max_tokens": 60, "horizon": 2}}
    few = {"split": "train", "n": 1}
    return recipe(data, out, task=task, shuffle="alphabet", final=few, eval=few, thought=72, **more)


def test_a_list_of_commands_that_leaves_no_room_is_found_before_the_first_step(tmp_path, repositories):
    """Also where nothing is imitated: such a list used to end a run at its first play."""
    small = {
        "model": {"name": "tiny", "shape": {"layers": 1, "width": 16, "heads": 2, "context": 512}},
        "engine": {"max_num_seqs": 4},
    }
    said = refused(explore(repositories, tmp_path / "run", sft={"reflector": 0, "policy": 0}, **small))
    assert "lists of actions of task 'auto-explore' do not fit a prompt (the first: folder '.' of kettle)" in said
    needed = int(said.split("engine.max_len=")[1].split(" ")[0])
    room = {"model": {"name": "tiny", "shape": {"layers": 1, "width": 16, "heads": 2, "context": needed}},
            "engine": {"max_num_seqs": 4, "max_len": needed}}  # fmt: skip
    config = explore(repositories, tmp_path / "run", sft={"reflector": 0, "policy": 0}, steps=1, **room)
    launch(get_method("reflect"), config)
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text())["failed"] == 0


def test_lessons_of_repositories_are_shown_as_they_are_played(tmp_path, repositories):
    """Files are shown by the policy's tokens, 60 here: the lessons were recorded with 500 of another count."""
    model = {"name": "tiny", "shape": {"layers": 1, "width": 16, "heads": 2, "context": 4096}}
    config = explore(repositories, tmp_path / "run", model=model, engine={"max_num_seqs": 4, "max_len": 4096})
    method = Players(config, None, ["reflector", "policy"])
    recorded = {d.state for d in File(repositories).decisions}
    cut = [x.state for x in method.lessons if "(cut: the first 60 tokens are shown)" in x.state]
    assert cut and not set(cut) & recorded and len(method.lessons) == len(File(repositories).decisions)


def test_alfworld_lessons_in_other_words_are_refused(tmp_path):
    from small_home import write_download

    write_download(tmp_path / "games", ["train"])
    games = f"games={tmp_path / 'games'}"
    shell("data", "alfworld", games, "dialect=put", "--starts", "2", "--perturb", "0", "--out", tmp_path / "data")
    for dialect in ("move", "put"):
        source = get_task("alfworld", games=str(tmp_path / "games"), dialect=dialect)
        if dialect == "put":
            assert File(tmp_path / "data").lessons(source, 9, 0.5, 0)
            continue
        with pytest.raises(RecipeError, match="set task.options.dialect=put, or make lessons with dialect=move"):
            File(tmp_path / "data").lessons(source, 9, 0.5, 0)
