"""What a redone stage sets aside is a run that opens; and a refusal comes before anything is moved."""

import json
import sys
from pathlib import Path

import yaml
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.runs.stages import BEFORE, Stage, begun_from, run_stages


def made(value):
    def make(folder):
        (folder / "x.txt").write_text(str(value))
        return {}

    return Stage("policy", make, {"value": value})


def test_what_is_set_aside_keeps_its_recipe_and_its_judge(tmp_path):
    run = tmp_path / "run"
    (run / "judge").mkdir(parents=True)
    (run / "judge" / "judge.json").write_text("{}")
    (run / "recipe.yaml").write_text("value: 1\n")
    (run / "versions.json").write_text("{}")
    (run / "report.html").write_text("of the first run")
    run_stages(run, [made(1)], say=lambda line: None)
    begun_from(run, [made(1)])
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n")
    (run / "stages" / BEFORE).write_text("value: 1\n")  # as `continue_run` keeps it
    (run / "recipe.yaml").write_text("value: 2\n")
    run_stages(run, [made(2)], say=lambda line: None)
    said = []
    begun_from(run, [made(2)], said.append)
    old = run / "replaced" / "run-1"
    assert str(old) in said[0]
    assert (old / "recipe.yaml").read_text() == "value: 1\n" and (run / "recipe.yaml").read_text() == "value: 2\n"
    assert {p.name for p in old.iterdir()} == {"recipe.yaml", "versions.json", "judge", "metrics.jsonl", "report.html"}
    assert not (run / "report.html").exists() and not (run / "stages" / BEFORE).exists()
    assert (run / "judge" / "judge.json").exists()


METHOD = """
from pydantic import Field

from trailmark.methods.online_configs import PolicyGradientRecipe
from trailmark.methods.policy_gradient import PolicyGradientMethod
from trailmark.runs.stages import Stage


class Recipe(PolicyGradientRecipe):
    word: str = Field("a", description="what the stage writes")


class Staged(PolicyGradientMethod):
    Config, staged = Recipe, ("word",)

    @classmethod
    def stages(cls, config, run):
        write = lambda folder: (folder / "word.txt").write_text(config.word) and {}
        return [Stage("word", write, {"word": config.word})]
"""


def test_a_refusal_comes_before_anything_is_moved(tmp_path, monkeypatch):
    """A stage would be made again and the run set aside; but its judge, its data or a seat's server is wrong."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("staged_words.py").write_text(METHOD)
    sys.modules.pop("staged_words", None)
    function = "def score(answer):\n    return float(len(answer))\n"
    Path("my_file.py").write_text(function)
    rows = "".join(json.dumps({"prompt": f"Sing {k}: "}) + "\n" for k in range(4))
    Path("rows.jsonl").write_text(rows)
    Path("recipe.yaml").write_text(yaml.safe_dump({
        "method": "staged_words:Staged", "data": "rows.jsonl", "reward": "my_file.py:score", "out": "run", "steps": 1,
        "prompts_per_step": 2, "n": 2, "sampling": {"max_tokens": 4}, "engine": {"max_num_seqs": 4, "max_len": 64},
        "objective": {"kind": "weighted_logp"},
        "model": {"name": "tiny", "shape": {"layers": 1, "width": 32, "heads": 2, "context": 64}},
    }))  # fmt: skip

    def shell(*words, code=0):
        done = CliRunner().invoke(app, ["train", "recipe.yaml", *words])
        assert done.exit_code == code and "Traceback" not in done.output, done.output
        return done.output

    held = lambda: {
        p: p.read_bytes()
        for p in Path("run").rglob("*")
        if p.is_file() and p.name not in (".lock", "recipe.yaml", BEFORE)
    }
    shell()
    before = held()
    Path("my_file.py").write_text(function + "# other\n")
    assert "my_file.py:score has changed" in shell("--resume", "word=b", code=2) and held() == before
    Path("my_file.py").write_text(function)
    Path("rows.jsonl").write_text(rows + rows.replace("Sing", "Hum"))
    assert "rows.jsonl has changed" in shell("--resume", "word=b", code=2) and held() == before
    Path("rows.jsonl").write_text(rows)
    Path("run/word/word.txt").write_text("by hand")
    edited = held()
    said = shell("--resume", "steps=2", code=2)
    assert "run/word/word.txt of stage 'word' was changed after it was made: put it back as it was" in said
    assert said.count("\n") == 1 and held() == edited
    Path("run/word/word.txt").write_text("a")
    assert "stage 'word' is made again" in shell("--resume", "word=b")
    assert (
        Path("run/word/word.txt").read_text() == "b"
        and Path("run/replaced/word-1/word.txt").read_text() == "a"
    )
    old = {
        p.relative_to("run/replaced/run-1"): p.read_bytes()
        for p in Path("run/replaced/run-1").rglob("*")
        if p.is_file()
    }
    assert all(
        old[p.relative_to("run")] == text
        for p, text in before.items()
        if p.parts[1] in ("checkpoints", "episodes", "metrics.jsonl")
    )
    assert Path("run/replaced/run-1/data.json").read_bytes() == before[Path("run/data.json")]
