import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
from typer.testing import CliRunner

import trailmark
from trailmark import __version__, methods
from trailmark.commands.app import app
from trailmark.config import RunConfig
from trailmark.errors import RecipeError, nearest
from trailmark.methods.base import Method
from trailmark.runs.store import Run, read_metrics


class Demo(RunConfig):
    method: Literal["demo"] = "demo"
    crash: bool = False
    stop: bool = False


class DemoMethod(Method):
    Config = Demo

    @classmethod
    def train(cls, config: Demo, run: Run, resume: bool = False) -> dict[str, float]:
        if config.crash:
            raise ZeroDivisionError("oops")
        if config.stop:
            raise KeyboardInterrupt
        for step in range(len(read_metrics(run.path)) + 1, config.steps + 1):
            run.log(step, {"x": step / 7, "seed": config.seed})
        return {}


@pytest.fixture
def demo(monkeypatch, tmp_path):
    """A method that only counts, a recipe for it, and a way to call the command line."""
    known = {"demo": DemoMethod}

    def get_method(name: str):
        if name not in known:
            raise RecipeError(f"there is no method '{name}'.{nearest(name, known)}")
        return known[name]

    monkeypatch.setattr(methods, "get_method", get_method, raising=False)
    monkeypatch.setattr(methods, "check", lambda config: [f"{config.steps} steps are fine"], raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo.yaml").write_text("method: demo\nsteps: 3\nout: runs/a\n")
    return lambda *words: CliRunner().invoke(app, list(words))


def real(*words: str, cwd=None) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(Path(trailmark.__file__).parents[1])}
    command = [sys.executable, "-m", "trailmark", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env)


