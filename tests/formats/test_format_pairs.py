"""`trailmark convert` from every format to every other one: the file is written and can be read, or one sentence says
what the episodes lack."""

import json

import pytest
from format_files import put, take
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.formats import known

RECORD = "Context:\nIt rains.\n\nQuestion:\nWhat?\n\nOption List:\nA. x\nB. y\nC. z\nD. w\n\nThought 1:"
SAID = " I see.\nAction 1: Finish[The answer is A.]"
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
GPT = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]
ROWS = {
    "messages": {"messages": TALK},
    "sharegpt": {"conversations": GPT},
    "trajectories": {"prompt": "hi", "response": "yo", "reward": 1.0},
    "agent": {"conversations": TALK, "reward": 1.0},
    "pairs": {"prompt": "hi", "chosen": "yo", "rejected": "no"},
    "react": {"text": RECORD, "label": 0, "response": SAID, "pred": "A", "id": "q"},
    "step-labels": {"question": "hi", "steps": ["a", "b"], "labels": [1, 0]},
    "reflect-policy": {"text": "room\n1. go\n # Action:\n1"},
    "reflect-reflector": {"text": "room\n # Analyze:\nGo on."},
}
PLAIN = {  # formats of a prompt and a response: the question and its answer
    "trajectories": ("hi", "yo"),
    "pairs": ("hi", "yo"),
    "react": (RECORD, SAID),
    "step-labels": ("hi\n", "a\nb"),
    "reflect-policy": ("room\n1. go\n # Action:\n", "1"),
    "reflect-reflector": ("room\n # Analyze:\n", "Go on."),
}
LACKS = {  # what only episodes of the same kind have
    "pairs": "is not a side of a pair",
    "react": "a record needs a 'label'",
    "step-labels": "has no steps with an annotation 'label'",
    "reflect-policy": r"must follow the marker ' # Action:\n' and not contain it",
    "reflect-reflector": r"must follow the marker ' # Analyze:\n' and not contain it",
}


def convert(source, out, start, end):
    return CliRunner().invoke(app, ["convert", *map(str, (source, out)), "--from", start, "--to", end,
                                    "--tokenizer", "tiny"])  # fmt: skip


def file_of(folder, name):
    if name != "episodes":
        return put(folder, [ROWS[name]], known()[name].layout == "lines", name)
    assert convert(file_of(folder, "sharegpt"), folder / "own.jsonl", "sharegpt", "episodes").exit_code == 0
    return folder / "own.jsonl"


@pytest.mark.parametrize("start", known())
def test_every_format_becomes_every_other_or_says_what_it_lacks(tmp_path, start):
    source = file_of(tmp_path, start)
    for end, kind in known().items():
        out = tmp_path / f"out-{end}.{'json' if kind.layout == 'list' else 'jsonl'}"
        done = convert(source, out, start, end)
        if done.exit_code:
            assert start != end and done.exit_code == 2 and LACKS.get(end, "?") in done.stderr, (end, done.stderr)
            assert not out.exists() and done.stdout == ""
            continue
        again = tmp_path / f"again-{end}.jsonl"
        assert convert(out, again, end, "episodes").exit_code == 0 and again.exists(), end


@pytest.mark.parametrize("start", PLAIN)
@pytest.mark.parametrize(("end", "key"), [("messages", "messages"), ("agent", "conversations")])
def test_a_prompt_and_a_response_become_a_question_and_its_answer(tmp_path, start, end, key):
    out = tmp_path / ("out.jsonl" if end == "messages" else "out.json")
    done = convert(file_of(tmp_path, start), out, start, end)
    assert done.exit_code == 0, done.stderr
    asked, answered = PLAIN[start]
    talk = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    assert take(out)[0][key] == talk
    told = json.dumps(take(out)).count('"assistant"')
    assert told == (2 if start == "pairs" else 1)  # both sides of a pair
