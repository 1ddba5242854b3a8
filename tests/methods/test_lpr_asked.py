"""Who else is asked: a teacher that sees more than the policy, and a worsener whose versions are the rejected side."""

import json
from pathlib import Path

import pytest

from trailmark.config import resolve
from trailmark.errors import DataError, RecipeError
from trailmark.methods.lpr.commands import records_of
from trailmark.methods.lpr.config import LprRecipe
from trailmark.methods.lpr.method import LprMethod
from trailmark.methods.lpr.round import Round
from trailmark.methods.lpr.states import opening
from trailmark.methods.pipeline import some
from trailmark.runs.launch import launch
from trailmark.runs.store import Run, read_segment

SCRIPT = """
def note(who):
    with open("asked.txt", "a") as file:
        print(who, file=file)

def teach(prompt, draw):
    note("teacher")
    assert "Example" in prompt or prompt.count("Options:") == 2, prompt
    return "Thought 1: It says so.\\nAction 1: Finish[The answer is B.]"

def solve(prompt, draw):
    return f" I see {draw.randrange(10**6)}.\\nAction 1: Finish[The answer is {draw.choice('AB')}.]"

def spoil(prompt, draw):
    note("worsener")
    assert prompt.startswith("Spoil it.") and "I see" in prompt and "Finish[The answer is B.]" in prompt
    return "Thought 1: I misread it.\\nAction 1: Finish[The answer is A.]"

def wrong(prompt, draw):
    return " I guess.\\nAction 1: Finish[The answer is A.]"

def repeat(prompt, draw):
    return prompt[prompt.rindex("Thought 1:"):].strip()
"""
QUESTION = {"context": "c", "question": "q%d", "options": ["x", "y"], "label": 1, "id": "%d"}


@pytest.fixture
def given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "who.py").write_text(SCRIPT)
    row = json.dumps(QUESTION) + "\n"
    (tmp_path / "q_train.jsonl").write_text("".join(row.replace("%d", str(k)) for k in range(4)))
    return {
        "method": "lpr", "out": str(tmp_path / "run"), "steps": 1, "sample": {"n": 4},
        "model": {"name": "tiny", "shape": {"layers": 1, "width": 16, "heads": 2, "context": 1024}},
        "task": {"name": "logic", "options": {"dataset": "choice", "path": str(tmp_path / "q_train.jsonl")}},
        "clean": {"split": "react", "react": "finish"}, "pairs": {"process": False},
        "seats": {"policy": {"kind": "scripted", "function": "who.py:solve"}},
        "preference": {"steps": 1, "batch": 2}, "sampling": {"max_tokens": 200},
    }  # fmt: skip


def seat(given, name, function):
    return {**given["seats"], name: {"kind": "scripted", "function": f"who.py:{function}"}}


def test_the_teacher_is_shown_an_example_and_the_policy_is_not(given):
    more = {"seats": seat(given, "teacher", "teach"), "teacher": {"options": {"shots": 1}}, "sft": {"steps": 1}}
    c = resolve({**given, **more}, LprRecipe)
    launch(some(LprMethod, ("written", "lessons")), c)
    road = Round(c, Run(c.out))
    asked = read_segment(road.root / "written/all.jsonl")
    learnt = read_segment(road.root / "lessons/all.jsonl")
    shown = road.source().prompt(learnt[0].task)
    assert len(asked) == len(learnt) == 4
    assert all(road.tokenizer.decode(e.turns[0].prompt) == road.source().prompt(e.task) for e in learnt)
    assert len(asked[0].turns[0].prompt) > len(learnt[0].turns[0].prompt) and shown.endswith("Thought 1:")
    # the teacher wrote "Thought 1:" again: what is imitated goes on behind the prompt
    assert {e.turns[0].text for e in learnt} == {" It says so.\nAction 1: Finish[The answer is B.]"}


def test_a_teacher_whose_solutions_were_all_left_out_is_not_asked_again_when_clean_is_mended(given):
    more = {"seats": seat(given, "teacher", "teach"), "teacher": {"options": {"shots": 1}}, "sft": {"steps": 1}}
    wrong = resolve({**given, **more, "clean": {**given["clean"], "min_steps": 9}}, LprRecipe)
    with pytest.raises(DataError, match="stage 'lessons': none of 4 solutions is right and clean: 4 too short"):
        launch(LprMethod, wrong)
    launch(LprMethod, resolve({**given, **more}, LprRecipe), resume=True)
    assert Path("asked.txt").read_text() == "teacher\n" * 4
    assert len(read_segment("run/lessons/all.jsonl")) == 4


