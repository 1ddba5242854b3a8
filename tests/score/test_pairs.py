"""Pairs are judged in both orders, and a judge that only likes the first answer decides nothing."""

import json
import re

import pytest
from judging import compared, judge_at, serving_judge

from trailmark.ask.client import Unreadable
from trailmark.methods.vrcli.pairs import CRITERIA, question, read_comparison

PAIRS = [(f"Q{k}? answer <{k}>", "long and right", "short") for k in range(2)]


def shown(messages):
    text = messages[0]["content"]
    name = re.findall(r'"id": "(\w+)"', text)[-1]
    return name, *re.search(r"Answer A:\n(.*)\n\nAnswer B:\n(.*?)\n\n", text, re.S).groups()


def say(name, **votes):
    return json.dumps({"id": name, **{c: votes.get(c, votes["all"]) for c in CRITERIA}})


def test_both_orders_are_averaged():
    def answer(messages):
        name, a, b = shown(messages)
        longer = "A" if len(a) > len(b) else "B"
        shorter = "B" if longer == "A" else "A"
        overall = "Tie" if longer == "A" else longer
        return "I think.\n" + say(name, all=longer, concise=shorter, consistent="A", overall=overall)

    with serving_judge(answer) as (url, asked):
        found = compared(judge_at(url), PAIRS)
    for c in found:  # overall: a tie in one order, the longer one in the other
        assert c.better == {"reasonable": 1.0, "concise": 0.0, "consistent": 0.5, "overall": 0.75} and not c.failed
        assert c.swayed == {"reasonable": False, "concise": False, "consistent": True, "overall": True}
    assert sum(asked.values()) == 4


def test_what_cannot_be_read_is_asked_again_and_then_fails():
    def answer(messages):
        name, _, _ = shown(messages)
        if "<1>" in messages[0]["content"]:
            return "Answer A is Better."  # letters in words are no votes
        return say(name, all="C") if len(messages) == 1 else say(name, all="b")

    with serving_judge(answer) as (url, asked):
        good, bad = compared(judge_at(url, again=1), PAIRS)
    assert good.better["overall"] == 0.5 and good.swayed["overall"]  # it always says the second
    assert bad.better == {} and "no mark when asked 2 times" in bad.failed
    assert sum(asked.values()) == 8


@pytest.mark.parametrize("text", ['{"overall": "Aa"}', '{"overall": null}', '{"other": "A"}', "A"])
def test_only_a_b_and_tie_are_votes(text):
    with pytest.raises(Unreadable):
        read_comparison(text, "x", ["overall"])
    assert read_comparison('{"overall": " TIE "}', "x", ["overall"]) == {"overall": 0.5}
    assert "Answer A:\none\n\nAnswer B:\ntwo" in question("q", "one", "two")
