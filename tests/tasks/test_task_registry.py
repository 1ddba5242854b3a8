import subprocess
import sys

import pytest
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.errors import TaskError
from trailmark.tasks import get_task, task_names
from trailmark.tasks.base import TaskSource, World
from trailmark.tasks.check import check_task

OWN = """
from trailmark.errors import TaskError
from trailmark.tasks.base import Observation, Step
from trailmark.types import Scored, Task

class Echo:
    name, markov = "echo", True
    def __init__(self, word="hi", times=1):
        if times < 1:
            raise ValueError("times must be positive")
        self.word = word
    def tasks(self, split="train", n=None, seed=0):
        return [Task(f"echo-{i}", seed, {"word": self.word}) for i in range(n or 1)]
    def make(self):
        return EchoWorld()

class EchoWorld:
    word = None
    def reset(self, task):
        self.word = task.data["word"]
        return Observation(f"Say {self.word}.")
    def step(self, action):
        if self.word is None:
            raise TaskError("over")
        said, self.word = action == self.word, None
        return Step(Observation(""), float(said), True, False, Scored(float(said), said))

def half():
    return object()

number = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_pkg").mkdir()
    (tmp_path / "own_pkg" / "__init__.py").write_text("")
    (tmp_path / "own_pkg" / "echo.py").write_text(OWN)
    (tmp_path / "own_pkg" / "needy.py").write_text("import a_package_nobody_has\n")
    (tmp_path / "own_pkg" / "broken.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [m for m in sys.modules if m.startswith("own_pkg")]:
        del sys.modules[name]


def test_names_and_protocol():
    assert {"arith", "gym", "solved", "taxi"} <= set(task_names())
    for name in ("arith", "solved", "taxi"):
        source = get_task(name)
        assert isinstance(source, TaskSource) and source.name == name
        assert isinstance(source.make(), World)
    assert get_task("taxi", mode="pickup").mode == "pickup"  # type: ignore


def test_own_task(own):
    source = get_task("own_pkg.echo:Echo", word="yes")
    assert check_task(source).ok
    world = source.make()
    world.reset(source.tasks(n=1)[0])
    assert world.step("yes").reward == 1.0


@pytest.mark.parametrize(
    "name, options, words",
    [
        ("taxy", {}, r"no task 'taxy'\. Did you mean 'taxi'\?"),
        ("zzzzzz", {}, "Known: .*arith, .*taxi"),
        ("own_pkg.echo.Echo", {}, "'my_package.my_task:Make'"),
        ("taxi", {"horizn": 3}, r"no option 'horizn'\. Did you mean 'horizon'\?"),
        ("gym", {"name": "X"}, r"no option 'name'\. Did you mean 'names'\?"),
        ("taxi", {"name": "X"}, "no option 'name'"),
        ("taxi", {"mode": "up"}, "no mode 'up'"),
        ("taxi", {"horizon": "many"}, "could not be made: TypeError"),
        ("no_such_pkg.mod:Make", {}, "no module 'no_such_pkg'"),
        ("own_pkg.eco:Echo", {}, "no module 'own_pkg.eco'"),
        ("own_pkg.echo:Eco", {}, r"nothing callable named 'Eco'\. Did you mean 'Echo'\?"),
        ("own_pkg.echo:number", {}, "nothing callable named 'number'"),
        ("own_pkg.echo:", {}, "nothing callable named ''"),
        ("own_pkg.echo:Echo", {"wrd": 1}, "Did you mean 'word'"),
        ("own_pkg.echo:Echo", {"times": 0}, "ValueError: times must be positive"),
        ("own_pkg.echo:half", {}, "its object lacks name, markov, tasks, make"),
        ("own_pkg.echo:half", {"x": 1}, "no option 'x'. It takes none"),
        ("own_pkg.needy:Make", {}, "importing 'own_pkg.needy' failed with ModuleNotFoundError"),
        ("own_pkg.broken:Make", {}, "importing 'own_pkg.broken' failed with ZeroDivisionError"),
    ],
)
def test_mistakes_are_one_sentence(own, name, options, words):
    with pytest.raises(TaskError, match=words) as e:
        get_task(name, **options)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "body, words",
    [
        ("    def tasks(self, split='train', n=None, seed=0): return []", "has no start in split 'train'"),
        ("    def tasks(self, split='train', n=None, seed=0): 1 / 0", "raised ZeroDivisionError for split 'train'"),
        ("    def make(self): return {}[1]", "raised KeyError at its first start"),
    ],
)
def test_a_task_that_fails_at_its_first_start_is_shown_as_one_sentence(own, tmp_path, body, words):
    made = "from own_pkg.echo import *\nclass Bad(Echo):\n" + body + "\n"
    (tmp_path / "own_pkg" / "bad.py").write_text(made)
    done = CliRunner().invoke(app, ["tasks", "own_pkg.bad:Bad"])
    assert done.exit_code == 2 and words in done.output and "Traceback" not in done.output


def test_the_command_checks_the_actions_that_a_person_names(own):
    done = CliRunner().invoke(app, ["tasks", "check", "own_pkg.echo:Echo", "--action", "hi", "--max-steps", "3"])
    assert done.exit_code == 0 and done.output.startswith("ok (5 tasks") and "Not checked" not in done.output
    done = CliRunner().invoke(app, ["tasks", "own_pkg.echo:Echo", "--action", "hi"])
    assert done.exit_code == 2 and "--action is for" in done.output
    done = CliRunner().invoke(app, ["tasks", "gym", "name=X"])
    assert done.exit_code == 2 and "Traceback" not in done.output


def test_nothing_heavy_is_imported():
    code = (
        "import sys, trailmark.tasks as t; assert 'trailmark.tasks.taxi' not in sys.modules; t.get_task('taxi');"
        "assert not {'torch', 'gymnasium', 'trailmark.tasks.arith'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
