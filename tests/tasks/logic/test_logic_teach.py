"""The prover and the scripted teacher: what follows, how it is written, and which mistakes are made."""

import json
import os
import random
import re
from pathlib import Path

import pytest

from trailmark.answers import read_answer
from trailmark.data import gold
from trailmark.errors import TaskError
from trailmark.steps import react_steps
from trailmark.tasks import get_task
from trailmark.tasks.logic.clean import STRICT, clean
from trailmark.tasks.logic.prover import (
    ANY,
    Inference,
    Statement,
    Unread,
    closure,
    decide,
    holds,
    read_statement,
    read_theory,
    sentence,
)
from trailmark.tasks.logic.rows import Question
from trailmark.tasks.logic.teach import letter_of, read_problem, solution

CONTEXT = (
    "Bob is cold. The bald eagle does not see the cow. The cow chases Bob. Cold, smart things are red. "
    "If someone is red and they chase the cow then the cow is not kind. If something chases Bob then Bob is smart. "
    "All red people are round. If Bob is round and cold then Bob sees the bald eagle."
)
PRONTO = "Each yumpus is a dumpus. Dumpuses are wumpuses. Wumpuses are not sour. Zumpuses are dumpuses. "
PRONTO += "Max is a yumpus."
TRUTHS = ("True", "False", "Unknown")


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("Bob is cold.", ("Bob", "is", "cold", True)),
        ("The bald eagle does not see the cow.", ("the bald eagle", "see", "the cow", False)),
        ("Max is an impus.", ("Max", "is", "impus", True)),
        ("Max is not a tumpus.", ("Max", "is", "tumpus", False)),
        ("The mouse needs Bob.", ("the mouse", "need", "Bob", True)),
    ],
)
def test_statements_are_read_and_written(said, meant):
    assert read_statement(said) == Statement(*meant) and sentence(Statement(*meant)) == said


def test_rules_are_read():
    theory = read_theory(CONTEXT)
    assert len(theory.facts) == 3 and len(theory.rules) == 5
    cold, chase, bob, round_, sees = theory.rules
    assert cold.conditions == (Statement(ANY, "is", "cold"), Statement(ANY, "is", "smart"))
    assert chase.conditions[1] == Statement(ANY, "chase", "the cow")
    assert chase.conclusion == Statement("the cow", "is", "kind", False)
    assert bob.conditions == (Statement(ANY, "chase", "Bob"),) and round_.conclusion == Statement(ANY, "is", "round")
    assert sees.conditions == (Statement("Bob", "is", "round"), Statement("Bob", "is", "cold"))
    for wrong in ("Bob sings.", "If Bob hums then Bob is red.", "Hello there.", "Something is red."):
        with pytest.raises(Unread):
            read_theory(wrong)


def test_what_follows_by_hand():
    theory = read_theory(CONTEXT)
    known = closure(theory)
    new = [s for s, made in known.items() if made.rule is not None]
    assert [sentence(s) for s in new] == ["Bob is smart.", "Bob is red.", "Bob is round.", "Bob sees the bald eagle."]
    answer, steps, _ = decide(theory, read_statement("Bob sees the bald eagle."))
    assert answer is True and [sentence(i.conclusion) for i in steps] == [
        "Bob is smart.", "Bob is red.", "Bob is round.", "Bob sees the bald eagle.",
    ]  # fmt: skip
    said = set(theory.facts)
    for i in steps:
        assert holds(i, said, theory.rules) and not holds(i, said - set(i.premises), theory.rules)
        assert not holds(i._replace(conclusion=i.conclusion.negated), said, theory.rules)
        said.add(i.conclusion)
    assert holds(Inference(theory.facts[0], None, ()), theory.facts, ())
    assert decide(theory, read_statement("The bald eagle sees the cow."))[0] is False
    assert decide(theory, read_statement("The cow is kind."))[0] is None


def test_a_solution_in_full():
    p = read_problem(Question(PRONTO, "Is the following statement true or false? Max is sour.", ("True", "False"), 1))
    assert solution(p, ("True", "False")).text == (
        'Thought 1: I want to know whether "Max is sour" is true. It is given that: Max is a yumpus.\n'
        'Action 1: Use the rule "Each yumpus is a dumpus."\n'
        "Observation 1: Max is a dumpus.\n"
        "Thought 2: I know that: Max is a dumpus.\n"
        'Action 2: Use the rule "Dumpuses are wumpuses."\n'
        "Observation 2: Max is a wumpus.\n"
        "Thought 3: I know that: Max is a wumpus.\n"
        'Action 3: Use the rule "Wumpuses are not sour."\n'
        "Observation 3: Max is not sour.\n"
        'Thought 4: This is the opposite of "Max is sour". So the statement is false.\n'
        "Action 4: Finish[The answer is B.]"
    )
    assert letter_of(None, ("Uncertain", "False", "True")) == "A"
    with pytest.raises(TaskError, match="say 'true'"):
        letter_of(True, ("Yes", "No"))
    with pytest.raises(TaskError, match="question 'q' has a sentence that the prover cannot read: Max hums"):
        read_problem(Question("Max hums.", "Is it? Max is red.", TRUTHS, 0, "q"))