def test_help_is_light():
    code = (
        "import sys; sys.argv = ['trailmark', '--help']\nfrom trailmark.commands.app import main\n"
        "try: main()\nexcept SystemExit as e: assert not e.code\n"
        "print(sorted({'torch', 'transformers', 'fastapi', 'numpy', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.endswith("[]\n") and "train" in done.stdout and done.returncode == 0
    assert real("--version").stdout == f"trailmark {__version__}\n"


def test_usage_errors_exit_2():
    for words in (["train"], ["trian"], ["diff", "a"], ["train", "x.yaml", "--drry-run"]):
        done = real(*words)
        assert done.returncode == 2 and "Traceback" not in done.stderr and done.stdout == ""


def test_a_bad_recipe_is_a_sentence(tmp_path):
    (tmp_path / "a.yaml").write_text("method: demo\nseed: 1\nseed: 2\n")
    done = real("train", "a.yaml", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: a.yaml:3: key 'seed' appears twice (first at a.yaml:2).\n"
    done = real("train", "b.yaml", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "error: b.yaml: there is no such recipe. Did you mean 'a.yaml'?\n")


def test_dry_run_prints_and_makes_nothing(demo, tmp_path):
    done = demo("train", "demo.yaml", "learner.optim.lr=1e-5", "--dry-run")
    assert done.exit_code == 0
    assert done.stdout.startswith("method: demo\nname: run\nout: runs/a\nseed: 0\nsteps: 3\n")
    assert "    lr: 1.0e-05\n" in done.stdout and done.stdout.endswith("# 3 steps are fine\n")
    assert not (tmp_path / "runs").exists()


def test_train_resume_and_diff(demo, tmp_path):
    assert demo("train", "demo.yaml").exit_code == 0
    assert [r["step"] for r in read_metrics(tmp_path / "runs/a")] == [1, 2, 3]
    again = demo("train", "demo.yaml")
    assert again.exit_code == 2
    assert again.stderr.startswith("error: runs/a holds a run: go on with --resume, or choose another directory")
    assert demo("train", "demo.yaml", "--resume", "steps=5").exit_code == 0
    nothing = demo("train", "demo.yaml", "--resume", "steps=5", "out=runs/b")
    assert nothing.exit_code == 2 and "there is no run in runs/b to go on with" in nothing.stderr
    assert not (tmp_path / "runs/b").exists()
    assert demo("train", "demo.yaml", "steps=5", "out=runs/b").exit_code == 0
    same = demo("diff", "runs/a", "runs/b")
    assert (same.exit_code, same.stdout) == (0, "identical\n")
    assert demo("train", "demo.yaml", "out=runs/c", "steps=5", "seed=1").exit_code == 0
    other = demo("diff", "runs/a", "runs/c")
    assert (other.exit_code, other.stdout) == (
        1, "recipe.yaml: key 'seed': 0 and 1\nmetrics.jsonl: line 1 (step 1): key 'seed': 0 and 1\n"
    )  # fmt: skip
    changed = demo("train", "demo.yaml", "--resume", "seed=1")
    assert changed.exit_code == 2
    assert changed.stderr == (
        "error: runs/a belongs to another recipe (key 'seed': 0 and 1): choose another directory with out=DIR.\n"
    )
    assert len(read_metrics(tmp_path / "runs/a")) == 5


def test_errors_of_every_kind_have_their_exit_code(demo):
    unknown = demo("train", "demo.yaml", "stepps=3", "seed=x")
    assert unknown.exit_code == 2 and "Traceback" not in unknown.stderr
    assert unknown.stderr == (
        "error: override 'seed=x': key 'seed': expected a whole number, found the text 'x'.\n"
        "override 'stepps=3': key 'stepps': is not known. Did you mean 'steps'?\n"
    )
    method = demo("train", "demo.yaml", "method=dmo")
    assert (method.exit_code, method.stderr) == (2, "error: there is no method 'dmo'. Did you mean 'demo'?\n")
    stopped = demo("train", "demo.yaml", "stop=true", "out=runs/s")
    assert stopped.exit_code == 130 and stopped.stderr.startswith("error: stopped by the keyboard;")
    bug = demo("train", "demo.yaml", "crash=true", "out=runs/x")
    assert bug.exit_code == 1 and "ZeroDivisionError: oops" in bug.stderr and "a bug of trailmark" in bug.stderr
    busy = Run.create("runs/busy", "method: demo\n")
    locked = demo("train", "demo.yaml", "out=runs/busy", "--resume")
    assert locked.exit_code == 2 and "runs/busy is in use by process" in locked.stderr
    busy.close()


def test_tasks(demo):
    listed = demo("tasks")
    assert listed.exit_code == 0 and "taxi" in listed.stdout.split()
    shown = demo("tasks", "taxi", "mode=pickup")
    assert shown.exit_code == 0 and "first start (" in shown.stdout
    checked = demo("tasks", "check", "taxi")
    assert checked.exit_code == 0 and checked.stdout.startswith("ok (")
    for words, said in [
        (["check"], "which task?"),
        (["txi"], "There is no task 'txi'. Did you mean 'taxi'?"),
        (["taxi", "mode"], "option 'mode': expected key=value"),
        (["taxi", "mdoe=pickup"], "Did you mean 'mode'?"),
    ]:
        done = demo("tasks", *words)
        assert done.exit_code == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_a_typo_in_a_recipe_is_told_before_torch_is_imported(tmp_path):
    """Importing torch and transformers takes seconds; a check of names needs neither."""
    from trailmark.methods import method_names

    for method in method_names():
        (tmp_path / f"{method}.yaml").write_text(f"method: {method}\nout: run\ndata: x.jsonl\nstpes: 3\n")
    code = (
        "import sys; from typer.testing import CliRunner; from trailmark.commands.app import app\n"
        "for name in sys.argv[1:]:\n"
        "    done = CliRunner().invoke(app, ['train', name + '.yaml'])\n"
        "    assert done.exit_code == 2 and \"'stpes': is not known. Did you mean 'steps'?\" in done.stderr, "
        "done.stderr\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *method_names()], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_method_that_is_checked_early_is_the_one_that_runs():
    from trailmark.methods import get_config, get_method, method_names

    assert all(get_method(name).Config is get_config(name) for name in method_names())
