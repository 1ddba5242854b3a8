"""Solutions with labels of their steps: both layouts, their mistakes, and how a reward model is measured on them."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trailmark import formats
from trailmark.commands.app import app
from trailmark.errors import DataError
from trailmark.methods.lpr.labels import labelled_steps, step_curve, step_row
from trailmark.models.tiny import tiny_tokenizer
from trailmark.types import Annotation

WORDS = tiny_tokenizer()
SIMPLE = {"question": "1+1?", "steps": ["one and one", "so 2\n(two)", "done"], "labels": [1, 0, None], "id": "a"}
BENCH = {
    "idx": "p1", "question": "2+2?", "original_process": ["two twice", "4"],
    "modified_process": ["two twice", "makes 5", "5"], "error_steps": [2, 3], "classification": "confidence",
}  # fmt: skip


def write(path, *rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def said(e):
    return [WORDS.decode(e.turns[0].tokens[a:b]) for a, b in e.turns[0].steps]


def test_both_layouts(tmp_path):
    found = formats.read("step-labels", write(tmp_path / "rows.jsonl", SIMPLE, BENCH), WORDS)
    assert [(e.id, said(e)) for e in found.episodes] == [
        ("a/0", ["one and one\n", "so 2\n(two)\n", "done"]),
        ("p1/0", ["two twice\n", "4"]),
        ("p1/1", ["two twice\n", "makes 5\n", "5"]),
    ]
    assert [(a.episode, a.values) for a in found.annotations] == [
        ("a/0", (1.0, 0.0, -1.0)), ("p1/0", (1.0, 1.0)), ("p1/1", (1.0, 0.0, 0.0)),
    ]  # fmt: skip
    assert WORDS.decode(found.episodes[1].turns[0].prompt) == "2+2?\n"
    assert found.episodes[1].task.meta == {"classification": "confidence"}
    formats.write("step-labels", tmp_path / "again.jsonl", found.episodes, WORDS, annotations=found.annotations)
    again = formats.read("step-labels", tmp_path / "again.jsonl", WORDS)
    assert [said(e) for e in again.episodes] == [said(e) for e in found.episodes]
    assert [a.values for a in again.annotations] == [a.values for a in found.annotations]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"labels": [1, 0]}, "'labels': has 2 entries for 3 steps"),
        ({"labels": [1, 0, 0.5]}, "'labels': must be whole numbers"),
        ({"steps": ["a", " ", "b"]}, "'steps[1]': is an empty step"),
        ({"steps": "abc"}, "'steps': must be a list"),
        ({"question": None}, "'question': must be text"),
    ],
)
def test_mistakes_name_the_line_and_the_key(tmp_path, change, said):
    path = write(tmp_path / "rows.jsonl", BENCH, {**SIMPLE, **change})
    with pytest.raises(DataError) as problem:
        formats.read("step-labels", path, WORDS)
    assert f"{path}:2" in str(problem.value) and said in str(problem.value)


@pytest.mark.parametrize("wrong", [[0], [4], "2", [True], [1.0]])
def test_error_steps_count_from_one(tmp_path, wrong):
    with pytest.raises(DataError, match=r"'error_steps': must be a list of numbers from 1 to 3"):
        formats.read("step-labels", write(tmp_path / "rows.jsonl", {**BENCH, "error_steps": wrong}), WORDS)


def test_rows_of_one_id_are_solutions_of_one_question(tmp_path):
    found = formats.read("step-labels", write(tmp_path / "rows.jsonl", BENCH, {**BENCH, "error_steps": [3]}), WORDS)
    assert [(e.id, e.group) for e in found.episodes] == [(f"p1/{k}", "p1") for k in range(4)]
    assert [a.values for a in found.annotations][3] == (1.0, 1.0, 0.0)


def test_the_row_of_a_reward_model_by_hand(tmp_path):
    found = formats.read("step-labels", write(tmp_path / "rows.jsonl", SIMPLE, BENCH), WORDS)
    scores = [
        Annotation("a/0", "s", "step", (0.9, 0.6, 0.1), 0),  # the third step was not judged
        Annotation("p1/0", "s", "step", (0.4, 0.8), 0),
        Annotation("p1/1", "s", "step", (0.7, 0.3, 0.5), 0),
    ]
    row = step_row(labelled_steps(found.episodes, found.annotations, scores), 1.0, 0.5)
    assert (row["steps"], row["solutions"], row["right steps"]) == (7, 3, 4)
    value = {name: m["value"] for name, m in row["metrics"].items()}
    # right steps: 0.9 0.4 0.8 0.7, wrong ones: 0.6 0.3 0.5; called right: all from 0.5 on
    assert value == pytest.approx({
        "accuracy": 4 / 7, "right found": 3 / 4, "wrong found": 1 / 3, "balanced": (3 / 4 + 1 / 3) / 2,
        "order": (3 + 1 + 3 + 3) / 12, "first error": 1 / 2,
    })  # fmt: skip


def test_the_curve_of_scores_by_hand():
    """Two right solutions of 2 and 1 steps, a wrong one of 3."""
    rows = step_curve([(True, [0.5, 0.8]), (True, [0.7]), (False, [0.2, 0.5, 1.0])])
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[0] == pytest.approx({
        "step": 1, "right solutions": 2, "right score": 0.6, "right product": 0.6, "right sum": 0.6,
        "wrong solutions": 1, "wrong score": 0.2, "wrong product": 0.2, "wrong sum": 0.2,
    })  # fmt: skip
    second = [rows[1][f"right {k}"] for k in ("solutions", "score", "product", "sum")]
    assert second == pytest.approx([1, 0.8, 0.4, 1.3])
    assert rows[2]["right score"] is None and rows[2]["wrong product"] == pytest.approx(0.1)
    assert len(step_curve([(True, [0.5, 0.8])], 1)) == 1 and step_curve([]) == []


def test_labels_of_another_number_of_steps_are_refused(tmp_path):
    found = formats.read("step-labels", write(tmp_path / "rows.jsonl", SIMPLE), WORDS)
    with pytest.raises(DataError, match="has 3 labels for 2 steps"):
        labelled_steps(found.episodes, found.annotations, [Annotation("a/0", "s", "step", (0.9, 0.6), 0)])
    with pytest.raises(DataError, match="no step has both"):
        step_row(labelled_steps(found.episodes, [], [Annotation("a/0", "s", "step", (0.9, 0.6, 0.1), 0)]), 1.0, 0.5)


def shell(*words):
    done = CliRunner().invoke(app, [str(w) for w in words])
    assert done.exit_code == 0, done.output
    return done.stdout


def recipe(path, rows, steps, batch, context):
    lines = ["method: reward_model", "kind: classes", "outputs: 2", "format: step-labels", f"data: {rows}",
             f"out: {path.parent / 'prm'}", f"steps: {steps}", f"batch: {batch}",
             f"model: {{name: tiny, shape: {{layers: 1, width: 32, heads: 2, context: {context}}}}}",
             "learner: {optim: {lr: 3e-3}}"]  # fmt: skip
    path.write_text("\n".join(lines))
    return path


def test_a_reward_model_learns_labels_and_is_measured(tmp_path):
    """Steps that say 'bad' are wrong: after forty steps the model knows it."""
    rows = [
        {"question": f"{k}?", "steps": ["good", "bad" if k % 2 else "good"], "labels": [1, int(k % 2 == 0)]}
        for k in range(16)
    ]
    file = write(tmp_path / "rows.jsonl", *rows)
    shell("train", recipe(tmp_path / "r.yaml", file, 40, 16, 64))
    row = json.loads(shell("lpr", "accuracy", tmp_path / "prm", file, "--json"))
    assert (row["steps"], row["right steps"], row["too long"]) == (32, 24, 0)
    assert row["metrics"]["accuracy"]["value"] == 1.0 == row["metrics"]["first error"]["value"]
    told = shell("lpr", "accuracy", tmp_path / "prm", file, "--n", "4", "--least", "1")
    assert "solutions     4" in told and "right found   0.000" in told and "wrong found   1.000" in told


@pytest.mark.data
def test_prmbench(tmp_path):
    """Of 1,200 rows, 24 name a step that is not there; a reward model trains on the others and is measured on them."""
    import gzip

    packed = Path(os.environ["TRAILMARK_DATA"]) / "math" / "prmbench_train_steplabels.jsonl.gz"
    rows = [json.loads(line) for line in gzip.decompress(packed.read_bytes()).decode().splitlines()]
    told = [r for r in rows if all(1 <= n <= len(r["modified_process"]) for n in r["error_steps"])]
    file, good = write(tmp_path / "all.jsonl", *rows), tmp_path / "good.jsonl"
    said_so = shell("convert", file, good, "--from", "step-labels", "--to", "step-labels", "--tokenizer", "tiny",
                    "--skip-bad")  # fmt: skip
    assert len(rows) == 1200 and len(told) == 1176 and said_so
    found = formats.read("step-labels", good, WORDS)
    assert len(found.episodes) == len(found.annotations) == 2 * len(told)
    wrong = [n for n, v in enumerate(found.annotations[1].values, 1) if v == 0]
    assert wrong == told[0]["error_steps"] and set(found.annotations[0].values) == {1.0}
    assert [s.strip() for s in said(found.episodes[1])] == [s.strip() for s in told[0]["modified_process"]]
    total = sum(len(set(r["error_steps"])) for r in told)
    assert sum(v == 0 for a in found.annotations for v in a.values) == total
    some = write(tmp_path / "some.jsonl", *told[:24])
    shell("train", recipe(tmp_path / "r.yaml", some, 2, 4, 4096))
    row = json.loads(shell("lpr", "accuracy", tmp_path / "prm", some, "--json"))
    assert row["solutions"] + row["too long"] == 48 and 0 < row["metrics"]["order"]["value"] < 1
