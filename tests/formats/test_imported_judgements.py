"""What a record says of an answer is not believed: its text is read, by one parser, and what differs is counted."""

import json

import pytest
from typer.testing import CliRunner

from trailmark import formats
from trailmark.commands.app import app
from trailmark.config import resolve
from trailmark.errors import DataError
from trailmark.methods.lpr import formats as lpr
from trailmark.methods.lpr.config import LprRecipe
from trailmark.methods.lpr.method import LprMethod
from trailmark.methods.lpr.round import Round
from trailmark.methods.pipeline import some
from trailmark.models.tiny import tiny_tokenizer
from trailmark.runs.launch import launch
from trailmark.runs.store import Run, read_segment
from trailmark.tasks import get_task
from trailmark.types import Scored, Task

WORDS = tiny_tokenizer()
SAYS_A = "Thought 1: it is so.\nAction 1: look\nThought 2: done\nAction 2: Finish[The answer is A.]"
SAYS_B, BLANK = SAYS_A.replace("is A.", "is B."), SAYS_A.replace("is A.", "is A and B.")
OPEN = SAYS_A.rstrip("]")


def put(path, rows):
    path.write_text(json.dumps(rows))
    return path


def record(response, pred, label=1, name=0):
    return {"text": "q\n", "label": label, "response": response, "pred": pred, "id": name}


@pytest.mark.parametrize("label", [1, "B"])
def test_a_prediction_that_its_text_does_not_say_is_not_right(tmp_path, label):
    rows = [record([SAYS_A, BLANK, SAYS_B, OPEN, "so it is"], ["B", "B", "A", "B", "B"], label)]
    found = formats.read("react", put(tmp_path / "r.json", rows), WORDS).episodes
    # The text decides where it has a closed Finish[…]; without one there is only the record's own word.
    assert [e.outcome.success for e in found] == [False, False, True, True, True]
    assert [e.info.get("text_says") for e in found] == ["A", "", "B", None, None]
    assert [e.info["pred"] for e in found] == ["B", "B", "A", "B", "B"]  # and the file can be written as it was
    formats.write("react", tmp_path / "again.json", found, WORDS)
    assert json.loads((tmp_path / "again.json").read_text()) == rows


def test_answers_that_are_no_letters_stay_as_the_record_says(tmp_path):
    rows = [record("Finish[12]", "12", 12), record("Finish[13]", "12", "12", 1), record("Finish[A]", "A", -1, 2)]
    found = formats.read("react", put(tmp_path / "r.json", rows), WORDS).episodes
    assert [getattr(e.outcome, "success", None) for e in found] == [True, True, None]
    assert not any("text_says" in e.info for e in found)


def test_convert_says_how_many_predictions_are_not_in_their_texts(tmp_path):
    put(tmp_path / "r.json", [record([SAYS_A] * 36, ["B"] * 36)])
    words = ["convert", str(tmp_path / "r.json"), str(tmp_path / "e.jsonl"), "--from", "react", "--to", "episodes"]
    done = CliRunner().invoke(app, [*words, "--tokenizer", "tiny"])
    assert done.exit_code == 0 and "36 records say another answer (pred) than their text" in done.stderr
    assert not any(e.outcome.success for e in read_segment(tmp_path / "e.jsonl"))


@pytest.mark.parametrize(
    ("label", "why"),
    [(99, "is 99, the number of no option, and a prediction is the letter B."), (-2, "is -2, the number of no option"),
     (1.0, "must be a whole number, a text or null, not 1.0."), (True, "must be a whole number, a text or null"),
     ([1], "must be a whole number, a text or null")],
)  # fmt: skip
def test_a_label_that_can_be_no_option_is_refused(tmp_path, label, why):
    path = put(tmp_path / "r.json", [record(SAYS_B, "B", label)])
    with pytest.raises(DataError) as found:
        formats.read("react", path, WORDS)
    assert str(found.value).startswith(f"{path}: key '[0].label': {why}")


# --- with the task's own questions -----------------------------------------------------------------------------------


