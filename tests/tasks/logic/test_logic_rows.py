"""Rows of every set in their odd forms, labels, names of files, and the reasons of the cleaning."""

import json
from collections import Counter
from itertools import product
from pathlib import Path

import pytest

from trailmark.answers import HIDDEN, LETTERS, leaf_value, most_common, original_index, read_answer
from trailmark.errors import DataError, TaskError
from trailmark.formats.rows import Row
from trailmark.tasks.logic.clean import DROPPED, Cleaning, clean, clean_all
from trailmark.tasks.logic.prompts import after, ending_of, join, options_text
from trailmark.tasks.logic.rows import READ, Question, find_files, read_files, simple, two_ways
from trailmark.tasks.logic.source import order_of, ordered
from trailmark.types import Task

CHOICE = {"question": "q", "options": ["red", "Blue", "green"]}


def read(dataset, value):
    return READ.get(dataset, simple)(Row(value, Path("f")))


@pytest.mark.parametrize(
    ("said", "label"),
    [(0, 0), (2, 2), ("1", 1), (" 1 ", 1), ("b", 1), ("(C)", 2), ("A.", 0), ("blue", 1), ("GREEN", 2), (None, HIDDEN),
     (-1, HIDDEN), ("", HIDDEN)],
)  # fmt: skip
def test_labels(said, label):
    for key in ("label", "answer", "correct_option"):
        assert read("choice", {**CHOICE, key: said})[0].label == label


@pytest.mark.parametrize("said", [3, "3", "D", "yellow", True, 1.0, -2, "²", " ", ["A"]])
def test_a_label_that_names_no_option(said):
    with pytest.raises(DataError) as error:
        read("choice", {**CHOICE, "label": said})
    shown = 3 if said == "3" else said
    assert str(error.value) == (
        f"f: key 'label': is {shown!r}: it must be a number from 0 to 2, a letter up to C or an option's text."
    )


def test_letters_before_options_go_only_if_all_have_theirs():
    options = lambda *some: read("choice", {"question": "q", "options": some and list(some)})[0].options
    for mark in ("{}) ", "({}) ", "{}. ", "{}: ", "({})", " {} ) "):
        assert options(*(mark.format(letter) + word for letter, word in zip("ABC", "xyz"))) == ("x", "y", "z")
    assert options("A) x", "C) y") == ("A) x", "C) y") and options("A) x", "y") == ("A) x", "y")
    assert options("B) x", "A) y") == ("B) x", "A) y")


def test_other_names_of_the_same_fields():
    want = Question("c", "q", ("x", "y"), 1, "7")
    for context, asked, options, label, name in product(
        ("context", "text", "passage"), ("question", "query"), ("options", "answers"),
        ("label", "answer", "correct_option"), ("id", "index", "id_string", "example_id"),
    ):  # fmt: skip
        row = {context: " c ", asked: "q\n", options: ["x", "y "], label: "B", name: 7}
        assert simple(Row(row, Path("f"))) == [want]
    (told,) = simple(Row({**CHOICE, "qtype": 3, "type": {"no": 1}, "explanation": ["one", "two"]}, Path("f")))
    assert told.about == {"qtype": 3} and told.proof == ("one", "two") and told.label == HIDDEN and told.id == ""


PRONTO = {"question": "Each wumpus is red.", "query": "TRUE or False: Max is red.", "answer": "False"}


