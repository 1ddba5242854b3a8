"""A submission file has an answer for every question, or is not written. And the first comparison of two runs."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.errors import DataError
from trailmark.evaluate.choices import choose_row
from trailmark.tasks.logic.choices import order_row, predictions
from trailmark.types import Episode, Failed, Invalid, Scored, Task, Turn

OPTIONS = ["w", "x", "y", "z"]


def call(*words):
    done = CliRunner().invoke(app, [str(w) for w in words])
    assert "Traceback" not in done.output and (done.exception is None or isinstance(done.exception, SystemExit)), done
    return done


def play(row, k=0, letter="B", outcome=None, name=None):
    text = f"so\nAction 1: Finish[The answer is {letter}.]" if letter else "I do not know"
    task = Task(name or f"q{row}", data={"question": "?", "options": OPTIONS, "label": 1, "row": row})
    outcome = outcome or Scored(float(letter == "B"), letter == "B")
    turns = () if isinstance(outcome, Failed) else (Turn("policy", (1,), (2,), text=text),)
    return Episode(f"{task.id}:{k}", task, task.id, turns, {"self": outcome})


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with questions, and two runs: one that plays them, and one that imitates rows and has no task."""
    monkeypatch.chdir(tmp_path)
    rows = [{"context": f"c{k}", "question": "q", "answers": OPTIONS, "label": k} for k in range(3)]
    twice = {"context": "c", "question": "q", "answers": ["w", "w", "y", "z"], "label": 0, "id_string": "twice"}
    dump = lambda name, some: Path(name).write_text("".join(json.dumps(r) + "\n" for r in some))
    dump("reclor_val.jsonl", rows)
    dump("reclor_test.jsonl", [{k: v for k, v in r.items() if k != "label"} for r in [*rows, twice]])
    dump("rows.jsonl", [{"prompt": "a", "response": "b"}] * 2)
    small = {"model": {"name": "tiny", "shape": {"layers": 1, "width": 16, "heads": 2, "context": 1024}}, "steps": 1}
    task = {"name": "logic", "options": {"dataset": "reclor", "path": str(tmp_path)}}
    engine = {
        "engine": {"max_num_seqs": 4, "max_len": 1024},
        "sampling": {"max_tokens": 3},
        "eval": {"split": "val", "n": 2},
    }
    dump("reclor_train.jsonl", [{**rows[0], "context": f"train {k}"} for k in range(20)])
    grpo = {"method": "policy_gradient", "credit": "group", "out": "mygrpo", "task": task, "prompts_per_step": 1,
        "n": 2,
            **small, **engine}  # fmt: skip
    sft = {"method": "sft", "out": "mysft", "data": "rows.jsonl", "batch": 1, **small}
    for recipe in (grpo, sft):
        Path("r.yaml").write_text(yaml.safe_dump(recipe))
        done = call("train", "r.yaml")
        assert done.exit_code == 0, done.output
    return tmp_path


def test_a_leaderboard_asks_every_question_whatever_the_recipe_says(place, monkeypatch):
    asked = []
    from trailmark.evaluate import run as evaluation

    real = evaluation.evaluate
    monkeypatch.setattr(evaluation, "evaluate", lambda *a, **k: asked.append(k["tasks"]) or real(*a, **k))
    done = call("eval", "mygrpo", "--split", "test", "--leaderboard", "p.npy", "--json")
    assert done.exit_code == 0, done.output
    assert [t.data["row"] for t in asked[0]] == [0, 1, 2, 3]  # eval.n is 2, and one question has equal options
    assert np.load("p.npy", allow_pickle=False).shape == (4,)
    assert json.loads(done.stdout)["n"] is None
    done = call("eval", "mygrpo", "--split", "test", "--leaderboard", "p2.npy")
    assert "4 predictions of mygrpo, 4 of answers that name no option" in done.output
    assert json.loads(call("eval", "mygrpo", "--json").stdout)["rows"][0]["episodes"] == 2  # eval.n otherwise


