"""Questions from files of every layout, their prompts and orders, and the world."""

import gzip
import json
import os
import sys
import types
from pathlib import Path

import pytest

from trailmark.answers import read_answer
from trailmark.engines.scripted import ScriptedEngine
from trailmark.errors import DataError, TaskError
from trailmark.evaluate.run import evaluate
from trailmark.models.tiny import tiny_tokenizer
from trailmark.rollout.play import Seat
from trailmark.tasks import get_task
from trailmark.tasks.check import check_task
from trailmark.tasks.logic import prompts
from trailmark.types import Invalid, Scored

RECLOR = [
    {"context": "All cats sleep.", "question": "What follows?", "answers": ["w", "x", "y", "z"], "label": 2,
     "id_string": "train_0"},
    {"context": "No dog sings.", "question": "What else?", "answers": ["p", "q", "r", "s"], "label": 0,
     "id_string": "train_1"},
]  # fmt: skip
LOGIQA2 = [{"id": 9, "answer": 3, "text": "It rains.", "question": "So?", "options": ["a", "b", "c", "d"],
            "type": {"Categorical": True}}]  # fmt: skip
LOGIQA1 = "\nb\nIt rains.\nSo?\nA.one\nB.two\nC.three\nD.four\n\nd\nIt snows.\nAnd?\nA.1\nB.2\nC.3\nD.4\n"
ARLSAT = [{"id": "g1", "passage": "Six chairs.", "questions": [
    {"id": "g1_1", "question": "Who sits first?", "options": ["A", "K", "L", "M", "N"], "answer": "E"},
    {"id": "g1_2", "question": "Who sits last?", "options": ["K", "L", "M", "N"], "answer": "B"},
]}]  # fmt: skip
FOLIO = [
    {"premises": ["All men die.", "Ann is a man."], "conclusion": "Ann dies.", "label": "True"},
    {"premises": "All men die.\nBo is tall.", "conclusion": "Bo dies.", "label": "Uncertain", "example_id": 7},
]
RECAST = {"id": "F_0", "context": "All men die.", "question": "Is it true? Ann dies.",
          "options": ["A) True", "B) False", "C) Uncertain"], "answer": "C"}  # fmt: skip
PROOFWRITER = [{"id": "OWA-1", "theory": "Bob is red. Red things are big.", "questions": {
    "Q1": {"question": "Bob is big.", "answer": True}, "Q2": {"question": "Bob is kind.", "answer": "Unknown"},
}}]  # fmt: skip
PRONTOQA = {"example1": {"in_context_example0": {"question": "no", "query": "no", "answer": "True"}, "test_example": {
    "question": "Each wumpus is a tumpus. Max is a wumpus.", "query": "True or false: Max is a tumpus.",
    "chain_of_thought": ["Max is a wumpus.", "Each wumpus is a tumpus.", "Max is a tumpus."], "answer": "True",
}}}  # fmt: skip


def lines(rows):
    return "".join(json.dumps(r) + "\n" for r in rows)


@pytest.fixture
def data(tmp_path):
    (tmp_path / "reclor_train.json").write_text(json.dumps(RECLOR))
    (tmp_path / "reclor_test_unlabelled.jsonl.gz").write_bytes(
        gzip.compress(lines([{k: v for k, v in r.items() if k != "label"} for r in RECLOR]).encode())
    )
    (tmp_path / "logiqa2_dev.txt").write_text(lines(LOGIQA2))
    (tmp_path / "logiqa1_eval.txt").write_text(LOGIQA1)
    (tmp_path / "AR_DevelopmentData.json").write_text(json.dumps(ARLSAT))
    (tmp_path / "folio-validation.jsonl").write_text(lines(FOLIO))
    (tmp_path / "folio_train.jsonl").write_text(lines([RECAST]))
    (tmp_path / "proofwriter-test.jsonl").write_text(lines(PROOFWRITER))
    (tmp_path / "prontoqa.json").write_text(json.dumps(PRONTOQA))
    return tmp_path


def read(data, dataset, split, **more):
    return get_task("logic", dataset=dataset, path=str(data), **more).tasks(split)