@pytest.mark.parametrize(
    ("dataset", "value", "says"),
    [
        ("arlsat", {"passage": "p", "questions": []}, "key 'questions': must be a list that is not empty"),
        ("arlsat", {"passage": "p", "questions": [{"question": "q", "options": ["a", "b"], "answer": "C"}]},
         "key 'questions[0].answer': is 'C'"),
        ("arlsat", {"passage": "p", "questions": [{"question": "q", "options": ["a"]}]},
         "key 'questions[0].options': must be a list of 2 to 26 options, not 1."),
        ("folio", {"conclusion": "x", "premises": ["y"], "label": "Maybe"},
         "key 'label': is 'Maybe': it must be True, False, or Uncertain (Unknown)."),
        ("folio", {"conclusion": "x", "premises": [1]}, "key 'premises': must be text"),
        ("folio", {"conclusion": "x"}, "key 'premises': is missing"),
        ("proofwriter", {"theory": "t", "questions": {}}, "key 'questions': must be an object of questions."),
        ("proofwriter", {"theory": "t", "questions": {"Q1": {"question": "x", "answer": 3}}},
         "key 'questions.Q1.answer': is 3"),
        ("prontoqa", {"e1": {**PRONTO, "answer": "Unknown"}}, "key 'e1.answer': must be True or False."),
        ("prontoqa", {"e1": 5}, "key 'e1': must be an object, not 5."),
        ("prontoqa", {"e1": {"question": "x"}}, "key 'e1.query': is missing"),
        ("reclor", {"question": "q", "answers": ["a"] * 27}, "2 to 26 options, not 27"),
    ],
)  # fmt: skip
def test_bad_rows_of_each_set(dataset, value, says):
    with pytest.raises(DataError) as error:
        read(dataset, value)
    assert says in str(error.value)


def test_rows_of_each_set_by_hand():
    (known,) = read("prontoqa", {"e1": PRONTO})
    assert known == Question("Each wumpus is red.", "Is the following statement true or false? Max is red.",
                             ("True", "False"), 1, "e1")  # fmt: skip
    (hidden,) = read("folio", {"premises": "A is.\nB is.", "conclusion": "C is."})
    assert hidden.label == HIDDEN == two_ways(hidden).label and hidden.context == "1. A is.\n2. B is."
    truths = [read("folio", {"premises": ["p"], "conclusion": "c", "label": said})[0]
              for said in ("True", "false", "Uncertain", " UNKNOWN ")]  # fmt: skip
    assert [q.label for q in truths] == [0, 1, 2, 2] and [two_ways(q).label for q in truths] == [0, 1, 1, 1]
    assert two_ways(truths[2]).options == ("True", "False")
    (proved,) = read("proofwriter", {"theory": " t ", "questions": {"Q9": {"question": "x", "answer": False}}})
    assert (proved.context, proved.label, proved.id) == ("t", 1, "Q9")
    for dataset in READ:  # each also reads the simple layout
        assert read(dataset, {**CHOICE, "label": 1})[0].label == 1


