"""`compare` on the two runs of the README: one was never evaluated, so it plays the starts of the other."""

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.runs.store import read_segment

ROOT = Path(__file__).parents[2]
SMALL = ["model.shape={family: llama, layers: 1, width: 32, heads: 2, context: 128}"]


def shell(*words):
    done = CliRunner().invoke(app, list(map(str, words)))
    assert "Traceback" not in done.output, done.output
    return done


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The README's commands, small."""
    here = tmp_path_factory.mktemp("readme")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        assert shell("data", "gold", "arith", "arith.jsonl", "level=2", "--n", "40").exit_code == 0
        train = lambda name, *more: shell("train", ROOT / "recipes" / f"{name}.yaml", *SMALL, *more)
        assert train("arith-sft", "steps=4", "checkpoint.every=2", "batch=4").exit_code == 0
        start = "model.name=runs/arith-sft/checkpoints/000002/policy"
        done = train("arith-grpo", "steps=2", start, "prompts_per_step=2", "n=2", "eval.every=1", "eval.n=12",
                     "sampling.max_tokens=6",
                     "checkpoint.every=1", "engine.max_len=128")  # fmt: skip
        assert done.exit_code == 0, done.output
    return here


def test_the_two_runs_of_the_readme_are_compared(folder, monkeypatch):
    monkeypatch.chdir(folder)
    before = sorted(Path("runs").rglob("*"))
    done = shell("compare", "runs/arith-sft", "runs/arith-grpo", "--json")
    assert done.exit_code == 0 and "runs/arith-sft has no evaluation: it plays the 12 starts" in done.stderr
    result = json.loads(done.stdout)
    assert [r["name"] for r in result["rows"]] == ["arith-sft", "arith-grpo"]
    assert [r["episodes"] for r in result["rows"]] == [12, 12] and result["rows"][0]["failed"] == 0
    assert {d["metric"]: d["starts"] for d in result["differences"]}["success"] == 12
    assert sorted(Path("runs").rglob("*")) == before  # nothing is written into a run
    # What it played is what `eval` plays with the evaluation's settings.
    out = "again.jsonl"
    shell("eval", "runs/arith-sft", "--task", "arith", "level=2", "--n", "12", "--max-tokens", "6", "--out", out)
    mine = result["rows"][0]["metrics"]["tokens"]["value"]
    assert mine == sum(len(t.tokens) for e in read_segment(Path(out)) for t in e.turns) / 12
    order = json.loads(shell("compare", "runs/arith-grpo", "runs/arith-sft", "--json").stdout)["rows"]
    assert [r["name"] for r in order] == ["arith-grpo", "arith-sft"] and order[1]["metrics"] == result["rows"][0][
        "metrics"
    ]


def test_where_nothing_was_evaluated_the_commands_to_type_are_printed(folder, monkeypatch):
    monkeypatch.chdir(folder)
    done = shell("compare", "runs/arith-sft", "runs/arith-sft/../arith-sft")
    assert done.exit_code == 2 and "runs/arith-sft has no evaluation" in done.stderr
    lines = [line.strip() for line in done.stderr.splitlines() if line.startswith("  trailmark")]
    assert [shlex.split(line)[1] for line in lines] == ["eval", "eval", "compare"]
    typed = [shlex.split(line)[1:] for line in lines]
    assert "--task" in typed[0] and "--out" in typed[0] and typed[2][-2:] == ["--episodes", "compared"]
    words = [w if w != "TASK" else "arith" for w in typed[0]]  # an imitation does not know its task
    words[words.index("KEY=VALUE")] = "level=2"
    words[words.index("200")] = "5"
    assert shell(*words).exit_code == 0
    assert shell(*typed[2]).exit_code == 0
    Path("runs/arith-sft/evaluation/compared.jsonl").unlink()
    Path("runs/arith-sft/evaluation").rmdir()