def test_every_layout(data):
    first, second = read(data, "reclor", "train")
    assert first.id == "reclor-train-train_0" and first.meta == {"id": "train_0", "label": 2}
    assert first.data == {"context": "All cats sleep.", "question": "What follows?", "options": ["w", "x", "y", "z"],
                          "label": 2, "dataset": "reclor", "row": 0}  # fmt: skip
    assert second.data["row"] == 1
    (two,) = read(data, "logiqa2", "dev")
    assert (two.id, two.data["context"], two.data["label"]) == ("logiqa2-dev-9", "It rains.", 3)
    one = read(data, "logiqa", "eval")
    assert [(t.data["context"], t.data["options"], t.data["label"]) for t in one] == [
        ("It rains.", ["one", "two", "three", "four"], 1), ("It snows.", ["1", "2", "3", "4"], 3),
    ]  # fmt: skip
    assert one == [*read(data, "logiqa", "eval")] and read(data, "logiqa", "val")[0].data == one[0].data
    five, four = read(data, "arlsat", "dev")
    assert (five.id, five.data["label"], four.data["label"]) == ("arlsat-dev-g1_1", 4, 1)
    assert len(five.data["options"]) == 5 and len(four.data["options"]) == 4
    yes, perhaps = read(data, "folio", "val")
    assert yes.data["context"] == "1. All men die.\n2. Ann is a man." and yes.data["label"] == 0
    assert perhaps.data["options"] == ["True", "False", "Uncertain"] and perhaps.data["label"] == 2
    assert [t.data["label"] for t in read(data, "folio", "val", ways=2)] == [0, 1]  # as published: uncertain is false
    (recast,) = read(data, "folio", "train")
    assert recast.data["options"] == ["True", "False", "Uncertain"] and recast.data["label"] == 2
    known, unknown = read(data, "proofwriter", "test")
    assert (known.id, known.data["label"], unknown.data["label"]) == ("proofwriter-test-OWA-1_Q1", 0, 2)
    (max_,) = read(data, "prontoqa", "val")  # a file without a split in its name
    assert max_.data["question"].endswith("false? Max is a tumpus.") and max_.data["label"] == 0


def test_an_order_moves_the_options_and_the_label(data):
    (first, second) = read(data, "reclor", "train", order="BCAD")
    assert first.data["options"] == ["x", "y", "w", "z"] and first.data["label"] == 1 and first.meta["label"] == 1
    assert second.data["options"] == ["q", "r", "p", "s"] and second.data["label"] == 2
    five, four = read(data, "arlsat", "dev", order="EDCBA")
    assert (five.data["options"][0], five.data["label"], five.data["order"]) == ("N", 0, "EDCBA")
    assert (four.data["options"], four.data["label"], four.data["order"]) == (["N", "M", "L", "K"], 2, "DCBA")
    assert [t.id for t in read(data, "reclor", "train", order="DCBA")] == [t.id for t in read(data, "reclor", "train")]
    with pytest.raises(TaskError, match="order 'DCBA' is for 4 options, and question 'g1_1' has 5"):
        read(data, "arlsat", "dev", order="DCBA")
    for wrong in ("", "ABD", "AAB", "abcd"):
        with pytest.raises(TaskError, match="order of the letters"):
            get_task("logic", order=wrong)


def test_a_hidden_label_is_played_and_not_scored(data):
    source = get_task("logic", dataset="reclor", path=str(data))
    tasks = source.tasks("test")
    assert [t.data["label"] for t in tasks] == [-1, -1] and source.left_out["test"] == {"hidden labels": 2}
    assert read(data, "reclor", "test", order="DCBA")[0].data["label"] == -1
    world = source.make()
    world.reset(tasks[0])
    step = world.step(" so\nAction 1: Finish[The answer is B.]")
    assert isinstance(step.outcome, Invalid) and step.info == {"answer": "B", "reason": "hidden"} and step.terminated


GOLDEN = """Context:
All cats sleep.

Question:
What follows?

Options:
A. w
B. x
C. y
D. z

"""


def test_prompts(data):
    source = get_task("logic", dataset="reclor", path=str(data))
    (task, _) = source.tasks("train")
    head = prompts.REACT + "\n\n"
    assert source.make().reset(task).text == head + GOLDEN + "Thought 1:"
    shown = lambda **more: get_task("logic", dataset="reclor", path=str(data), **more).prompt(task)
    assert shown(ending="space") == head + GOLDEN + "Thought 1: " and shown(ending="none") == head + GOLDEN
    assert shown(shots=1) == head + prompts.EXAMPLE + "\n\n" + GOLDEN + "Thought 1:"
    assert shown(style="plain") == prompts.PLAIN + "\n\n" + GOLDEN
    chat = get_task("logic", dataset="reclor", path=str(data), chat=True)
    (said,) = chat.make().reset(task).messages
    assert said == {"role": "user", "content": (head + GOLDEN).rstrip("\n")}
    prompt, state = source.prompt(task), " I look.\nAction 1: go"
    assert prompts.join(prompt, state) == prompt + state == prompts.join(prompt, state.strip())
    assert prompts.join(shown(ending="space"), state.strip()) == prompt + state
    for ending, text in (("thought", " so"), ("space", "so"), ("none", "Thought 1: so")):
        assert prompts.after(ending, "react", "Thought 1: so") == text
        assert prompts.prompt("", "q", ["a", "b"], ending=ending, bare=True) + text == (
            "Question:\nq\n\nOptions:\nA. a\nB. b\n\nThought 1: so"
        )
    # Whoever imitates the example is understood, and the first "Context:" is cut.
    assert read_answer(prompts.EXAMPLE.split("Thought 1:")[1], 4).letter == "B"


