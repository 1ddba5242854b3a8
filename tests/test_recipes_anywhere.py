"""The commands of the pages find `recipes/NAME.yaml` in any folder, also where Trailmark was installed from a wheel."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.recipe import load_recipe

ROOT = Path(__file__).parent.parent
NAMES = sorted(p.stem for p in (ROOT / "recipes").glob("*.yaml"))


@pytest.fixture
def shell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(app, list(words))


def test_every_recipe_is_found_from_an_empty_folder(shell):
    from trailmark.recipe import find_recipe

    for name in NAMES:
        for written in (name, f"{name}.yaml", f"recipes/{name}", f"recipes/{name}.yaml"):
            assert find_recipe(written) == ROOT / "recipes" / f"{name}.yaml"
        assert load_recipe(f"recipes/{name}.yaml").raw == load_recipe(ROOT / f"recipes/{name}.yaml").raw


def test_commands_that_take_a_recipe(shell):
    done = shell("train", "recipes/taxi-policy-gradient.yaml", "--dry-run")
    assert done.exit_code == 0 and "task: taxi" in done.output
    done = shell("train", "taxi-policy-gradient", "steps=1", "eval.every=0", "--dry-run")
    assert done.exit_code == 0 and "steps: 1\n" in done.output
    done = shell("plan", "recipes/taxi-policy-gradient.yaml", "--no-probe")
    assert done.exit_code == 0 and "tokens" in done.output
    done = shell("stages", "recipes/lpr-puzzle.yaml")
    assert done.exit_code == 0 and "policy-1" in done.output
    assert os.listdir() == []


@pytest.mark.parametrize("name", ["taxi-policy-gradient", "recipes/taxi-policy-gradient.yaml"])
def test_a_recipe_of_one_s_own_extends_one_that_came_with_trailmark(shell, name):
    Path("mine.yaml").write_text(f"extends: {name}\nname: mine\n")
    done = shell("train", "mine.yaml", "--dry-run")
    assert done.exit_code == 0 and "name: mine\n" in done.output and "task: taxi" in done.output


def test_a_file_of_one_s_own_is_preferred(shell):
    Path("recipes").mkdir()
    Path("recipes/taxi-policy-gradient.yaml").write_text("extends: taxi-policy-gradient\nname: own\n")
    done = shell("train", "recipes/taxi-policy-gradient.yaml", "--dry-run")
    assert done.exit_code == 0 and "name: own\n" in done.output and "task: taxi" in done.output
    Path("mine.yaml").write_text("extends: recipes/taxi-policy-gradient.yaml\n")
    assert "name: own\n" in shell("train", "mine.yaml", "--dry-run").output


@pytest.fixture
def no_network(monkeypatch):
    """Whatever asks a network or starts a program fails."""

    def asked(*words, **_):
        raise AssertionError(f"a dry run asked {words}")

    monkeypatch.setattr("socket.socket.connect", asked)
    monkeypatch.setattr("socket.getaddrinfo", asked)
    monkeypatch.setattr("subprocess.Popen.__init__", asked)


def test_every_recipe_passes_a_dry_run_in_an_empty_folder_and_fetches_nothing(shell, no_network):
    wrong = {}
    for name in NAMES:
        done = shell("train", f"recipes/{name}.yaml", "--dry-run")
        if done.exit_code or "# model: " not in done.output or os.listdir():
            wrong[name] = done.output[-300:]
    assert wrong == {}


def test_a_dry_run_with_its_data_there_does_not_fetch_their_packages(shell, no_network, monkeypatch, tmp_path):
    monkeypatch.setenv("TRAILMARK_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "data/auto-explore"
    folder.mkdir(parents=True)
    row = {"repo": "click", "version": "8.1.7", "query": "Where is it?", "target": "README.md", "id": "a"}
    (folder / "train.jsonl").write_text(json.dumps(row) + "\n")
    tree = {"click": {"version": "8.1.7", "sdist": "click-8.1.7.tar.gz", "sha256": "0" * 64}}
    (folder / "file_trees.json").write_text(json.dumps(tree))
    done = shell("train", "recipes/reflect-explore.yaml", "--dry-run")
    assert done.exit_code == 0
    assert "# task: auto-explore, not looked at, because package click 8.1.7 would be fetched\n" in done.output
    assert not (tmp_path / "cache").exists()


def test_a_folder_of_questions_that_is_not_there_is_named_as_that(shell):
    done = shell("eval", "random", "--task", "auto-explore", "tasks=data/auto-explore")
    said = "data/auto-explore: cannot be read: there is no such file or folder; `trailmark data auto-explore … --out"
    assert done.exit_code == 2 and said in " ".join(done.output.split())


def test_a_name_that_is_misspelt(shell):
    done = shell("train", "recipes/taxi-policy-gradent.yaml")
    assert done.exit_code == 2 and "no such recipe. Did you mean 'taxi-policy-gradient.yaml'?" in done.output
    for elsewhere in ("there/taxi-policy-gradient.yaml", "../taxi-policy-gradient", "taxi-policy-gradient.txt"):
        done = shell("train", elsewhere)
        assert done.exit_code == 2 and done.output.strip().endswith("there is no such recipe.")


def test_a_wheel_has_the_recipes_and_studies(tmp_path):
    """The wheel is built from a copy, because a build leaves folders beside the sources."""
    pytest.importorskip("setuptools")
    leave = shutil.ignore_patterns("*.egg-info", "__pycache__")
    for name in ("src", "recipes", "studies"):
        shutil.copytree(ROOT / name, tmp_path / "copy" / name, ignore=leave)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md"):
        shutil.copyfile(ROOT / name, tmp_path / "copy" / name)
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"  # what pip calls
    words = [sys.executable, "-c", build, str(tmp_path)]
    subprocess.run(words, cwd=tmp_path / "copy", check=True, capture_output=True, timeout=200)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    (tmp_path / "empty").mkdir()
    code = (
        "from pathlib import Path; from trailmark.recipe import find_recipe, load_recipe;"
        "from trailmark.evaluate.study import find_study, load_study;"
        f"[load_recipe(f'recipes/{{n}}.yaml') for n in {NAMES}];"
        "load_study(find_study('policy-gradient-bandit')); print(find_recipe('arith-grpo'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "empty", capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "installed/trailmark/shipped/recipes/arith-grpo.yaml")
