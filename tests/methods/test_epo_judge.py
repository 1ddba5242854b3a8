"""Which answers of a judge are read (J1 to J5), and the two steps of EPO on files of ShareGPT."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest

from trailmark.ask.client import Unreadable
from trailmark.engines.scripted import ScriptedEngine
from trailmark.errors import DataError, Unfinished
from trailmark.methods.epo.config import ShapeConfig
from trailmark.methods.epo.judge import CriticalTurns, form, read_indexes, shown, told
from trailmark.methods.epo.shape import Marked, shaped
from trailmark.methods.epo.sharegpt_files import select, shape
from trailmark.models.tiny import tiny_tokenizer
from trailmark.score.config import ModelJudgeConfig

PLACES = [1, 3, 5]
TINY = tiny_tokenizer()


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ('{"indexes": [1, 5], "reasoning": "so"}', [1, 5]),
        ('{"id": "q", "indexes": []}', []),
        ('Sure! ```json\n{"indexes": [3], "reasoning": "a {brace} and \\"[7]\\""}\n``` Done.', [3]),
        ('<think>{"indexes": [1]}</think>{"indexes": [3]}', [3]),
        ('{"indexes": ["3", 5.0, 5]}', [3, 5]),  # digits as text, whole floats, and twice the same
        ('{"indexes": [3, 1]}\n{"indexes": [1, 3, 1]}', [1, 3]),  # the same answer twice
        ('{"id": "other", "indexes": [1]} {"id": "q", "indexes": [3]}', [3]),
    ],
)
def test_answers_that_are_read(text, want):
    assert read_indexes(text, "q", PLACES) == want


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"indexes": [1, 2]}', "2 is no index of a strategy: these are 1, 3, 5"),  # a human turn spoils the whole
        ('{"indexes": [1, 7]}', "7 is no index"), ('{"indexes": [-1]}', "-1 is no index"),
        ('{"indexes": [1.5]}', "1.5 is no index"), ('{"indexes": [true]}', "true is no index"),
        ('{"indexes": ["first"]}', '"first" is no index'), ('{"indexes": [NaN]}', "NaN is no index"),
        ('{"indexes": [[1]]}', r"\[1\] is no index"), ('{"indexes": 3}', "no list of numbers"),
        ("[1, 3]", "no JSON object"), ("3", "no JSON object"), ("", "no JSON object"),
        ("{'indexes': [1]}", "no JSON object"), ('{"indexes": [1,]}', "no JSON object"),
        ('{"index": [1]}', "no JSON object"), ('{"answer": {"indexes": [1]}}', "no JSON object"),
        ('{"indexes": [1, 3', "no JSON object"),  # cut
        ('<think>{"indexes": [1]}', "no JSON object"),  # cut in its thoughts
        ('{"indexes": [1]} or {"indexes": [3]}', "two different lists"),
        ('{"id": "other", "indexes": [1]}', "Your answer is for 'other', not for 'q'"),
    ],
)  # fmt: skip
def test_answers_that_are_refused(text, why):
    with pytest.raises(Unreadable, match=why):
        read_indexes(text, "q", PLACES)


def test_each_strategy_is_shown_with_its_number():
    said = [("system", "s"), ("user", "goal"), ("assistant", "ask"), ("user", "A: hi\n[1] strategy: fake")]
    messages = [{"role": r, "content": c} for r, c in (*said, ("assistant", "go"))]
    t = told("x", messages, 7, 10)
    assert t.strategies == [1, 3] and "[1, 3]" not in shown(t)
    assert shown(t).count("\n[1] strategy:\n    ask") == 1 and "\n    [1] strategy: fake" in shown(t)
    assert shown(t).endswith("Outcome: 7 (the best is 10)")
    assert "have the numbers 1, 3" in form("q", t.strategies)


# --- the files of the original ----------------------------------------------------------------------------------------


def item(outcome, texts=("Strategy: a", "Strategy: b", "Strategy: c"), system=True):
    said = [{"from": "system", "value": "s"}] if system else []
    for k, text in enumerate(texts):
        said += [{"from": "human", "value": f"human {k}"}, {"from": "gpt", "value": text}]
    return {"conversations": said, "score": outcome}


def put(path, items):
    path.write_text(json.dumps(items))
    return path


def judge(answer, tmp_path, **more):
    config = ModelJudgeConfig.model_validate({"model": {"name": "tiny"}, "max_tokens": 500, **more})
    return CriticalTurns(config, ScriptedEngine(answer, TINY, "wise"), tmp_path / "answers.jsonl")


def test_a_file_is_judged_without_a_change_of_its_words(tmp_path):
    asked = []

    def wise(prompt, draw):
        asked.append(prompt)
        human = '{"indexes": [2], "reasoning": "the {human} one"}'
        return human if len(asked) == 1 else 'I think. {"indexes": [1, 5], "reasoning": "so {it} is"}'

    items = [item(7), item(3, system=False)]
    before = copy.deepcopy(items)
    counts = select(put(tmp_path / "in.json", items), tmp_path / "out.json", judge(wise, tmp_path, at_once=1), 10, 0.0)
    made = json.loads((tmp_path / "out.json").read_text())
    assert counts == {"items": 2, "unjudged": 0, "left_out": 0, "critical": 4} and len(asked) == 3
    assert [m.pop("index", None) for m in made[0]["conversations"]] == [None, 0, 1, 2, 3, 4, 5]
    assert [m.pop("index") for m in made[1]["conversations"]] == [0, 1, 2, 3, 4, 5]
    assert [i.pop("location") for i in made] == [[1, 5], [1, 5]] and made == before
    select(tmp_path / "in.json", tmp_path / "out.json", judge(wise, tmp_path), 10, 0.0)
    assert len(asked) == 3  # nothing is asked twice


def test_what_could_not_be_judged_is_not_nothing_critical(tmp_path):
    def sometimes(prompt, draw):
        return "no idea" if "Outcome: 3" in prompt else '{"indexes": []}'

    path = put(tmp_path / "in.json", [item(7), item(3)])
    with pytest.raises(Unfinished, match="1 of 2 plays at the judge failed"):
        select(path, tmp_path / "out.json", judge(sometimes, tmp_path), 10, 0.0)
    assert not (tmp_path / "out.json").exists()
    counts = select(path, tmp_path / "out.json", judge(sometimes, tmp_path), 10, 0.5)
    made = json.loads((tmp_path / "out.json").read_text())
    assert counts["unjudged"] == 1 and made[0]["location"] == [] and "location" not in made[1]
    with pytest.raises(DataError, match=r"key '\[1\].location': is missing: this item was not judged"):
        shape(tmp_path / "out.json", tmp_path / "rl.json", ShapeConfig(most=10))
    shape(tmp_path / "out.json", tmp_path / "rl.json", ShapeConfig(most=10), marks=False)


def test_a_judged_file_becomes_the_data_of_the_original(tmp_path):
    items = [{**item(7), "location": [3]}, {**item(1, system=False), "location": [1]}, {**item(0), "location": []}]
    for i in items:
        for k, m in enumerate(i["conversations"]):
            m["index"] = k
    counts, made = shape(put(tmp_path / "in.json", items), tmp_path / "rl.json", ShapeConfig(most=10))
    rows = json.loads((tmp_path / "rl.json").read_text())
    assert all(set(r) == {"conversations"} for r in rows) and counts["items"] == 3
    scores = [[m["score"] for m in r["conversations"] if m["from"] == "gpt"] for r in rows]
    assert all(isinstance(s, str) for row in scores for s in row)
    want = [(0.99, 1, 0.4135), (1, 0.0902, 0.0911), (0, 0, 0)]
    np.testing.assert_allclose([[float(s) for s in row] for row in scores], want, atol=6e-5)
    assert all("score" not in m and "index" not in m for r in rows for m in r["conversations"] if m["from"] != "gpt")
    assert made.largest == pytest.approx(1.693)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda i: i.update(location=[2]), "key '[0].location[0]': is 2, and the model's messages have the numbers"),
        (lambda i: i.update(location=[1, 9]), "key '[0].location[1]': is 9"),
        (lambda i: i.update(location=[True]), "key '[0].location[0]': is True"),
        (lambda i: i.update(location=None), "key '[0].location': must be a list of numbers"),
        (lambda i: i.pop("score"), "key '[0].score': is missing: the outcome"),
        (lambda i: i.update(score=11), "in.json, item 0 has the outcome 11, and outcomes go from 0 to 10"),
        (lambda i: i.update(score="often"), "key '[0].score': must be a finite number"),
    ],
)
def test_mistakes_of_judged_files(tmp_path, change, says):
    i = {**item(7), "location": [1]}
    change(i)
    with pytest.raises(DataError) as error:
        shape(put(tmp_path / "in.json", [i]), tmp_path / "out.json", ShapeConfig(most=10))
    assert says in str(error.value)


def test_a_mark_on_the_last_turn_does_not_excuse_a_missing_outcome():
    with pytest.raises(DataError, match="episode 'e' has no outcome"):
        shaped([Marked("episode 'e'", "g", 2, {1}, None)], ShapeConfig())
    with pytest.raises(DataError, match="shape.normalise group: group 'g' has one trajectory"):
        shaped([Marked("e", "g", 2, {1}, 0.5)], ShapeConfig(normalise="group"))
    low, high = (Marked("e", "g", 2, (), r) for r in (0.1, 0.7))
    by_own, by_all = (shaped([low, high], ShapeConfig(normalise=n)).weights for n in ("trajectory", "dataset"))
    assert by_own[0].tolist() == by_own[1].tolist() and by_all[0][-1] == pytest.approx(1 / 7)
    assert Path("x").name == "x"
