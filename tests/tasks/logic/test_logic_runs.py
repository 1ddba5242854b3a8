"""The logic task in recipes and commands: gold answers, imitation, a policy gradient, and what looks at their runs."""

import json

from typer.testing import CliRunner

from trailmark.commands.app import app

CONTEXT = "Each yumpus is a dumpus. Dumpuses are not sour. Max is a yumpus."
SHAPE = {"family": "llama", "layers": 1, "width": 16, "heads": 2, "context": 2048}


def call(*words, text=None):
    done = CliRunner().invoke(app, [str(w) for w in words], input=text)
    assert done.exit_code == 0, done.output
    return done.output


def test_logic_in_every_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"context": f"{CONTEXT} Rex is a {kind}umpus.", "question": f"True or false? Max is {w}sour.",
             "options": ["True", "False"], "answer": a} for kind in "wrjvzt" for w, a in (("", "B"), ("not ", "A"))]
    (tmp_path / "prontoqa_dev.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    options = {"dataset": "prontoqa", "path": str(tmp_path)}
    words = [f"{k}={v}" for k, v in options.items()]
    assert "8 rows" in call("data", "gold", "logic", "gold.jsonl", *words, "--split", "dev", "--n", 8)
    model = {"name": "tiny", "shape": SHAPE}
    sft = {"method": "sft", "out": "sft", "data": "gold.jsonl", "chat": False, "steps": 1, "batch": 2, "model": model}
    (tmp_path / "sft.yaml").write_text(json.dumps(sft))
    call("train", "sft.yaml")
    task = {"name": "logic", "options": {**options, "cut": "dev"}}
    pg = {"method": "policy_gradient", "out": "pg", "task": task, "prompts_per_step": 2, "n": 2, "steps": 1,
          "sampling": {"max_tokens": 6}, "model": {"name": "sft"}}  # fmt: skip
    (tmp_path / "pg.yaml").write_text(json.dumps(pg))
    call("train", "pg.yaml")
    assert "prontoqa-train-" in call("inspect", "pg")
    assert "report.html" in call("report", "pg", "--no-plots")
    CliRunner().invoke(app, ["verify", "pg"])
    checks = {c["name"]: c for c in json.loads((tmp_path / "pg" / "verify.json").read_text())["checks"]}
    assert checks["replay"]["status"] == "pass", checks
    said = call("play", "logic", *words, "--split", "dev", "--out", "play.jsonl", text="Finish[The answer is A.]\n")
    assert "won" in said
    row = json.loads((tmp_path / "play.jsonl").read_text())
    assert row["task"]["id"] == "prontoqa-dev-1" and row["outcomes"]["self"]["success"] is True
    assert "ok (" in call("tasks", "check", "logic", *words, "cut=dev")