def unsound(p, text):
    """The numbers of the observations that do not follow from what stands before them, read from the text alone."""
    said, wrong = set(p.theory.facts), []
    rules = {r.text: r for r in p.theory.rules}
    for m in re.finditer(r'^Action (\d+): (?:Use the rule "(.+)"|Put together.*)\nObservation \d+: (.+)$', text, re.M):
        conclusion, rule = read_statement(m[3]), rules.get(m[2])
        names = {s.subject for s in said} | {s.object for s in said}
        ok = rule is not None and any(
            rule.conclusion.about(n) == conclusion and {c.about(n) for c in rule.conditions} <= said for n in names
        )
        wrong += [] if ok else [int(m[1])]
        said.add(conclusion)
    return wrong


@pytest.mark.parametrize(("context", "asked", "options"), [
    (PRONTO, "Max is sour.", ("True", "False")), (CONTEXT, "Bob is round.", TRUTHS), (CONTEXT, "Bob is big.", TRUTHS),
    (CONTEXT, "Bob is not cold.", TRUTHS),
])  # fmt: skip
def test_mistakes_are_where_they_are_said_to_be(context, asked, options):
    p = read_problem(Question(context, f"True? {asked}", options, 0))
    right = letter_of(p.answer, options)
    kinds, answers = set(), set()
    for k in range(60):
        made = solution(p, options, random.Random(k), careless=0.3)
        marked = [n for kind, n in made.mistakes if kind != "slip"]
        assert unsound(p, made.text) == marked
        assert clean(made.text, STRICT).text == made.text and read_answer(made.text, 3).letter
        kinds |= {kind for kind, _ in made.mistakes}
        answers.add((bool(marked), read_answer(made.text, 3).letter == right))
    plain = solution(p, options)
    assert unsound(p, plain.text) == [] and not plain.mistakes and read_answer(plain.text, 3).letter == right
    if p.proof and len(options) == 2:
        assert kinds == {"backwards", "leap", "misread", "slip"}
        assert answers == {(False, True), (False, False), (True, True), (True, False)}


def test_the_teacher_writes_data_to_imitate(tmp_path):
    rows = [{"context": PRONTO, "question": f"True or false? Max is {w}sour.", "options": ["A) True", "B) False"],
             "answer": a} for w, a in (("", "B"), ("not ", "A"))]  # fmt: skip
    (tmp_path / "prontoqa_dev.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    options = {"dataset": "prontoqa", "path": str(tmp_path)}
    assert gold.make("logic", tmp_path / "out.jsonl", options, 2, "dev", 0) == 2
    made = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    for row in made:
        assert row["prompt"].endswith("\n\nThought 1:") and row["response"].startswith(" I want to know")
        assert len(react_steps(row["response"], row["prompt"])) == 11
    source = get_task("logic", **options, order="BA")
    world = source.make()
    for task in source.tasks("dev"):  # the letters follow the order of the options
        world.reset(task)
        assert world.step(task.meta["gold"]).reward == 1
    with pytest.raises(Exception, match="no gold answers"):
        gold.make("logic", tmp_path / "o.jsonl", {"path": str(tmp_path / "prontoqa_dev.jsonl")}, 2, "dev", 0)


def test_what_cannot_be_taught_is_counted(tmp_path):
    more = {"options": ["True", "False"], "label": 0}
    rows = [{"context": "Max hums.", "question": "True? Max is red.", "id": "x", **more},
            {"context": PRONTO, "question": "True? Max is sour.", "id": "y", **more}]  # fmt: skip
    (tmp_path / "prontoqa_dev.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    source = get_task("logic", dataset="prontoqa", path=str(tmp_path))
    assert not any("gold" in t.meta for _ in range(2) for t in source.tasks("dev"))  # and counted once
    assert source.named["dev"] == {"without a solution (a sentence cannot be read)": ["x"],
                                   "without a solution (the proof contradicts the label)": ["y"]}  # fmt: skip
    assert sum(source.left_out["dev"].values()) == 2


@pytest.mark.data
@pytest.mark.skipif("TRAILMARK_DATA" not in os.environ, reason="no real data")
@pytest.mark.parametrize(("dataset", "split", "count"), [
    ("prontoqa", "dev", 500), ("proofwriter", "dev", 600), ("proofwriter", "test", 600),
])  # fmt: skip
def test_every_real_question_is_proved(dataset, split, count):
    source = get_task("logic", dataset=dataset, path=str(Path(os.environ["TRAILMARK_DATA"]) / "logic"))
    world, failures, tasks = source.make(), [], source.tasks(split)
    for task, (_, q) in zip(tasks, source.questions(split)):
        world.reset(task)
        p, text = read_problem(q), task.meta["gold"]
        ok = world.step(text).reward == 1 and not unsound(p, "Thought 1:" + text)
        if q.proof:  # the data's own proof: the given fact, then rule and conclusion in turn
            ok &= [sentence(i.conclusion) for i in p.proof] == list(q.proof[2::2])
            ok &= [i.rule.text for i in p.proof] == list(q.proof[1::2])
        failures += [] if ok else [task.id]
    assert not failures and len(tasks) == count
