"""Every recipe passes a dry run without network, and the laptop ones run two steps."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from trailmark.cli import app

WORLDS = {
    "reflect-explore",
    "reflect-explore-gpu",
    "reflect-alfworld-gpu",
}  # need data: tests/methods/test_reflect_recipes.py
RECIPES = sorted(p for p in (Path(__file__).parent.parent / "recipes").glob("*.yaml") if p.stem not in WORLDS)
PAPERS = {
    "oreo-qwen-math",
    "oreo-qwen-math-sft",
    "oreo-qwen-math-data",
    "oreo-deepseekmath",
    "oreo-minicpm-alfworld",
}  # models of other people, at their size
LAPTOP = {  # recipe -> what it takes to run two steps of it
    "taxi-online": [],
    "bandit-online": [],
    "arith-sft": [],
    "arith-grpo": ["model.name=tiny"],
    "oreo-arith-data": ["model.name=tiny", "collect.starts=2", "collect.n=2"],
    "oreo-arith": ["model.name=tiny", "data=scored.jsonl", "format=trajectories", "batch=2"],
    "oreo-arith-rounds": ["model.name=tiny", "collect.starts=2", "collect.n=2", "training=2", "batch=2"],
    "reflect-taxi": ["sft.reflector=1", "sft.policy=1", "teacher.starts=2"],
    "reflect-taxi-full": ["sft.reflector=1", "sft.policy=1", "teacher.starts=2", "final.n=5"],
}


@pytest.fixture
def shell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["data", "gold", "arith", "arith.jsonl", "level=2", "--n", "40"])
    assert done.exit_code == 0, done.output
    Path("scored.jsonl").write_text('{"prompt": "1+1=?\\n", "response": "1+1=2\\n#### 2", "reward": 1}\n' * 4)
    return CliRunner()


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_dry_run(shell, path):
    done = shell.invoke(app, ["train", str(path), "--dry-run"])
    assert done.exit_code == 0, done.output
    assert "# model: " in done.output and f"name: {path.stem.removesuffix('-gpu')}" in done.output
    Path("again.yaml").write_text(done.stdout)
    again = shell.invoke(app, ["train", "again.yaml", "--dry-run"])
    assert again.stdout == done.stdout  # the resolved recipe is a recipe, and resolves to itself


@pytest.mark.parametrize(
    "path", [p for p in RECIPES if "-gpu" not in p.stem and p.stem not in PAPERS], ids=lambda p: p.stem
)
def test_two_steps(shell, path):
    done = shell.invoke(app, ["train", str(path), "steps=2", "eval.every=0", "out=run", *LAPTOP[path.stem]])
    assert done.exit_code == 0, done.output
    assert len(Path("run/metrics.jsonl").read_text().splitlines()) == 2
