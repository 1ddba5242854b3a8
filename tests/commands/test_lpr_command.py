"""`trailmark stages` and `trailmark lpr`: names of stages, rounds, what is printed and exported, and the sentences for
mistakes."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from trailmark.commands.app import app

SOLVER = Path(__file__).parents[1] / "methods" / "lpr_careless.py"


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """Runs a command on a recipe of three questions with four solutions each: (exit code, stdout, stderr in a line).
    `only NAME`: makes a stage."""
    monkeypatch.chdir(tmp_path)
    recipe = {
        "method": "lpr",
        "out": "run",
        "model": {"name": "tiny", "shape": {"layers": 1, "width": 16, "heads": 2, "context": 96}},
        "task": {"name": "arith", "options": {"level": 2}},
        "seats": {"policy": {"kind": "scripted", "function": f"{SOLVER}:careless"}},
        "sample": {"prompts": 3, "n": 4},
        "states": {"start": 0.0, "ratio": 1.0},
        "steps": 2,
    }
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))

    def run(*words):
        command, *more = words
        if command == "only":
            words = ["stages", "r.yaml", *more[1:], "--only", more[0]]
        done = CliRunner().invoke(app, words if words[0] == "stages" else ["lpr", *words])
        assert "Traceback" not in done.output
        return done.exit_code, done.stdout.strip(), " ".join(done.stderr.split())

    return run


def test_the_list_of_stages(shell):
    code, said, _ = shell("stages", "r.yaml", "steps=1", "pairs.process=false")
    assert code == 0 and said.splitlines() == [
        "solutions-1     to do", "cleaned-1       to do", "pairs-1         to do", "policy-1        to do",
    ]  # fmt: skip
    assert len(shell("stages", "r.yaml")[1].splitlines()) == 20 and not Path("run").exists()


def test_stages_one_by_one_and_again(shell):
    first = shell("only", "solutions")
    assert first[:2] == (0, "solutions-1: solutions 12, questions 3") == shell("only", "solutions-1")[:2]
    kept = Path("run/solutions-1/000.jsonl").read_bytes()
    assert shell("only", "cleaned", "--round", "1")[1].startswith("cleaned-1: solutions 12, right ")
    assert shell("only", "states")[1] == "states-1: states 24, of type step 24"
    assert Path("run/solutions-1/000.jsonl").read_bytes() == kept
    listed = shell("stages", "r.yaml")[1].splitlines()
    assert [line.split()[1:] for line in listed[:4]] == [["done"], ["done"], ["done"], ["to", "do"]]


def test_the_list_says_what_will_be_made_again(shell):
    assert shell("only", "solutions")[0] == 0
    first = lambda *words: shell("stages", "r.yaml", *words)[1].splitlines()[0].split(maxsplit=1)[1]
    assert first() == "done"
    assert first("sample.n=5") == "to do again: key 'sample.n' was 4 and is 5"
    assert shell("only", "cleaned")[0] == 0
    second = shell("stages", "r.yaml", "sample.n=5")[1].splitlines()[1]
    assert second == "cleaned-1       done, and looked at again after solutions-1"
    Path("run/stages/solutions-1.json").rename("run/stages/solutions-1.begun.json")
    assert first() == "begun"


def test_a_stage_is_made_again_on_demand(shell):
    assert shell("stages", "r.yaml", "--only", "solutions", "--only", "cleaned")[0] == 0
    kept = Path("run/cleaned-1/all.jsonl").read_bytes()
    code, said, why = shell("stages", "r.yaml", "--redo", "cleaned")
    assert code == 0 and said.startswith("cleaned-1: solutions 12") and "is made again: you want it again" in why
    old, now = Path("run/replaced/cleaned-1-1/all.jsonl"), Path("run/cleaned-1/all.jsonl")
    assert old.read_bytes() == kept == now.read_bytes()
    assert not Path("run/metrics.jsonl").exists()


def test_held_out_questions_follow_the_number_of_shards(shell):
    """Other shards hold the same states. What is held out changes all the same: two questions of three, then one."""
    for shards, held in ((2, 2), (3, 1)):
        words = [f"states.shards={shards}", "labels.dev_shards=[1]"]
        for stage in ("solutions", "cleaned", "states", "completions", "values", "examples"):
            code, _, why = shell("only", stage, *words)
            assert code == 0, why
        rows = [json.loads(line) for line in Path("run/examples-1/dev.jsonl").read_text().splitlines()]
        assert len({r["group"] for r in rows}) == held


def test_a_stage_whose_inputs_are_not_there(shell):
    code, _, why = shell("only", "cleaned")
    assert code == 2 and "cleaned-1" in why and "solutions" in why
    assert not Path("run/cleaned-1").exists()
    code, _, why = shell("export", "cleaned", "r.yaml", "out.json")
    assert code == 2 and not Path("out.json").exists()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("only", "stats"), "there is no stage 'stats' of round 1 in this recipe. Did you mean 'states-1'?"),
        (("only", "prm", "--round", "3"), "there is no stage 'prm' of round 3 in this recipe. Did you mean"),
        (("only", "rl"), "there is no stage 'rl' of round 1 in this recipe."),
        (("only", "scores", "pairs.process=false"), "there is no stage 'scores' of round 1 in this recipe."),
        (("stages", "other.yaml"), "other.yaml: its method 'sft' has no stages: `trailmark train` makes the run."),
        (("stages", "none.yaml"), "none.yaml"),
    ],
)
def test_mistakes(shell, words, why):
    Path("other.yaml").write_text(json.dumps({"method": "sft", "data": "x", "model": {"name": "tiny"}}))
    code, said, told = shell(*words)
    assert code == 2 and said == "" and why in told and not Path("run").exists()


def test_exported_records(shell):
    shell("only", "solutions")
    shell("only", "cleaned")
    shell("only", "states")
    assert shell("export", "states", "r.yaml", "s.json")[:2] == (0, "s.json: 3 records")
    assert shell("export", "states-1", "r.yaml", "s.jsonl")[:2] == (0, "s.jsonl: 3 records")
    rows = json.loads(Path("s.json").read_text())
    assert [json.loads(line) for line in Path("s.jsonl").read_text().splitlines()] == rows
    for row in rows:
        assert len(row["response"]) == 4 == len(row["pred"]) and len(row["inter_states"]) == 8
        for s in row["inter_states"]:  # a state is the beginning of its solution, up to the end of a line
            said = row["response"][s["resp_id"]]
            assert s["state"] == "".join(f"{line}\n" for line in said.split("\n")[: s["step_id"] + 1])
        for said, pred in zip(row["response"], row["pred"]):
            assert (pred == str(row["label"])) == said.endswith(f"#### {row['label']}")
    before = Path("s.json").read_bytes()
    code, _, why = shell("export", "cleaned", "r.yaml", "s.json")
    assert code == 2 and "s.json exists: choose another file." in why and Path("s.json").read_bytes() == before
    assert shell("export", "cleaned", "r.yaml", "s.json", "--overwrite")[0] == 0
    assert [list(row) for row in json.loads(Path("s.json").read_text())] == [
        ["text", "label", "response", "pred", "id"]
    ] * 3
    code, _, why = shell("export", "prm", "r.yaml", "p.json")
    assert code == 2 and "stage 'prm-1' is not done yet: make it with `trailmark stages`." in why
