"""Methods, worlds and rewards of packages that other people have written: found by name, in every command, and a
mistake of theirs is one sentence."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trailmark import registry
from trailmark.commands.app import app
from trailmark.errors import RecipeError

SIXTH = Path(__file__).parent / "methods/sixth_method.py"
WORLD = '''
from trailmark.tasks.base import Observation, Step, TaskSource, World
from trailmark.types import Scored, Task

class Coin(TaskSource, World):
    """A coin with two sides."""
    name, markov = "coin", True
    def tasks(self, split="train", n=None, seed=0):
        return [Task(f"{split}-{k}", k) for k in range(n or 4)]
    def make(self):
        return Coin()
    def reset(self, task):
        return Observation("heads or tails? ")
    def step(self, action):
        return Step(Observation("end"), 1.0, True, False, Scored(1.0))
'''


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Install a package: its modules, and its entry points by group."""
    place = tmp_path / "site"
    monkeypatch.syspath_prepend(str(place))
    registry.installed.cache_clear()

    def install(name, modules, points):
        info = place / f"{name}-1.0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        groups = "".join(f"[trailmark.{kind}]\n" + "".join(f"{k} = {v}\n" for k, v in named.items()) + "\n"
                         for kind, named in points.items())  # fmt: skip
        (info / "entry_points.txt").write_text(groups)
        for module, text in modules.items():
            (place / f"{module}.py").write_text(text)
            monkeypatch.delitem(sys.modules, module, raising=False)
        registry.installed.cache_clear()

    yield install
    registry.installed.cache_clear()


def test_a_world_of_another_package_has_a_name(package):
    package("coins", {"coins": WORLD}, {"tasks": {"coin": "coins:Coin"}})
    shell = CliRunner()
    assert "coin" in shell.invoke(app, ["tasks"]).stdout.split()
    done = shell.invoke(app, ["tasks", "coin"])
    assert done.exit_code == 0 and "A coin with two sides." in done.stdout
    assert shell.invoke(app, ["tasks", "coyn"]).output.count("'coin'") == 1  # nearest match


def test_two_packages_with_one_name_are_refused(package, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    package("coins", {"coins": WORLD}, {"tasks": {"coin": "coins:Coin"}})
    package("change", {"change": WORLD}, {"tasks": {"coin": "change:Coin"}})
    done = CliRunner().invoke(app, ["tasks", "coin"])
    assert done.exit_code == 2 and "coins" in done.output and "change" in done.output and "rename it" in done.output
    package("change", {"change": WORLD}, {"tasks": {"taxi": "change:Coin"}})  # a name of ours
    with pytest.raises(RecipeError, match="package change brings 'taxi'.*so does Trailmark itself"):
        registry.names("tasks")


def test_an_entry_point_that_cannot_be_imported_names_its_package(package, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    package("broken", {"broken": "import nothing_like_it\n"}, {"tasks": {"coin": "broken:Coin"},
                                                             "methods": {"hint": "broken:Hint"}})  # fmt: skip
    (tmp_path / "r.yaml").write_text("method: hint\n")
    for words in (["tasks", "coin"], ["train", "r.yaml"]):
        done = CliRunner().invoke(app, words)
        said = " ".join(done.output.split())
        assert done.exit_code == 2 and "Traceback" not in done.output
        assert "package broken cannot be imported" in said and "nothing_like_it" in said


def test_a_method_without_a_recipe_class_is_refused(package, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bare = "from trailmark.methods.base import Method\nclass Bare(Method):\n    Config = None\n"
    points = {"methods": {"bare": "bare:Bare", "odd": "bare:Other"}}
    package("bare", {"bare": bare + "class Other:\n    pass\n"}, points)
    for name, why in (("bare", "its Config must be a class"), ("odd", "is no method")):
        (tmp_path / "r.yaml").write_text(f"method: {name}\n")
        done = CliRunner().invoke(app, ["train", "r.yaml", "--dry-run"])
        assert done.exit_code == 2 and f"method '{name}'" in done.output and why in " ".join(done.output.split())


def test_the_sixth_method_as_a_package_installed_with_pip(tmp_path, monkeypatch):
    """`hints = sixth:HintMethod` in its pyproject.toml is all: the name works without a path."""
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    (source / "sixth.py").write_text(SIXTH.read_text())
    (source / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "hints-for-trailmark"\nversion = "0.1"\n'
        '[project.entry-points."trailmark.methods"]\nhints = "sixth:HintMethod"\n'
        '[tool.setuptools]\npy-modules = ["sixth"]\n'
    )
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*pip, "--target", str(site), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.chdir(tmp_path)
    registry.installed.cache_clear()
    try:
        Path("rows.jsonl").write_text("".join(json.dumps({"prompt": f"Sing {k}.", "id": str(k)}) + "\n" for k in "abc"))
        Path("hints.jsonl").write_text('{"prompt": "Sing a.", "response": "say a"}\n')
        Path("judge.py").write_text("def score(prompt, answer, row):\n    return min(1.0, len(answer) / 9)\n")
        shape = {"layers": 1, "width": 16, "heads": 2, "context": 128}
        recipe = {
            "method": "hints", "out": "run", "steps": 1, "prompts_per_step": 2, "n": 2, "hints": "hints.jsonl",
            "model": {"name": "tiny", "shape": shape}, "imitation": {"steps": 1, "batch": 1},
            "task": {"name": "prompts", "options": {"path": "rows.jsonl", "reward": "judge.py:score", "test": 0.4}},
            "seats": {"adviser": {"kind": "local", "trained": True, "sampling": {"max_tokens": 4}},
                      "actor": {"kind": "scripted", "function": "judge.py:score"}},
        }  # fmt: skip
        Path("judge.py").write_text(
            "def score(prompt, answer, row):\n    return min(1.0, len(answer) / 9)\n"
            "def act(prompt, draw):\n    return 'la ' * (1 + draw.randrange(3))\n"
        )
        recipe["seats"]["actor"]["function"] = "judge.py:act"
        Path("r.yaml").write_text(json.dumps(recipe))
        report = ["report", "run", "--no-plots"]
        for words in (["train", "r.yaml", "--dry-run"], ["train", "r.yaml"], report, ["stages", "r.yaml"]):
            done = CliRunner().invoke(app, words)
            assert done.exit_code == 0, (words, done.output)
        assert "lessons" in done.stdout and "policy" in done.stdout
        done = CliRunner().invoke(app, ["eval", "run", "--json"])
        assert done.exit_code == 0 and json.loads(done.stdout)["rows"][0]["episodes"] == 1, done.output
    finally:
        registry.installed.cache_clear()