def test_the_world_pays_one_for_the_right_letter(data):
    source = get_task("logic", dataset="reclor", path=str(data))
    world, (task, _) = source.make(), source.tasks("train")
    for said, outcome, info in (
        ("Finish[The answer is C.]", Scored(1.0, True), {"answer": "C", "reason": "right"}),
        ("Finish[The answer is A.]", Scored(0.0, False), {"answer": "A", "reason": "wrong"}),
        ("Finish[The answer is A or C.]", Scored(0.0, False), {"answer": "", "reason": "multiple"}),
        ("", Scored(0.0, False), {"answer": "", "reason": "invalid"}),
    ):
        world.reset(task)
        step = world.step(said)
        assert (step.outcome, step.info, step.reward) == (outcome, info, outcome.reward)
    with pytest.raises(TaskError, match="call reset"):
        world.step("x")
    assert check_task(source, episodes=2).ok, check_task(source, episodes=2)


def test_draws_and_cuts(tmp_path):
    rows = [{"context": f"c{k // 2}", "question": f"q{k}", "options": ["a", "b"], "label": k % 2} for k in range(200)]
    (tmp_path / "mine.jsonl").write_text(lines(rows))
    whole = get_task("logic", path=str(tmp_path / "mine.jsonl"))
    assert [t.meta["id"] for t in whole.tasks("anything")] == [str(k) for k in range(200)]
    drawn = [t.id for t in whole.tasks("train", 200, 3)]
    assert len(set(drawn)) == 200 and drawn != [t.id for t in whole.tasks("train", 200, 4)]
    assert drawn[:50] == [t.id for t in whole.tasks("train", 200, 3)][:50]
    source = get_task("logic", path=str(tmp_path / "mine.jsonl"), cut="train")
    parts = {split: {t.data["context"] for t in source.tasks(split)} for split in ("train", "val", "test")}
    assert sum(map(len, parts.values())) == 100 == len(set().union(*parts.values())) and all(parts.values())
    with pytest.raises(TaskError, match="cut into train, val and test"):
        source.tasks("dev")


