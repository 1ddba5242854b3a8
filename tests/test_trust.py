"""A run that somebody else made chooses no code that is run here; code that a person named runs without a question."""

import contextlib
import py_compile
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from typer.testing import CliRunner

from trailmark import trust
from trailmark.commands.app import app
from trailmark.errors import RecipeError
from trailmark.runs.store import read_recipe
from trailmark.tasks import get_task

TINY = "{name: tiny, shape: {layers: 1, width: 16, heads: 2, context: 128}}"
PLAY = f"""
method: policy_gradient
out: made
steps: 1
prompts_per_step: 2
n: 2
task: {{name: "own_world:Make"}}
eval: {{every: 1, n: 2}}
model: {TINY}
engine: {{max_num_seqs: 4, max_len: 64}}
"""
WORLD = """
from pathlib import Path
Path("RAN").touch()
from trailmark.tasks.solved import Solved
from trailmark.methods.policy_gradient import PolicyGradientMethod
class Own(PolicyGradientMethod):
    pass
def Make(**options):
    return Solved(kind="bandit", rewards=[0, 1])
def score(prompt, answer, row):
    return 1.0
def answer(prompt, draw):
    return "1"
"""
EVIL = {  # what a recipe may name, and where
    "task": {"task": {"name": "own_world:Make", "options": {}}},
    "shell": {"task": {"name": "os:system", "options": {"command": "touch RAN"}}},
    "method": {"method": "own_world:Own"},
    "module": {"method": "own_world"},
    "gym": {"task": {"name": "gym", "options": {"id": "own_world:Make-v0"}}},
    "render": {"task": {"name": "gym", "options": {"id": "FrozenLake-v1", "render": "own_world:Make"}}},
    "reward": {"task": {"name": "prompts", "options": {"path": "rows.jsonl", "reward": "own_world.py:score"}}},
    "package": {"task": {"name": "prompts", "options": {"path": "rows.jsonl", "reward": "own_world:score"}}},
    "inner": {"task": {"name": "prompts", "options": {"path": "rows.jsonl", "reward": "pack.inner:score"}}},
    "eval_fn": {"task": {"name": "prompts", "options": {"path": "rows.jsonl", "reward": "pack.inner:score"}},
                "eval_fn": "pack.inner:score"},
    "seat": {"seats": {"other": {"kind": "scripted", "function": "own_world.py:answer"}}},
}  # fmt: skip
COMMANDS = [
    words.split()
    for words in """
serve made --port 0
eval made
verify made
plan made/recipe.yaml
train made/recipe.yaml --dry-run
eval made/checkpoints/000001/policy
report made
inspect made
diff made made
compare made made
train made/recipe.yaml --resume steps=2
train made/recipe.yaml out=again
train over.yaml out=again
eval tiny --beside made
eval own_world --task arith
play made --seat policy
curves made
prune made
convert made new --to transformers
stages made/recipe.yaml
""".strip().splitlines()
]


def call(*words):
    done = CliRunner().invoke(app, list(words))
    assert "Traceback" not in done.output + done.stderr, done.output + done.stderr
    return done


