"""Rows of results: what counts, what is left out, and that a table is recomputed from disk bit for bit."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.engines.scripted import ScriptedEngine
from trailmark.errors import DataError
from trailmark.evaluate.run import evaluate, summarise
from trailmark.evaluate.stored_episodes import compare, episode_files, evaluated, short_names
from trailmark.models.tiny import tiny_tokenizer
from trailmark.rollout.play import Seat
from trailmark.runs.episode_json import to_json
from trailmark.runs.store import read_metrics, read_segment, write_segment
from trailmark.tasks import get_task
from trailmark.types import Episode, Failed, Invalid, Scored, Task, Turn


def episode(task="a", reward=0.0, success=None, k=0, outcome=None, text="", tokens=3, seed=1, **info):
    turn = Turn("policy", (1,), tuple(range(tokens)), text=text)
    made = outcome or Scored(reward, success)
    return Episode(f"{task}/{k}", Task(task, 0, {"x": task}), task, (turn,), {"self": made}, seed=seed, info=info)


def shell(*words):
    done = CliRunner().invoke(app, list(words))
    assert "Traceback" not in done.output, done.output
    return done


def last_line(done):
    return json.loads(done.stdout.splitlines()[-1])


def write(path, episodes):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(to_json(e) + "\n" for e in episodes))
    return str(path)


def test_a_row_by_hand():
    played = [episode("a", 1.0, True), episode("b", 0.5, False, tokens=5), episode("c", 0.0, False, tokens=1)]
    played += [episode("d", outcome=Failed("crash")), episode("e", outcome=Invalid("no answer"))]
    row = summarise(played, "x")
    counts = {k: row[k] for k in ("name", "episodes", "scored", "invalid", "failed", "tasks")}
    assert counts == {"name": "x", "episodes": 5, "scored": 3, "invalid": 1, "failed": 1, "tasks": 5}
    m = row["metrics"]
    assert [m[k]["value"] for k in ("success", "reward", "cost", "turns", "tokens")] == [1 / 3, 0.5, -0.5, 1.0, 3.0]
    assert m["success"]["method"] == "wilson" and (m["cost"]["low"], m["cost"]["high"]) == (
        -m["reward"]["high"], -m["reward"]["low"],
    )  # fmt: skip
    assert "pass@1" not in m
    assert summarise([episode(outcome=Failed("x"))])["metrics"] == {}  # a crash is never a zero
    with pytest.raises(DataError, match="has no side 'slef'. Did you mean 'self'"):
        summarise(played, side="slef")


def test_several_tries_by_hand():
    right, wrong = ("#### 4", 1.0, True), ("#### 5", 0.0, False)
    tries = {"a": [right, right, wrong], "b": [wrong, wrong, ("?", 0.0, False)]}
    played = [episode(t, r, s, k, text=text) for t, rows in tries.items() for k, (text, r, s) in enumerate(rows)]
    m = summarise(played)["metrics"]
    assert m["pass@1"]["value"] == pytest.approx((2 / 3 + 0) / 2) and m["pass@2"]["value"] == pytest.approx(0.5)
    assert m["maj@2"]["value"] == pytest.approx((0.5 + 0.5 + 1) / 3 / 2) and m["maj@3"]["value"] == 0.5
    assert m["success"]["method"] == "wilson, clustered" and m["success"]["n"] == 2
    noted = [episode("a", 1.0, True, k, answer="x" if k else None) for k in range(2)]
    assert summarise(noted)["metrics"]["maj@1"]["value"] == 0.5  # a protocol may note the answer itself
    broken = [*played, episode("c", outcome=Failed("x"))]
    assert summarise(broken)["metrics"]["pass@2"] == m["pass@2"]


def test_playing_is_training_s_own_code(tmp_path):
    source = get_task("arith", level=1)
    gold = {t.data["question"]: t.meta["gold"] for t in source.tasks("test", 40, 5)}
    words = tiny_tokenizer()

    def half(prompt, draw):
        return gold[prompt.strip()] if draw.random() < 0.5 else "#### 99"

    seats = [Seat("policy", ScriptedEngine(half, words))]
    report = evaluate(source, seats, n=40, samples=4, seed=5, name="half")
    assert (
        report.row["episodes"] == 160 and report.row["tasks"] == 40 and report.episodes[0].id.startswith("eval:arith")
    )
    assert 0.4 < report.row["metrics"]["success"]["value"] < 0.6 < report.row["metrics"]["pass@4"]["value"]
    assert evaluate(source, seats, n=40, samples=4, seed=5, name="half").row == report.row
    path = write_segment(tmp_path, 1, report.episodes)
    assert summarise(read_segment(path), "half") == report.row  # from disk alone, bit for bit


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two runs of four steps that differ in their credit, and are evaluated on the same starts."""
    folder = tmp_path_factory.mktemp("trained")
    recipe = str((__import__("pathlib").Path(__file__).parents[2] / "recipes/bandit-policy-gradient.yaml").resolve())
    for name in ("group", "returns"):
        shell(
            "train", recipe, f"out={folder / name}", f"credit={name}", "steps=4", "eval.every=4", "eval.n=30", "seed=3"
        )
    return folder