def test_a_worsener_is_not_asked_again_when_its_versions_are_cleaned_otherwise(given, capsys):
    more = {"seats": seat(given, "worsener", "spoil"), "worsen": {"most": 1, "instruction": "Spoil it."}}
    launch(LprMethod, resolve({**given, **more}, LprRecipe))
    asked, lines = Path("asked.txt").read_text(), Path("run/pairs-1/pairs.jsonl").read_bytes()
    launch(LprMethod, resolve({**given, **more, "clean": {**given["clean"], "min_steps": 1}}, LprRecipe), resume=True)
    assert "'worsened-1' is made again: key 'clean.min_steps'" in capsys.readouterr().err
    assert asked and Path("asked.txt").read_text() == asked and Path("run/pairs-1/pairs.jsonl").read_bytes() == lines


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [("a\nThought 1:", "Thought 1:"), ("a\nThought 1: ", "Thought 1:"), ("a\n", ""), ("Which one:", ""), ("", "")],
)
def test_the_step_that_a_prompt_opens(prompt, wanted):
    assert opening(prompt) == wanted


def test_worse_versions_are_the_rejected_side(given):
    more = {"seats": seat(given, "worsener", "spoil"), "worsen": {"most": 1, "instruction": "Spoil it."}}
    c = resolve({**given, **more}, LprRecipe)
    road = Round(c, Run(c.out))
    names = [s.name for s in LprMethod.stages(c, road.run)]
    assert names == ["solutions-1", "cleaned-1", "rewritten-1", "worsened-1", "pairs-1", "policy-1"]
    launch(LprMethod, c)
    right = {}
    for e in road.solved():
        if e.outcome.success:
            right.setdefault(e.group, e.id)
    lines = [json.loads(x) for x in (road.at("pairs") / "pairs.jsonl").read_text().splitlines()]
    worse = [(p["chosen"], p["rejected"]) for p in lines if p["kind"] == "worse"]
    assert worse == [(name, f"{name}~0") for name in right.values()] and len(lines) > len(worse)
    made = read_segment(road.at("worsened") / "all.jsonl")
    assert {e.turns[0].text for e in made} == {" I misread it.\nAction 1: Finish[The answer is A.]"}
    assert {road.tokenizer.decode(e.turns[0].prompt) for e in made} == {road.source().prompt(e.task) for e in made}
    summary = json.loads((road.root / "stages/worsened-1.json").read_text())["summary"]
    assert summary == {"versions": len(right), "of": len(right), "still right": 0}
    told = [(r["chosen"], r["reject"]) for r in records_of(road, "pairs-1")]
    assert len(told) == len(lines)
    assert told[-1][0].endswith("[The answer is B.]") and "I misread it." in told[-1][1]


def test_a_worsener_that_changes_nothing_is_told(given):
    more = {"seats": seat(given, "worsener", "repeat"), "worsen": {}}
    with pytest.raises(DataError, match=r"stage 'worsened-1': none of \d+ worse versions can be used: \d+ the same"):
        launch(LprMethod, resolve({**given, **more}, LprRecipe))


def test_no_worsener_is_asked_where_no_solution_is_right(given):
    seats = {**seat(given, "worsener", "spoil"), "policy": {"kind": "scripted", "function": "who.py:wrong"}}
    with pytest.raises(DataError, match="stage 'rewritten-1': no solution is right, so that none can be made worse"):
        launch(LprMethod, resolve({**given, "seats": seats, "worsen": {}}, LprRecipe))
    assert not Path("asked.txt").exists()


def test_a_worsener_without_its_section_is_refused(given):
    with pytest.raises(RecipeError, match="worsen and the seat worsener belong together"):
        resolve({**given, "seats": seat(given, "worsener", "spoil")}, LprRecipe)
    with pytest.raises(RecipeError, match="worsen and the seat worsener belong together"):
        resolve({**given, "worsen": {}}, LprRecipe)
    with pytest.raises(RecipeError, match="the seats of lpr are policy, teacher and worsener"):
        resolve({**given, "seats": seat(given, "judge", "spoil")}, LprRecipe)