@pytest.fixture
def questions(tmp_path):
    rows = [{"context": f"c{k}", "question": "q", "answers": ["w", "x", "y", "z"], "label": 1, "id_string": f"q{k}"}
            for k in range(3)]  # fmt: skip
    (tmp_path / "reclor_train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return {"name": "logic", "options": {"dataset": "reclor", "path": str(tmp_path), "ending": "none"}}


def road(out, questions, only, **given):
    recipe = {
        "method": "lpr", "steps": 1, "out": str(out), "task": questions, "files": given, "sample": {"prompts": 3},
        "model": {"name": "tiny", "shape": {"layers": 1, "width": 16, "heads": 2, "context": 512}},
        "engine": {"max_num_seqs": 2, "max_len": 512}, "states": {"start": 0.0, "ratio": 1.0}, "complete": {"n": 2},
        "clean": {"distinct": False}, "labels": {},
    }  # fmt: skip
    c = resolve(recipe, LprRecipe)
    launch(some(LprMethod, only), c, True)
    return Round(c, Run.open(out))


def summary(road, name):
    return json.loads((road.root / "stages" / f"{name}.json").read_text())["summary"]


def test_imported_solutions_are_judged_by_their_text_and_what_differs_is_shown(tmp_path, questions):
    rows = [record([SAYS_A] * 12, ["B"] * 12, name=f"q{k}") for k in range(3)]
    rows[2] |= {"label": 0, "response": [SAYS_A] * 11 + [SAYS_B], "pred": ["A"] * 11 + ["B"]}  # the task says B
    file = put(tmp_path / "s.json", rows)
    made = road(tmp_path / "run", questions, ["solutions-1", "cleaned-1"], solutions=str(file))
    assert summary(made, "solutions-1") == {
        "solutions": 36,
        "questions": 3,
        "another pred than the text says (the text counts)": 24,
        "solutions with another label than the task's (the task's counts)": 12,
    }
    assert summary(made, "cleaned-1")["right"] == 1
    kept = read_segment(made.root / "solutions-1/000.jsonl")
    assert [e.info["pred"] for e in kept if e.group == "q0"] == ["A"] * 12  # what is exported is what was read
    assert all(e.turns[0].reward == e.outcome.reward for e in kept)


def test_imported_completions_are_judged_by_their_text(tmp_path, questions):
    solutions = put(tmp_path / "s.json", [record([SAYS_B], ["B"], name="q0")])
    state = "Thought 1: it is so.\n"
    states = put(tmp_path / "states.json", [
        record([SAYS_B], ["B"], name="q0") | {"inter_states": [{"state": state, "resp_id": 0, "step_id": 0}]}
    ])  # fmt: skip
    rest = [SAYS_A.removeprefix(state), SAYS_B.removeprefix(state)]
    rows = [{"text": "q", "label": 0, "response": rest, "pred": ["B", "A"], "id": "q0_0"}]
    file = put(tmp_path / "c.json", rows)
    only = ["solutions-1", "cleaned-1", "states-1", "completions-1"]
    made = road(tmp_path / "run", questions, only, states=str(states), completions=str(file))
    assert summary(made, "completions-1") == {
        "completions": 2,
        "right": 1,
        "completions with another label than their question (its own counts)": 2,
        "another pred than the text says (the text counts)": 2,
    }
    assert [e.outcome.success for e in made.completed()] == [False, True] and solutions.exists()


def test_a_completion_label_of_99_is_refused_or_counted(tmp_path):
    from trailmark.methods.lpr.judged import other_label

    e = formats.read("react", put(tmp_path / "s.json", [record("a\nb", "B", name=7)]), WORDS).episodes[0]
    place = {"episode": e.id, "turn": 0, "token": 2, "step": 0, "type": "", "index": 0}
    read = lambda **more: lpr.read_completions(
        put(tmp_path / "c.json", [{"response": ["x"], "id": "7_0", **more}]), [place], [e], WORDS, "policy"
    )
    with pytest.raises(DataError, match="is 99, the number of no option"):
        read(pred=["B"], label=99)
    made, out = read(pred=[""], label=99)
    assert out == {"completions with another label than their question (its own counts)": 1}
    made, out = read(pred=["A"], label=0)  # the question's label is 1
    assert made[0].outcome == Scored(0.0, False) and sum(out.values()) == 1
    for same in (1, "B", "1", None, -1, ""):
        assert not other_label(same, e.task)
    assert other_label(0, e.task) and other_label("A", e.task) and not other_label(3, Task("t"))


def test_a_world_reads_only_what_it_can_judge_alone(questions):
    from trailmark.methods.lpr.judged import world_reads

    source = get_task(questions["name"], **questions["options"])
    task, reads = source.tasks("train")[0], world_reads(source)
    assert reads(task, SAYS_B) == (Scored(1.0, True), "B") and reads(task, BLANK) == (Scored(0.0, False), "")
    assert reads(Task("unknown"), SAYS_B) is None
    source.judge = object()
    assert reads(task, SAYS_B) is None
    arith = get_task("arith", level=1)
    one = arith.tasks("train", 1)[0]
    assert world_reads(arith)(one, f"#### {one.data['answer']}")[0] == Scored(1.0, True)
    taxi = get_task("taxi")
    assert world_reads(taxi)(taxi.tasks("train", 1)[0], "no action") is None


def test_pairs_the_wrong_way_round_are_counted(questions):
    from collections import Counter

    from trailmark.methods.lpr.judged import judged, turned_pairs, world_reads
    from trailmark.types import Episode, Turn

    source = get_task(questions["name"], **questions["options"])
    task = source.tasks("train")[0]
    side = lambda k, text: Episode(str(k), Task("p", meta={"id": "q0"}), "p", (Turn("policy", (1,), (2,), text=text),),
                                   {"self": Scored(1.0)})  # fmt: skip
    sides = [side(k, text) for k, text in enumerate([SAYS_A, SAYS_B, SAYS_B, SAYS_A, SAYS_A, SAYS_A])]
    assert turned_pairs(sides, {"q0": task}, world_reads(source)) == 1
    kept = judged(sides[0], lambda task, text: None, counts := Counter())
    assert kept is sides[0] and not counts