def test_repeated_options_are_counted_and_named(tmp_path):
    rows = [
        {"question": "q", "options": ["a", "b", "A"], "label": 0, "id": "x"},
        {"question": "q", "options": ["a", "b"], "label": 1, "id": "y"},
        {"question": "q", "options": ["a", "b"], "id": "y"},
    ]
    (tmp_path / "mine.jsonl").write_text(lines(rows))
    source = get_task("logic", path=str(tmp_path / "mine.jsonl"))
    assert [t.meta["id"] for t in source.tasks("train")] == ["y", "y-row2"]
    assert source.left_out["train"] == {"repeated options": 1, "hidden labels": 1}
    assert source.named["train"] == {"repeated options": ["x"], "hidden labels": ["y-row2"]}
    assert len(get_task("logic", path=str(tmp_path / "mine.jsonl"), repeats="keep").tasks("train")) == 3
    with pytest.raises(DataError, match="question 'x' has the same option twice"):
        get_task("logic", path=str(tmp_path / "mine.jsonl"), repeats="refuse").tasks("train")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"question": "q", "options": ["a", "b"], "label": 2}, "mine.jsonl:1: key 'label': is 2: it must be a number"),
        ({"question": "q", "options": ["a", "b"], "answer": "C"}, "key 'answer': is 'C'"),
        ({"question": "q", "options": ["a", "b"], "label": True}, "key 'label': is True"),
        ({"question": "q", "options": ["a"], "label": 0}, "2 to 26 options, not 1"),
        ({"question": "q", "options": ["a", " "], "label": 0}, "an empty option \\(B\\)"),
        ({"question": "q", "options": "ab", "label": 0}, "key 'options': must be a list"),
        ({"options": ["a", "b"]}, "key 'question': is missing"),
        ({"question": "q"}, "key 'options': is missing"),
        ([1], "must be an object"),
        ({"question": 3, "options": ["a", "b"]}, "key 'question': must be text"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named(tmp_path, row, says):
    (tmp_path / "mine.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=says):
        get_task("logic", path=str(tmp_path / "mine.jsonl")).tasks("train")


def test_files_that_are_not_there_or_not_clear(data):
    with pytest.raises(TaskError, match="no split 'test' of logiqa2"):
        read(data, "logiqa2", "test")
    with pytest.raises(TaskError, match="is not split 'train' by its name"):
        get_task("logic", dataset="logiqa2", path=str(data / "logiqa2_dev.txt")).tasks("train")
    with pytest.raises(TaskError, match="there is no file or folder"):
        get_task("logic", dataset="logiqa2", path=str(data / "nothing")).tasks("train")
    (data / "logiqa1_eval.txt").write_text(LOGIQA1[:-10])
    with pytest.raises(DataError, match=r"logiqa1_eval.txt:\d+: a block must have a letter"):
        read(data, "logiqa", "eval")
    (data / "reclor_train.jsonl").write_text(lines(RECLOR))
    with pytest.raises(TaskError, match="several files"):
        read(data, "reclor", "train")
    for options, says in (
        ({"dataset": "reclr"}, "Did you mean 'reclor'"), ({"style": "poem"}, "no prompt style"),
        ({"ending": "dots"}, "no ending"), ({"shots": 2}, "shots is 0 or 1"), ({"ways": 2}, "2 with folio"),
        ({"repeats": "x"}, "leave, keep or refuse"), ({"careless": 2}, "careless goes from 0 to 1"),
    ):  # fmt: skip
        with pytest.raises(TaskError, match=says):
            get_task("logic", **options)


def test_the_hub(monkeypatch):
    asked = []

    def load(name, config, split, revision):
        asked.append((name, config, split, revision))
        if split == "lost":
            raise ValueError("unknown split\nmore")
        return [{"context": "c", "query": "q", "options": ["a", "b"], "correct_option": 1}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))
    (task,) = get_task("logic", dataset="logiqa").tasks("val")
    assert task.data["question"] == "q" and task.data["label"] == 1 and asked == [
        ("lucasmccabe/logiqa", None, "validation", None)
    ]
    get_task("logic", hub="me/mine:small", revision="v1").tasks("train")
    assert asked[-1] == ("me/mine", "small", "train", "v1")
    with pytest.raises(TaskError, match="'metaeval/reclor' split 'lost' cannot be loaded from the hub: unknown split"):
        get_task("logic", dataset="reclor").tasks("lost")
    with pytest.raises(TaskError, match="logic needs path="):
        get_task("logic").tasks("train")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(TaskError, match="reading reclor from the hub needs the datasets library"):
        get_task("logic", dataset="reclor").tasks("train")


def test_evaluation_reads_the_letters_for_the_vote(data):
    source = get_task("logic", dataset="reclor", path=str(data))
    say = iter([" Finish[The answer is A.]", " Finish[The answer is A or C.]", " Finish[The answer is C.]",
                " none", " Finish[The answer is C.]"])  # fmt: skip
    seat = Seat("policy", ScriptedEngine(lambda prompt, draw: next(say), tiny_tokenizer()), max_tokens=99)
    row = evaluate(source, [seat], tasks=source.tasks("train")[:1], samples=5).row["metrics"]
    assert row["success"]["value"] == 0.4 and row["maj@5"]["value"] == 1.0  # C, C against A; two say nothing
    assert row["maj@1"]["value"] == 0.4 and row["pass@5"]["value"] == 1.0


REAL = [("reclor", "train", 4638), ("reclor", "val", 500), ("reclor", "test", 1000), ("logiqa2", "dev", 1565),
        ("logiqa", "eval", 647), ("arlsat", "train", 1630), ("arlsat", "dev", 231), ("folio", "train", 1004),
        ("folio", "dev", 204), ("proofwriter", "dev", 600), ("proofwriter", "test", 600),
        ("prontoqa", "dev", 500)]  # fmt: skip


@pytest.mark.data
@pytest.mark.skipif("TRAILMARK_DATA" not in os.environ, reason="no real data")
@pytest.mark.parametrize(("dataset", "split", "count"), REAL)
def test_the_real_files(dataset, split, count):
    source = get_task("logic", dataset=dataset, path=str(Path(os.environ["TRAILMARK_DATA"]) / "logic"))
    tasks = source.tasks(split)
    assert len(tasks) == count == len({t.id for t in tasks})
    hidden = sum(t.data["label"] == -1 for t in tasks)
    assert hidden == (1000 if split == "test" and dataset == "reclor" else 0)
    world = source.make()
    for t in tasks:
        assert t.data["question"] and t.data["context"]
        world.reset(t)
        step = world.step(source.example_actions(t)[0])
        assert step.info["reason"] == ("hidden" if hidden else "right")
