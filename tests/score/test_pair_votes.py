"""A judge of pairs in both orders: every combination of its two answers, and what is no answer."""

import json
import re
from itertools import product

import pytest
from judging import compared, judge_at, serving_judge

from trailmark.ask.client import Unreadable
from trailmark.methods.vrcli.pairs import (
    CRITERIA,
    compare_pair,
    question,
    read_comparison,
)
from trailmark.run_async import wait

WORDS = ("A", "B", "tie")
POINTS = {"A": 1.0, "B": 0.0, "tie": 0.5}


def test_every_combination_of_two_answers():
    """The task tells the judge what to say in each order; the first answer is `one`, the second `two`."""
    both = list(product(WORDS, repeat=2))
    pairs = [(f"answer <{k}> straight={s} turned={t}.", "one", "two") for k, (s, t) in enumerate(both)]

    def answer(messages):
        text = messages[0]["content"]
        name = re.findall(r'"id": "(\w+)"', text)[-1]
        order = "straight" if "Answer A:\none\n" in text else "turned"
        return json.dumps({"id": name, "overall": re.search(rf"{order}=(\w+)", text)[1]})

    with serving_judge(answer) as (url, asked):
        found = compared(judge_at(url), pairs, {"overall": "which is better"})
    assert sum(asked.values()) == 18
    for (s, t), c in zip(both, found):
        assert c.better == {"overall": (POINTS[s] + 1 - POINTS[t]) / 2}
        assert c.swayed == {"overall": (s, t) not in (("A", "B"), ("B", "A"), ("tie", "tie"))} and c.failed == ""


def test_one_failed_order_is_no_verdict():
    def answer(messages):
        name = re.findall(r'"id": "(\w+)"', messages[0]["content"])[-1]
        said = "A" if "Answer A:\none\n" in messages[0]["content"] else "neither"
        return json.dumps({"id": name, **dict.fromkeys(CRITERIA, said)})

    with serving_judge(answer) as (url, _):
        found = wait(compare_pair(judge_at(url, again=0), "answer <0>?", "one", "two"))
    assert found.better == {} and found.swayed == {} and "no mark when asked" in found.failed


def test_what_is_read_of_an_answer():
    read = lambda text, *criteria: read_comparison(text, "n1", criteria or ("x", "y"))
    assert read('{"id": "n1", "x": "a", "y": " Tie "}') == {"x": 1.0, "y": 0.5}
    assert read('first {"x": "A", "y": "A"} then {"x": "B", "y": "b"}') == {"x": 0.0, "y": 0.0}  # the last one
    assert read('{"id": "n1", "x": "A"} {"id": "n2", "x": "B"}', "x") == {"x": 1.0}  # the one with our name
    for text, says in (
        ('{"x": "A"}', "Your answer says None for 'y', which is none of A, B and tie"),
        ('{"x": "both", "y": "A"}', "Your answer says 'both' for 'x', which is none of A, B and tie"),
        ('{"y": "A"}', "Your answer holds no JSON object with 'x'"),
        ('{"id": "n2", "x": "A", "y": "A"}', "Your answer is for 'n2', not for 'n1'"),
    ):
        with pytest.raises(Unreadable) as error:
            read(text)
        assert str(error.value) == says


def test_the_question_shows_all_parts_in_order():
    text = question("the task", "first", "second", {"short": "who is brief", "true": "who is right"})
    assert text.endswith("The task:\nthe task\n\nAnswer A:\nfirst\n\nAnswer B:\nsecond")
    assert "\n- short: who is brief\n- true: who is right\n" in text
    assert all(f"- {name}: {what}" in question("", "", "") for name, what in CRITERIA.items())
