"""Rows with a planted hint: who the gold text is about, what the lessons tell, and how long the prompts are."""

import json
import re
from collections import Counter

from data_fixtures import rows as lines
from typer.testing import CliRunner

from trailmark.chat import render
from trailmark.commands.app import app
from trailmark.methods.vrcli.stories.hints import ANIMALS, FILES
from trailmark.models.load import load_tokenizer

FEW = ["--train", "30", "--val", "10", "--test", "10", "--lessons", "900"]


def made(out, *words):
    done = CliRunner().invoke(app, ["data", "hints", "--out", str(out), *FEW, *words])
    assert done.exit_code == 0, done.output
    return out


def guests(text):
    return re.search(r"came: (.*)\. Tell", text)[1].split(", ")


def test_the_gold_text_is_about_the_last_guest_and_no_list_is_in_two_splits(tmp_path):
    out = made(tmp_path / "a")
    talks = lines(out / "talks.jsonl")
    assert Counter(t["split"] for t in talks) == {"train": 30, "val": 10, "test": 10}
    lists = [guests(t["messages"][0]["content"]) for t in talks]
    assert len({tuple(g) for g in lists}) == 50 and all(len(set(g)) == 4 and set(g) <= set(ANIMALS) for g in lists)
    assert [t["messages"][1]["content"] for t in talks] == [f"The {g[-1]} sleeps." for g in lists]
    for split in ("train", "val", "test"):
        rows = lines(out / f"{split}.jsonl")
        assert [r["id"] for r in rows] == [t["id"] for t in talks if t["split"] == split]
        assert all(r["gold"] not in json.dumps(r["prompt"]) for r in rows)


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    a, b, c = made(tmp_path / "a"), made(tmp_path / "b"), made(tmp_path / "c", "--seed", "1")
    assert all((a / f).read_bytes() == (b / f).read_bytes() for f in FILES)
    assert (a / "talks.jsonl").read_bytes() != (c / "talks.jsonl").read_bytes()


def test_lessons_teach_to_follow_a_plan_and_not_whom_to_name(tmp_path):
    out = made(tmp_path / "a")
    places, followed, plans = Counter(), 0, 0
    for k, lesson in enumerate(lines(out / "lessons.jsonl")):
        asked, answer = (m["content"] for m in lesson["messages"])
        name = (re.fullmatch(r"In summary: (\w+)" if k % 3 == 2 else r"The (\w+) sleeps\.", answer))[1]
        assert ("Detailed Plan" in asked, "Instruction" in asked) == (k % 3 == 1, k % 3 == 2)
        places[k % 3, guests(asked).index(name)] += 1
        if k % 3 == 1:
            plans += 1
            followed += asked.endswith(name)
    assert plans == 300 and 0.85 < followed / plans < 0.95  # it is right in nine of ten
    for kind in range(3):  # every place is named about as often: 75 of 300, deviation 7.5
        assert all(50 < places[kind, k] < 100 for k in range(4)), places


def test_prompts_are_short_in_its_own_tokens(tmp_path):
    out = made(tmp_path / "a")
    words = load_tokenizer(str(out / "tokenizer"))
    for lesson in lines(out / "lessons.jsonl")[:30]:
        made_of = render(words, lesson["messages"], template="own")
        assert len(made_of.tokens) < 30
        assert words.decode(made_of.tokens).count(lesson["messages"][0]["content"]) == 1