def test_an_empty_file_and_a_block_of_another_letter(tmp_path):
    (tmp_path / "mine.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"mine.jsonl: holds no question of choice\."):
        read_files("choice", [tmp_path / "mine.jsonl"])
    block = ["b", "It rains.", "So?", "A.one", "B.two", "C.three", "D.four"]
    text = tmp_path / "logiqa1_eval.txt"
    text.write_text("\n".join([*block, "", "e", *block[1:]]))
    with pytest.raises(DataError, match=r"logiqa1_eval.txt:9: a block must have a letter from a to d"):
        read_files("logiqa", [text])
    text.write_text("\n\n".join(block))
    assert [(q.question, q.label) for q in read_files("logiqa", [text])] == [("So?", 1)]


@pytest.mark.parametrize(
    ("dataset", "split", "name"),
    [("reclor", "train", "reclor_train.jsonl"), ("reclor", "eval", "reclor_val.json"),
     ("arlsat", "dev", "AR_DevelopmentData.json"), ("arlsat", "train", "ar-lsat-train.json"),
     ("logiqa", "test", "Test.txt"), ("folio", "validation", "folio.jsonl"), ("choice", "test", "Test.txt")],
)  # fmt: skip
def test_files_by_their_names(tmp_path, dataset, split, name):
    for each in ("reclor_train.jsonl", "reclor_val.json", "AR_DevelopmentData.json", "ar-lsat-train.json", "Test.txt",
                 "folio.jsonl", "notes.md"):  # fmt: skip
        (tmp_path / each).write_text("{}")
    assert find_files(dataset, tmp_path, split) == [tmp_path / name]
    with pytest.raises(TaskError, match="has no split 'spare'"):
        find_files(dataset, tmp_path, "spare")


def test_an_order_and_its_way_back():
    """For every order of three options: the label goes with its text, and the place in the file is found again."""
    q = Question("", "q", ("x", "y", "z"), 1)
    for order in ("ABC", "ACB", "BAC", "BCA", "CAB", "CBA", "DBAC"):
        shown, label = ordered(q, order)
        assert shown[label] == "y" and sorted(shown) == ["x", "y", "z"]
        task = Task("t", data={"order": order_of(order, 3)})
        assert [q.options[original_index(task, k)] for k in range(3)] == list(shown)
    assert ordered(q, None) == (q.options, 1) and original_index(Task("t"), 2) == 2


def test_the_reasons_of_the_cleaning_count_every_response():
    """All texts of up to four lines out of five: each is kept or has one reason, and the rules only make it fewer."""
    parts = ["Thought 1: look around", "x", "", "Action 2: Finish[The answer is B.]", "Context:"]
    texts = ["\n".join(some) for n in range(1, 5) for some in product(parts, repeat=n)]
    kept, dropped = clean_all(texts)
    assert len(kept) + dropped.total() == len(texts) and set(dropped) <= set(DROPPED)
    for k, text in kept:
        raw = texts[k].split("Context:\n")[0]
        assert raw.count("Finish[") == 1 and text.endswith("B.]") and text in raw
        assert clean(text).text == text and read_answer(text, 4).letter == "B"  # what is clean stays
    want = Counter()
    for text in texts:
        count = text.split("Context:\n")[0].count("Finish[")
        reason = "empty" if not text.strip() else "no finish" if not count else "several finishes" if count > 1 else ""
        want[reason] += 1
    assert want.pop("") == len(kept) and want == dropped
    joined, reasons = clean_all(texts, Cleaning(join=True, distinct=True))
    assert len({t for _, t in joined}) == len(joined) and len(joined) + reasons.total() == len(texts)
    assert reasons["twice"] + len(joined) == len(kept) and all("\n\n" not in t for _, t in joined)
    few, reasons = clean_all(texts, Cleaning(min_step=3))
    assert len(few) + reasons["too few steps"] == len(kept) and all(len(t.split("\n")) >= 3 for _, t in few)


def test_values_and_votes_over_all_letters():
    for options, label, k in product((2, 4, 5), range(-1, 2), range(5)):
        value, why = leaf_value(f"Finish[The answer is {LETTERS[k]}.]", label, options)
        want = (None, "hidden") if label == -1 else (0.0, "missing") if k >= options else (
            (1.0, "right") if k == label else (0.0, "wrong"))  # fmt: skip
        assert (value, why) == want
    for votes in product(("", "A", "B"), repeat=4):
        a, b = votes.count("A"), votes.count("B")
        first = next((v for v in votes if v), "")
        assert most_common(votes) == ("A" if a > b else "B" if b > a else first)


def test_pieces_of_prompts():
    assert options_text(["x", "y"]) == "A. x\nB. y" and ending_of("space", "plain") == ""
    assert join("Thought 1:", "") == "Thought 1:" and join("q\n\n", "so") == "q\n\nso"
    assert after("thought", "react", "no name") == "no name"
    assert after("space", "plain", "Thought 1: x") == "Thought 1: x"
    for words, says in ((("dots", "react"), "has no ending 'dots'."), (("none", "prose"), "no prompt style 'prose'")):
        with pytest.raises(TaskError, match=says):
            ending_of(*words)


def test_the_rows_of_a_file_are_json(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({**CHOICE, "label": 0}) + "\n{no\n")
    with pytest.raises(DataError, match=r"mine.jsonl:2: is not JSON"):
        read_files("choice", [path])
