"""What LPR accepted without a word, or refused without saying why."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.config import load_recipe, resolve
from trailmark.errors import DataError, RecipeError, RunError
from trailmark.methods.lpr.config import LprComplete, LprRecipe
from trailmark.methods.lpr.method import LprMethod
from trailmark.methods.lpr.states import state_values
from trailmark.models.tiny import tiny_tokenizer
from trailmark.recipe import merged
from trailmark.runs.launch import launch
from trailmark.runs.store import Run
from trailmark.types import Episode, Parent, Scored, Task, Turn

RECIPES = Path(__file__).parents[2] / "recipes"
SCRIPT = {"kind": "scripted", "function": f"{Path(__file__).with_name('lpr_careless.py')}:careless"}
TINY = {
    "method": "lpr", "steps": 1,
    "model": {"name": "tiny", "shape": {"layers": 1, "width": 16, "heads": 2, "context": 96}},
    "task": {"name": "arith", "options": {"level": 2}}, "seats": {"policy": SCRIPT}, "sample": {"prompts": 4, "n": 6},
    "sampling": {"max_tokens": 40}, "engine": {"max_num_seqs": 8, "max_len": 96}, "states": {"start": 0.0,
    "ratio": 1.0},
    "prm": {"steps": 1, "batch": 4}, "pairs": {"margin": 0.0}, "preference": {"steps": 1, "batch": 2},
}  # fmt: skip
SERVER = {"kind": "http", "address": "http://127.0.0.1:9", "model": "m"}


def config(out, more):
    return resolve({**merged(TINY, more), "out": str(out)}, LprRecipe)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("lpr") / "run"
    launch(LprMethod, config(root, {}))
    return root


@pytest.fixture
def copy(made, tmp_path):
    shutil.copytree(made, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("least, kept", [(6, 1), (7, 0), (0, 1)])
def test_the_name_of_a_step_is_not_what_it_says(least, kept):
    tokenizer = tiny_tokenizer()
    begin, rest = "Thought 1: all of it.\nThought 2: so it.", "\nAction 1: Finish[The answer is B.]"
    ids = lambda text: tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    first, cut = len(ids("Thought 1: all of it.\n")), len(ids(begin))
    steps = ((0, first), (first, cut), (cut, cut + len(ids(rest))))
    e = Episode("e", Task("t"), "t", (Turn("policy", (1,), ids(begin) + ids(rest), text=begin + rest, steps=steps),),
                {"self": Scored(1.0, True)})  # fmt: skip
    ways = [Episode(f"w{k}", Task("t"), "t", (Turn("policy", (1,), ids(rest), text=rest),), {"self": Scored(1.0, True)},
                    parent=Parent("e", 0, cut)) for k in range(3)]  # fmt: skip
    state = {"episode": "e", "turn": 0, "token": cut, "step": 1}
    values, out = state_values([state], [e], ways, LprComplete(n=3, min_chars=least), tokenizer)
    assert len(values) == kept and out == Counter({} if kept else {"a last step that says too little": 1})


@pytest.mark.parametrize(("seat", "advice"), [
    (SERVER, "policy-1 at"), ({"kind": "local", "model": TINY["model"]}, "set seats.policy.trained=true"),
])  # fmt: skip
def test_two_rounds_with_a_server_as_policy_are_refused_before_it_is_asked(tmp_path, seat, advice):
    own = {k: v for k, v in TINY.items() if k != "seats"}
    c = resolve({**own, "steps": 2, "seats": {"policy": seat}, "out": str(tmp_path / "run")}, LprRecipe)
    for go in (LprMethod.check, lambda c: launch(LprMethod, c)):
        with pytest.raises(RecipeError, match=rf"round 2 would ask the same model again\. Set steps=1; or .*{advice}"):
            go(c)
    assert not list((tmp_path / "run").rglob("*.json*"))
    assert LprMethod.check(config(tmp_path / "run", {"steps": 2}))


def test_pairs_of_steps_behind_a_chat_server_say_why_there_are_none(copy):
    path = copy / "completions-1/all.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:  # as a chat server's completions are stored: as text
        row["turns"][-1] |= {"prompt": [], "tokens": [], "forced": [], "logp": [], "logq": [], "steps": []}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    c = config(copy, {"pairs": {"steps": {}}})
    stage = next(s for s in LprMethod.stages(c, Run(copy)) if s.name == "pairs-1")
    with pytest.raises(DataError, match=r"are of a server that answers messages, as text alone, and pairs of steps"):
        stage.make(copy / "pairs-1")


def test_questions_to_exclude_that_do_not_exist_are_refused(copy, tmp_path):
    (tmp_path / "no.json").write_text('["arith-9999", "nobody"]')
    c = config(copy, {"pairs": {"exclude": str(tmp_path / "no.json")}})
    with pytest.raises(DataError, match=r"no.json: key 'pairs.exclude': names 2 questions that task 'arith' does not"):
        launch(LprMethod, c, resume=True)


def test_how_the_reward_model_is_read_reaches_the_reinforcement(tmp_path):
    rl = {"steps": 1, "prompts_per_step": 2, "n": 2, "rewards": {"right": 1.0}}
    for raw in (True, False):
        c = config(tmp_path / "run", {"read": {"raw": raw}, "rl": rl})
        stage = next(s for s in LprMethod.stages(c, Run(tmp_path / "run")) if s.name == "rl-1")
        assert stage.settings["rewards"].get("raw", False) is raw


def test_the_advice_for_an_edited_training_works(copy, tmp_path, capsys):
    with (copy / "policy-1/metrics.jsonl").open("a") as f:
        f.write("\n")
    c = config(copy, {})
    with pytest.raises(RunError, match="was changed after it was made: put it back as it was, or move ") as caught:
        launch(LprMethod, c, resume=True)
    for k, path in enumerate(str(caught.value).partition("or move ")[2].partition(" away")[0].split(" and ")):
        shutil.move(path, tmp_path / f"moved-{k}")
    launch(LprMethod, c, resume=True)
    assert (copy / "policy-1/checkpoints").is_dir() and (copy / "stages/policy-1.json").is_file()


def test_the_papers_recipes_ask_each_question_once_and_keep_equal_solutions_once():
    for path in RECIPES.glob("lpr-*.yaml"):
        raw = load_recipe(path).raw
        assert "logiqa2" not in path.stem or raw["eval"]["n"] is None
        assert (raw.get("clean") or {}).get("react") != "strict" or raw["clean"]["distinct"]


def test_the_command_says_so_with_exit_code_2(tmp_path):
    (tmp_path / "r.yaml").write_text(json.dumps(merged(TINY, {"steps": 2, "seats": {"policy": SERVER}})))
    done = CliRunner().invoke(app, ["train", str(tmp_path / "r.yaml"), f"out={tmp_path / 'run'}"])
    assert done.exit_code == 2 and "round 2 would ask the same model again" in done.output