def test_eval_of_a_run_is_the_run_s_own_evaluation(trained, tmp_path):
    run = trained / "group"
    own = read_metrics(run)[-1]
    out = tmp_path / "deep" / "played.jsonl"
    done = last_line(shell("eval", str(run), "--json", "--out", str(out)))
    m = done["rows"][0]["metrics"]
    assert (m["success"]["value"], m["reward"]["value"]) == (own["eval/success"], own["eval/reward"])
    stored = read_segment(run / "evaluation" / "000004.jsonl")
    assert [(e.id, [t.tokens for t in e.turns]) for e in read_segment(out)] == [
        (e.id, [t.tokens for t in e.turns]) for e in stored
    ]
    again = last_line(shell("eval", "--episodes", str(run), "--json"))
    assert again["rows"][0]["metrics"] == m and again["rows"][0]["name"] == "evaluation after step 4"
    assert "exists" in shell("eval", str(run), "--out", str(out)).stderr
    checkpoint = run / "checkpoints" / "000004"
    for model in (checkpoint, checkpoint / "policy"):  # the same model by its other names
        assert last_line(shell("eval", str(model), "--json"))["rows"][0]["metrics"] == m
    other = last_line(
        shell("eval", str(run), "--n", "5", "--samples", "3", "--temperature", "0", "--seed", "1", "--json")
    )
    assert other["rows"][0]["episodes"] == 15 and other["sampling"]["temperature"] == 0
    assert other["rows"][0]["metrics"]["pass@3"]["value"] in (0.0, 1.0)  # greedy tries of one start are one


def test_eval_of_tiny_and_its_table():
    done = shell("eval", "tiny", "kind=bandit", "actions=3", "--task", "solved", "--n", "20", "--max-tokens", "1")
    lines = done.stdout.splitlines()
    assert done.exit_code == 0 and "success" in done.stdout and lines[0].startswith("solved test")
    assert json.loads(lines[-1])["rows"][0]["episodes"] == 20


COUNTING = """
from trailmark.tasks.solved import Solved

class Make(Solved):
    tokenizer = None
    def bind(self, tokenizer):
        self.tokenizer = tokenizer
    def tasks(self, split="train", n=None, seed=0):
        assert self.tokenizer is not None
        return super().tasks(split, n, seed)
"""


def test_starts_are_drawn_when_the_world_knows_the_tokenizer(tmp_path, monkeypatch):
    """As in training: a world may choose its starts by their lengths."""
    (tmp_path / "counting_world.py").write_text(COUNTING)
    monkeypatch.syspath_prepend(tmp_path)
    done = shell("eval", "tiny", "kind=bandit", "--task", "counting_world:Make", "--n", "3", "--max-tokens", "1")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["rows"][0]["scored"] == 3


def test_compare_by_hand(tmp_path):
    a = [episode(f"t{i}", 1.0, True) for i in range(40)]
    b = [episode(f"t{i}", float(i < 10), i < 10) for i in range(40)]
    files = [write(tmp_path / "b.jsonl", b), write(tmp_path / "a.jsonl", a)]
    done = shell("compare", *files)
    assert done.exit_code == 0 and "a - b" in done.stdout
    found = {d["metric"]: d for d in last_line(done)["differences"]}
    assert (
        found["success"]["value"] == 0.75
        and found["success"]["verdict"] == "holds"
        and found["success"]["starts"] == 40
    )
    assert found["cost"]["verdict"] == "reversed" and found["tokens"]["verdict"] == "unclear"
    assert found["success"]["sign_p"] == pytest.approx(2 / 2**30)
    assert len(shell("compare", *files, "--json").stdout.splitlines()) == 1


