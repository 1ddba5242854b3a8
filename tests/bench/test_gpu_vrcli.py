"""The two scripts that wait for a GPU, rehearsed: every stage with a tiny model, a call that is cut, and one that goes
on from the small files of another machine."""

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.config import ModelConfig
from trailmark.models.load import load_model
from trailmark.runs.store import read_metrics

BENCH = Path(__file__).parents[2] / "bench"
ROWS = [{"id": f"s{k}", "story_id": f"book{k}", "chapter_index": 2, "next_chapter_header": f"Part {k}",
         "next_chapter": f"Part {k}\n" + "Ann left the house. " * (k + 2), "next_chapter_synopsis": "She goes.",
         "story_text": "Ann sat down."} for k in range(6)]  # fmt: skip


def shell(*words):
    done = CliRunner().invoke(app, [str(w) for w in words])
    assert done.exit_code == 0, done.output
    return done.stdout


def run(monkeypatch, script, *words):
    """The script as a program, in this process."""
    monkeypatch.setattr(sys, "argv", [script, *map(str, words)])
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.delitem(sys.modules, "gpu_training", raising=False)  # it reads --small when it is imported
    return runpy.run_path(str(BENCH / script))


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in ROWS))
    shell("data", "stories", "rows.jsonl", "--out", "carry-data", "--over", "0", "--identical", "--test", "0.3")
    shape = {"family": "llama", "layers": 1, "width": 32, "heads": 2, "context": 4096}
    lm = load_model(ModelConfig.model_validate({"name": "tiny", "shape": shape}))
    lm.base.save_pretrained("start")
    lm.tokenizer.save_pretrained("start")
    return tmp_path


def test_base_reasoning_sft_and_rl_on_novels(place, monkeypatch, capsys):
    script = run(monkeypatch, "gpu_vrcli_novels.py", "--small", "--model", "start")
    stages = script["Stages"]
    asked = []

    def call(self, *words):
        if not budget:
            raise TimeoutError
        budget.pop()
        asked.append(str(words[0]))
        return shell(*words)

    monkeypatch.setattr(stages, "call", call)
    budget = [0] * 5  # the fifth command is the training; then the time is over
    with pytest.raises(SystemExit) as cut:
        script["main"]()
    assert cut.value.code == 3 and "rl.jsonl: not finished" in capsys.readouterr().out
    assert asked == ["train", "improvement", "train", "eval", "train"]
    assert {f.name for f in Path("carry-out").iterdir()} == {"sft.json", "reasoning.jsonl", "metrics.jsonl"}
    shutil.rmtree("runs")  # another machine: only the small files are there
    budget[:] = [0] * 3
    script["main"]()
    assert asked[5:] == ["train", "eval", "improvement"]
    said = capsys.readouterr().out
    rows = {x.split("|")[1].strip(): x.split("|")[2].strip() for x in said.splitlines() if x.startswith("| ")}
    assert list(rows) == ["arm", "base, no plan", "sft", "reasoning", "rl", "empty", "gold", "synopsis", "other"]
    assert rows["empty"] == "0.00 [0.00, 0.00]" and "[" in rows["rl"]
    table = json.loads(Path("carry-out/table.json").read_text())["arms"]
    assert rows["rl"].startswith(f"{table['rl']['improvement']['value'] + 0.0:.2f} [")
    test = {json.loads(x)["id"] for x in Path("carry-data/test.jsonl").read_text().splitlines()}
    for name in ("reasoning", "rl"):
        played = [json.loads(x) for x in Path(f"carry-out/{name}.jsonl").read_text().splitlines()]
        assert {e["task"]["id"] for e in played} == test and len(test) == 2
    assert [r["step"] for r in read_metrics(Path("carry-out/metrics.jsonl"))] == [0, 1, 2]
    budget[:] = []
    script["main"]()  # everything is there: nothing is asked
    assert len(asked) == 8


@pytest.mark.slow
def test_an_update_of_grpo_tree_against_flat(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--small", "--repeats", "1", "--commit", "abc", "--out", "found.jsonl"]
    script = run(monkeypatch, "gpu_vrcli.py", *words)
    script["main"]()
    rows = [json.loads(x) for x in Path("found.jsonl").read_text().splitlines()]
    names = ["update, one group", "update, four groups", "likelihoods"]
    assert [r["name"] for r in rows] == [f"gpu_vrcli/{n}" for n in names]
    for r in rows:
        tree, flat = (r["details"][layout]["value"] for layout in ("tree", "flat"))
        assert tree == pytest.approx(flat, rel=1e-2) and r["commit"] == "abc"
    capsys.readouterr()
    script["main"]()
    assert capsys.readouterr().out.count("measured before") == 3