def test_a_leaderboard_of_a_part_of_the_file_is_refused_before_anything_is_played(place, monkeypatch):
    from trailmark.evaluate import run as evaluation

    monkeypatch.setattr(evaluation, "evaluate", lambda *a, **k: pytest.fail("it played"))
    cut = call("eval", "mygrpo", "cut=train", "--split", "train", "--leaderboard", "p.npy")
    assert cut.exit_code == 2 and "needs an answer to every question" in cut.stderr
    other = call("eval", "tiny", "--task", "puzzle", "--leaderboard", "p.npy")
    assert other.exit_code == 2 and "is for task logic, not for 'puzzle'" in other.stderr
    assert call("eval", "mygrpo", "--leaderboard", "p.npy", "--n", "2").exit_code == 2
    stored = call("eval", "--episodes", "mygrpo", "--leaderboard", "p.npy")
    assert stored.exit_code == 2 and "--leaderboard" in stored.stderr
    assert not Path("p.npy").exists()


def test_a_failed_play_is_no_prediction(place, monkeypatch):
    from trailmark.evaluate import run as evaluation

    real = evaluation.evaluate

    def broken(*a, **k):
        report = real(*a, **k)
        e = report.episodes[1]
        report.episodes[1] = Episode(e.id, e.task, e.group, (), {"self": Failed("the server went away")})
        return report

    monkeypatch.setattr(evaluation, "evaluate", broken)
    words = ["eval", "mygrpo", "--split", "val", "--leaderboard", "p.npy", "--out", "e.jsonl", "--json"]
    done = call(*words)
    assert done.exit_code == 1 and not Path("p.npy").exists()
    assert "p.npy was not written: 1 of 3 questions have no answer" in done.stderr
    assert "the server went away" in done.stderr
    assert json.loads(done.stdout)["rows"][0]["failed"] == 1 and Path("e.jsonl").exists()  # nothing else is lost


def test_predictions_need_an_answer_for_every_row():
    blank = play(2, letter="")
    found, unread = predictions([play(0), play(1, letter="D"), blank], 3)
    assert found.tolist() == [1, 3, 0] and unread == 1
    with pytest.raises(DataError, match="1 of 3 questions have no answer: 1 questions were not asked"):
        predictions([play(0), play(1)], 3)
    broken = play(1, outcome=Failed("no answer"))
    with pytest.raises(DataError, match=r"1 of 2 .*: 1 plays failed, the first of 'q1' \(no answer\)"):
        predictions([play(0), broken], 2)
    assert predictions([play(0), broken, play(1, 1, "C")], 2)[0].tolist() == [1, 2]  # another sample did not fail


def test_tables_count_what_failed_and_what_is_invalid():
    broken, wrong = play(1, outcome=Failed("gone")), play(2, outcome=Invalid("not to be trusted"))
    row = order_row({"ABCD": [play(0), broken], "BACD": [play(0), play(1)]})
    assert [row[k] for k in ("episodes", "scored", "invalid", "failed", "tasks")] == [4, 3, 0, 1, 1]
    assert "1 questions were not scored in every order" in row["warning"]
    row = choose_row([play(0), broken, wrong], [[0.5], [0.5], [0.5]])
    assert [row[k] for k in ("episodes", "scored", "invalid", "failed")] == [3, 1, 1, 1]


def test_a_run_that_imitates_is_compared_with_one_that_plays(place):
    for pair in (["mygrpo", "mysft"], ["mysft", "mygrpo"]):
        done = call("eval", *pair, "--json")
        assert done.exit_code == 0, done.output
        said = json.loads(done.stdout)
        assert [r["name"] for r in said["rows"]] == pair and [r["episodes"] for r in said["rows"]] == [2, 2]
        one, two = (said["configurations"][name] for name in pair)
        assert one["model"] != two["model"]
        assert all(one[k] == two[k] for k in ("task", "options", "split", "n", "seed", "sampling"))
    alone = call("eval", "mysft")
    assert alone.exit_code == 2 and "which task?" in alone.stderr
