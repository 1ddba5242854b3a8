"""Every recipe passes a dry run without network, and the laptop ones run two steps."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from trailmark.cli import app

RECIPES = sorted((Path(__file__).parent.parent / "recipes").glob("*.yaml"))
LAPTOP = {  # recipe -> what it takes to run two steps of it
    "taxi-online": [],
    "bandit-online": [],
    "arith-sft": [],
    "arith-grpo": ["model.name=tiny"],
    "reflect-taxi": ["sft.reflector=1", "sft.policy=1", "teacher.starts=2"],
}


@pytest.fixture
def shell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["data", "arith", "arith.jsonl", "level=2", "--n", "40"])
    assert done.exit_code == 0, done.output
    return CliRunner()


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_dry_run(shell, path):
    done = shell.invoke(app, ["train", str(path), "--dry-run"])
    assert done.exit_code == 0, done.output
    assert "# model: " in done.output and f"name: {path.stem.removesuffix('-gpu')}" in done.output
    Path("again.yaml").write_text(done.stdout)
    again = shell.invoke(app, ["train", "again.yaml", "--dry-run"])
    assert again.stdout == done.stdout  # the resolved recipe is a recipe, and resolves to itself


@pytest.mark.parametrize("path", [p for p in RECIPES if "-gpu" not in p.stem], ids=lambda p: p.stem)
def test_two_steps(shell, path):
    done = shell.invoke(app, ["train", str(path), "steps=2", "eval.every=0", "out=run", *LAPTOP[path.stem]])
    assert done.exit_code == 0, done.output
    assert len(Path("run/metrics.jsonl").read_text().splitlines()) == 2
