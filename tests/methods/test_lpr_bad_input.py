"""Questions and answers that cannot be used, on the way through LPR: counted and named, or a sentence and exit code
2."""

import json

import pytest
from typer.testing import CliRunner

from trailmark.commands.app import app

SCRIPT = """
def solve(prompt, draw):
    if "q0" in prompt:
        said = draw.choice(["A and B", "B", "A", "E", "B"])
        return f" I see {draw.randrange(10**6)}.\\nAction 1: Finish[The answer is {said}.]"
    return " I see.\\nAction 1: Finish[The answer is B.]"
"""
ROWS = [
    {"question": "q0", "options": ["x", "y"], "label": 1, "id": "good"},
    {"question": "q1", "options": ["x", "y"], "id": "hidden"},
    {"question": "q2", "options": ["x", "X"], "label": 0, "id": "twice"},
]


@pytest.fixture
def shell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "who.py").write_text(SCRIPT)
    recipe = {
        "method": "lpr", "out": "run", "steps": 1, "sample": {"n": 20}, "sampling": {"max_tokens": 200},
        "model": {"name": "tiny", "shape": {"layers": 1, "width": 16, "heads": 2, "context": 1024}},
        "task": {"name": "logic", "options": {"dataset": "choice", "path": "q_train.jsonl"}},
        "clean": {"split": "react"}, "pairs": {"process": False}, "preference": {"steps": 1, "batch": 2},
        "seats": {"policy": {"kind": "scripted", "function": "who.py:solve"}},
    }  # fmt: skip
    (tmp_path / "r.yaml").write_text(json.dumps(recipe))

    def run(rows, *words):
        (tmp_path / "q_train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        done = CliRunner().invoke(app, ["stages", "r.yaml", *(f"--only={w}-1" for w in words)])
        assert "Traceback" not in done.output
        return done.exit_code, " ".join(done.output.split())

    return run


def test_hidden_labels_repeated_options_and_two_options_are_counted(shell, tmp_path):
    code, said = shell(ROWS, "solutions")
    assert code == 0 and "solutions 40, questions 2, hidden labels 1, repeated options 1" in said
    code, said = shell(ROWS, "cleaned")
    assert code == 0 and "left out: not judged (the label of this question is hidden) 20" in said
    lines = (tmp_path / "run/cleaned-1/all.jsonl").read_text().splitlines()
    texts = [json.loads(line)["turns"][0]["text"] for line in lines]
    two, none = (sum(f"The answer is {x}." in t for t in texts) for x in ("A and B", "E"))
    assert len(texts) == 20 and two > 0 and none > 0
    assert f"answers that name several options {two}, answers that name no option {none}" in said
    right = sum(json.loads(line)["outcomes"]["self"]["success"] for line in lines)
    assert right == sum("The answer is B." in t for t in texts) and f"solutions 20, right {right}," in said


def test_no_question_that_can_be_used(shell):
    code, said = shell(ROWS[2:], "solutions")
    assert code == 2 and "has no question that can be used" in said and "'repeated options': 1" in said
    assert shell(ROWS[1:2], "solutions")[0] == 0
    code, said = shell(ROWS[1:2], "cleaned")
    assert code == 2 and "of 20 solutions can be used: 20 not judged (the label of this question is hidden)" in said
