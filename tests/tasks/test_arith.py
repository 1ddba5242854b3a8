import re

import pytest

from trailmark.errors import TaskError
from trailmark.tasks.arith import Arith, parse_answer, step_spans
from trailmark.tasks.check import check_task
from trailmark.tasks.splits import split_of
from trailmark.types import Invalid, Scored, Task

OPERATIONS = {1: 1, 2: 2, 3: 3, 4: 4, 5: 5}


def compute(expression):
    """An independent reading of a question: Python's own arithmetic on checked characters."""
    assert re.fullmatch(r"[0-9a-h+*()-]+", expression)
    return eval(expression, {"__builtins__": {}})  # noqa: S307


def answer_of(question):
    *assignments, asked = question.removesuffix("=?").split(",")
    values = {}
    for line in assignments:
        name, expression = line.split("=")
        values[name] = compute(re.sub("[a-h]", lambda m: str(values[m[0]]), expression))
    return values[asked] if assignments else compute(asked)


@pytest.mark.parametrize("level", [1, 2, 3, 4, 5])
def test_gold_is_right_line_by_line(level):
    for task in Arith(level).tasks("train", 300, seed=level):
        *lines, last = task.meta["gold"].split("\n")
        assert last == f"#### {task.data['answer']}" and len(lines) == OPERATIONS[level]
        assert task.data["answer"] == answer_of(task.data["question"]) >= 0
        for line in lines:
            m = re.fullmatch(r"(?:[b-h]=)?([0-9]+[+*-][0-9]+)=([0-9]+)", line)
            assert m and compute(m[1]) == int(m[2])
        assert len(task.data["question"]) < 60


def test_levels_have_their_form():
    assert all("(" in t.data["question"] for t in Arith(4).tasks(n=50))
    assert any("*" in t.data["question"] for t in Arith(3).tasks(n=50))
    assert all(t.data["question"].endswith(",f=?") for t in Arith(5).tasks(n=50))
    mixed = Arith([1, 3]).tasks(n=10)
    assert [t.data["level"] for t in mixed] == [1, 3] * 5
    assert all(re.fullmatch(r"[0-9]{3}[+-][0-9]{3}=\?", t.data["question"]) for t in Arith(1, digits=3).tasks(n=20))


def test_splits_are_disjoint_and_questions_differ():
    source = Arith(3)
    asked = {split: [t.data["question"] for t in source.tasks(split, 400)] for split in ("train", "val", "test")}
    for split, questions in asked.items():
        assert len(set(questions)) == 400 and {split_of(q) for q in questions} == {split}
    assert source.tasks("train", 5) == source.tasks("train", 400)[:5]
    assert source.tasks("train", 5, seed=1) != source.tasks("train", 5, seed=2)
    assert len(source.tasks("test")) == 1000
    shares = [split_of(str(i)) for i in range(20000)]
    assert shares.count("test") / 20000 == pytest.approx(0.1, abs=0.01)
    assert shares.count("train") / 20000 == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize(
    "text, answer",
    [
        ("#### 9", 9),
        ("7+2=9\n#### 9", 9),
        ("#### 9\nthe end", 9),
        ("#### 1\n#### 2", 2),
        ("#### -12", -12),
        ("#### +12 \r", 12),
        ("#### 1,234", 1234),
        ("#### 12,345,678", 12345678),
        ("#### 007", 7),
        ("####9", None),
        ("#### ", None),
        ("#### 9.0", None),
        ("#### 12,34", None),
        ("#### 1234,567", None),
        ("#### 9 apples", None),
        ("#### 4\n#### four", None),
        ("so #### 9", None),
        ("##### 9", None),
        ("#### ٣", None),
        ("#### " + "9" * 5000, None),
        ("9", None),
        ("", None),
    ],
)
def test_parser(text, answer):
    assert parse_answer(text) == answer


def test_step_spans_tile_the_text():
    assert step_spans("7+5=12\n12-3=9\n#### 9") == [(0, 7), (7, 14), (14, 20)]
    assert step_spans("a\n\n\nb\n") == [(0, 4), (4, 6)]
    assert step_spans("\n\na\nb") == [(0, 4), (4, 5)]
    assert step_spans("") == []
    for text in ("a\r\nb\x0bc\n", "\n\n", "x"):
        spans = step_spans(text)
        assert "".join(text[a:b] for a, b in spans) == text


def test_world():
    task = Task("t", 0, {"question": "7+5=?", "answer": 12})
    world = Arith().make()
    assert world.reset(task).text == "7+5=?\n"
    right = world.step("7+5=12\n#### 12")
    assert (right.reward, right.terminated, right.outcome, right.info) == (1.0, True, Scored(1.0, True), {"parsed": 12})
    with pytest.raises(TaskError, match="reset"):
        world.step("#### 12")
    world.reset(task)
    assert world.step("#### 13").outcome == Scored(0.0, False)
    world.reset(task)
    unread = world.step("twelve")
    assert unread.outcome == Scored(0.0, False) and unread.info == {"parsed": None}
    strict = Arith(invalid_unparsed=True).make()
    strict.reset(task)
    assert isinstance(strict.step("twelve").outcome, Invalid)
    strict.reset(task)
    assert strict.step("#### 1").outcome == Scored(0.0, False)


def test_gold_scores_one():
    source = Arith([1, 2, 3, 4, 5])
    world = source.make()
    for task in source.tasks("val", 50):
        world.reset(task)
        assert world.step(task.meta["gold"]).reward == 1.0


def test_mistakes_are_explained():
    with pytest.raises(TaskError, match="levels 1 to 5"):
        Arith(6)
    with pytest.raises(TaskError, match=r"no split 'tset'\. Did you mean 'test'"):
        Arith().tasks("tset")
    with pytest.raises(TaskError, match="needs data 'question'"):
        Arith().make().reset(Task("t"))


def test_checker_passes():
    for level in (1, 2, 3, 4, 5):
        assert check_task(Arith(level)).problems == []
    assert check_task(Arith(invalid_unparsed=True), split="test").problems == []


def test_a_careless_teacher_forgets_carries_and_goes_on_from_there():
    """The same questions and answers; of the sums with a carry about the asked share is wrong by ten, and nothing else
    is."""
    plain, careless = (Arith(2, careless=c).tasks("train", 400, 7) for c in (0.0, 0.7))
    assert [t.data for t in plain] == [t.data for t in careless]
    carries = forgotten = 0
    for t in careless:
        *lines, last = t.meta["gold"].split("\n")
        for line in lines:
            a, op, b, said = re.fullmatch(r"(\d+)([+-])(\d+)=(\d+)", line).groups()
            right = int(a) + int(b) if op == "+" else int(a) - int(b)
            carry = op == "+" and int(a) % 10 + int(b) % 10 > 9
            carries += carry
            forgotten += int(said) != right
            assert int(said) == right or (carry and int(said) == right - 10)
        assert last == f"#### {said}"
    assert (
        carries > 150 and 0.55 < forgotten / carries < 0.75
    )  # below 0.7, because a mistake that leads below zero is not made
    assert all(t.meta["gold"] == u.meta["gold"] for t, u in zip(plain, Arith(2).tasks("train", 400, 7)))
    for wrong in ({"careless": 2}, {"careless": 0.5, "level": 5}):
        with pytest.raises(TaskError, match="careless"):
            Arith(**wrong)