def test_compare_refuses_other_starts(tmp_path):
    a = [episode(f"t{i}", 1.0, True) for i in range(10)]
    b = [episode(f"t{i}", 0.0, False) for i in range(5, 15)]
    files = [write(tmp_path / "a.jsonl", a), write(tmp_path / "b.jsonl", b)]
    refused = shell("compare", *files)
    assert refused.exit_code == 2 and refused.stdout == ""
    assert "'a' and 'b' were not evaluated on the same starts and seeds: 10 are only in one" in refused.stderr
    found = last_line(shell("compare", *files, "--common", "--json"))["differences"]
    assert {d["starts"] for d in found} == {5} and found[0]["value"] == -1
    with pytest.raises(DataError, match="no start and seed in common"):
        compare({"a": a[:5], "b": b}, common=True)
    with pytest.raises(DataError, match="not the same in 'a' and 'b': their tasks differ"):
        compare({"a": a, "b": [replace(e, task=replace(e.task, data={"x": 0})) for e in a]})
    with pytest.raises(DataError, match="same starts and seeds"):
        compare({"a": a, "b": [replace(e, seed=2) for e in a]})  # other draws are another evaluation


def test_compare_of_runs(trained, tmp_path):
    done = last_line(shell("compare", str(trained / "group"), str(trained / "returns"), "--json"))
    assert [r["name"] for r in done["rows"]] == ["group", "returns"] and done["rows"][0]["episodes"] == 30
    assert {d["starts"] for d in done["differences"]} == {30}


def test_where_episodes_lie(tmp_path):
    e = [episode()]
    run = tmp_path / "run"
    write(run / "episodes" / "000001.jsonl", e)
    write(run / "episodes" / "000002.jsonl", e)
    (run / "recipe.yaml").write_text("method: x\n")
    assert [len(f) for f in episode_files(run).values()] == [2]
    with pytest.raises(DataError, match="only the episodes it learned from"):
        evaluated(run)
    write(run / "evaluation" / "000010.jsonl", e)
    write(run / "evaluation" / "000005.jsonl", e)
    assert list(episode_files(run)) == ["evaluation after step 10"] and evaluated(run)[1].name == "000010.jsonl"
    write(run / "evaluation" / "sft.jsonl", e)
    write(run / "evaluation" / "random.jsonl", e)
    assert list(episode_files(run)) == ["random", "sft"]
    with pytest.raises(DataError, match=r"several evaluations \(random, sft\): choose one"):
        evaluated(run)
    assert evaluated(run, "sft")[1] == evaluated(run, "evaluation/sft.jsonl")[1] == run / "evaluation" / "sft.jsonl"
    rows = last_line(shell("eval", "--episodes", str(run), "--json"))["rows"]
    assert [r["name"] for r in rows] == ["random", "sft"]
    assert list(episode_files(tmp_path)) == ["run/random", "run/sft"]  # a folder of runs
    assert short_names(["x/a", "y/a", "b"]) == ["x/a", "y/a", "b"] and short_names(["x/a", "x/b"]) == ["a", "b"]


def test_bad_input_is_a_sentence(trained, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.jsonl").write_text("{}\n")
    for words, said in [
        (["eval"], "either a MODEL"),
        (["eval", "tiny"], "which task?"),
        (["eval", "tiny", "mode", "--task", "taxi"], "expected key=value"),
        (["eval", "tiny", "--task", "txi"], "Did you mean 'taxi'"),
        (["eval", "tiny", "--task", "taxi", "--split", "tset"], "Did you mean 'test'"),
        (["eval", "--episodes", str(tmp_path / "no")], "no such file or folder"),
        (["eval", "--episodes", str(tmp_path / "empty")], "holds no episodes"),
        (["eval", "--episodes", str(tmp_path / "bad.jsonl")], "bad.jsonl:1: key 'id': is missing"),
        (["eval", "--episodes", str(trained / "group"), "--task", "taxi"], "takes no --task"),
        (["eval", "--episodes", str(trained / "group"), "--chat", "--n", "2"], "takes no --n or --chat"),
        (["compare", str(trained / "group")], "two or more runs or files"),
        (["compare", str(trained / "group"), str(trained / "returns"), "--episodes", "sft"], "holds neither sft nor"),
    ]:
        done = shell(*words)
        assert done.exit_code == 2 and said in done.stderr and done.stdout == "", (words, done.output)


def test_help_imports_nothing_heavy():
    code = (
        "import sys; sys.argv = ['trailmark', '--help']\nfrom trailmark.commands.app import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'matplotlib', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.endswith("[]\n") and all(word in done.stdout for word in (" eval ", " compare ", " study "))