def forget(name="own_world"):
    for module in [m for m in sys.modules if m.split(".")[0] in (name, "pack")]:
        del sys.modules[module]
    Path("RAN").unlink(missing_ok=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with a task of its own, as the folder of somebody else has it."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "own_world.py").write_text(WORLD)
    (folder / "play.yaml").write_text(PLAY)
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        patch.setattr(sys, "path", list(sys.path))
        done = call("train", "play.yaml")
        assert done.exit_code == 0 and Path("RAN").exists(), done.stderr
        forget()
    return folder


@pytest.fixture
def downloaded(trained, tmp_path, monkeypatch):
    for name in ("made", "own_world.py"):
        source, target = trained / name, tmp_path / name
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    (tmp_path / "pack").mkdir()
    for name in ("__init__.py", "inner.py"):
        (tmp_path / "pack" / name).write_text(WORLD)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    (tmp_path / "over.yaml").write_text("extends: made/recipe.yaml\n")
    (tmp_path / "torchvision.py").write_text("open('RAN', 'w')\n")  # passes for a package that is not installed
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(trust._Said, "of_runs", set())
    never = SimpleNamespace(run=lambda sockets: None)  # `serve` up to where it would answer
    monkeypatch.setattr("trailmark.commands.serve.server", lambda app, grace: never)
    yield tmp_path
    forget()


def rename(changes):
    file = Path("made/recipe.yaml")
    recipe = yaml.safe_load(file.read_text()) | changes
    file.write_text(yaml.safe_dump(recipe))


@pytest.mark.parametrize("what", EVIL)
def test_no_command_runs_the_code_of_a_downloaded_run(downloaded, what):
    rename(EVIL[what])
    for words in COMMANDS if what == "task" else COMMANDS[:5]:
        call(*words)
        assert not Path("RAN").exists(), words
    assert call("train", "made/recipe.yaml", "--dry-run").exit_code == 2


@pytest.mark.parametrize("words", [["eval", "made"], ["train", "made/recipe.yaml", "--dry-run"]])
def test_the_message_names_what_would_be_imported_and_how_to_allow_it(downloaded, words):
    said = call(*words)
    assert said.exit_code == 2
    for part in ("own_world:Make", "own_world.py", "--trust"):
        assert part in said.stderr, said.stderr
    assert call(*words, "--trust").exit_code == 0 and Path("RAN").exists()
    forget()
    assert call(*words).exit_code == 0, "what was trusted once is remembered"
    Path("own_world.py").write_text(WORLD + "# another one\n")
    forget()
    assert call(*words).exit_code == 2 and not Path("RAN").exists()


def test_a_task_that_was_named_once_is_evaluated_without_a_word_more(downloaded):
    Path("play.yaml").write_text(PLAY.replace("made", "mine"))
    assert call("train", "play.yaml").exit_code == 0
    for words in (["eval", "mine"], ["verify", "mine"], ["train", "mine/recipe.yaml", "--resume", "steps=2"]):
        forget()
        done = call(*words)
        assert done.exit_code == 0, done.stderr
    forget()
    assert call("tasks", "check", "own_world:Make").exit_code == 0


def test_words_of_the_command_line_name_code(downloaded):
    assert call("eval", "made", "--task", "own_world:Make").exit_code == 0
    assert Path("RAN").exists()


def test_a_folder_does_not_name_code(downloaded):
    rename({"method": "own_method"})
    Path("made").rename("own_method")
    Path("own_method/__init__.py").write_text(WORLD)
    assert call("eval", "own_method").exit_code == 2 and not Path("RAN").exists()


def test_from_python_a_run_is_asked_about_and_a_name_is_not(downloaded):
    recipe = read_recipe("made")
    with pytest.raises(RecipeError, match="trust_everything"):
        get_task(recipe["task"]["name"])
    assert not Path("RAN").exists()
    trust._Said.of_runs.clear()
    get_task("own_world:Make")
    assert Path("RAN").exists()


INNER = "from . import helper\nfrom next_door import other\nfrom pathlib import Path\n"
INNER += "Path('RAN').touch()\ndef score(prompt, answer, row):\n    return 1.0\n"


PACKAGES = ("pack/__init__.py", "pack/helper.py", "next_door/__init__.py", "next_door/other.py")


@pytest.mark.parametrize("changed", PACKAGES)
def test_code_whose_package_has_changed_is_not_run_again(downloaded, changed):
    for file in PACKAGES:
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).write_text("")
    Path("pack/inner.py").write_text(INNER)
    rename(EVIL["inner"])
    again = lambda: [sys.modules.pop(m) for m in [*sys.modules] if m.split(".")[0] == "next_door"]
    words = ["train", "made/recipe.yaml", "out=again", "--dry-run"]
    again()
    for more, code in ((["--trust"], 0), ([], 0)):
        done = call(*words, *more)
        assert done.exit_code == code and Path("RAN").exists(), done.stderr
        forget(), again()
    Path(changed).write_text("# another one\n")
    assert call(*words).exit_code == 2 and not Path("RAN").exists()


@pytest.mark.parametrize("name", ["own_world:Make", "pack.inner:Make"])
def test_bytecode_beside_trusted_code_is_not_run(downloaded, name):
    """Bytecode that says of itself that it need not be compared with its source."""
    where = Path(name.partition(":")[0].replace(".", "/") + ".py")
    source = where.read_text()
    where.write_text(source + "open('FOREIGN', 'w')\n")
    py_compile.compile(str(where), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    where.write_text(source)
    rename({"task": {"name": name, "options": {}}})
    assert call("eval", "made", "--trust").exit_code == 0
    assert Path("RAN").exists() and not Path("FOREIGN").exists()
