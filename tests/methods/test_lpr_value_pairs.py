"""Pairs of states by their values, limits on rewards, and files that are merged and cut: worked out by hand."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.config import resolve
from trailmark.errors import DataError, RecipeError
from trailmark.formats.lpr import merge_records, split_records
from trailmark.formats.turns import Reader, Starts, plain
from trailmark.methods.lpr import LprMethod, Road
from trailmark.methods.lpr_pairs import Answer, all_pairs, pairs_by_value, value_pairs
from trailmark.methods.staged_configs import LprPairs, LprRead, LprRecipe, LprValuePairs
from trailmark.models.tiny import tiny_tokenizer
from trailmark.runs.launch import launch
from trailmark.runs.store import Run, read_segment
from trailmark.steps import mark_steps, without_end
from trailmark.types import Annotation, Episode, Scored, Task

WORDS = tiny_tokenizer()
SOLVER = Path(__file__).parent / "lpr_careless.py"
# (state, share of its solution): values 3 and 1 after the first step of four, 2 after the second, 0 after the third
TABLE = [
    (Answer("a", True, 3.0, 1, 10), 0.25),
    (Answer("b", False, 1.0, 1, 11), 0.25),
    (Answer("a", True, 2.0, 2, 20), 0.5),
    (Answer("b", False, 0.0, 3, 31), 0.75),
]


def names(**s):
    name = lambda a: f"{a.id}{a.steps}"
    return [f"{name(p.chosen)}>{name(p.rejected)}" for p in value_pairs(TABLE, LprValuePairs(**s))]


@pytest.mark.parametrize(
    ("s", "wanted"),
    [
        ({}, "a1>a2 a1>b1 a1>b3 b1>b3 a2>b1 a2>b3"),  # of one chosen state, the best rejected ones first
        ({"diff": 2}, "a1>b1 a1>b3 a2>b3"),
        ({"diff": 2.5}, "a1>b3"),
        ({"decay": 0.5}, "a1>b1 a2>b3"),  # 3 - 2 one step apart: 0.5; 3 - 0 and 1 - 0 two apart: 0.75 and 0.25
        ({"max_gap": 0.25}, "a1>a2 a1>b1 a2>b1 a2>b3"),
        ({"max_gap": 0.0}, "a1>b1"),
        ({"most": 1}, "a1>a2 b1>b3 a2>b1"),
    ],
)
def test_by_hand(s, wanted):
    assert names(**s) == wanted.split()


def solution(name, text, right):
    turn = plain(Reader(WORDS, "policy", Starts()), "q\n", text)
    e = Episode(name, Task("t"), "q", (turn,), {"self": Scored(float(right), right)})
    return without_end(mark_steps(e, "policy", WORDS, "newline"), "policy", WORDS)


def test_a_state_behind_a_bad_one_is_worth_no_more(tmp_path):
    """Values 0 and 3 of one solution, 2 of another: with a floor of 0 the 3 counts as 0."""
    found = [solution("x", "a\nb\nc", False), solution("y", "d\ne", True)]
    notes = [Annotation("x", "value", "step", (0.0, 3.0, -1.0), 0), Annotation("y", "value", "step", (2.0, -1.0), 0)]
    told = lambda **s: [
        (p.chosen.id, p.chosen.steps, p.rejected.id, p.rejected.steps, p.kind)
        for p in pairs_by_value(found, notes, LprValuePairs(**s))
    ]
    assert told() == [("x", 2, "y", 1, "value"), ("x", 2, "x", 1, "value"), ("y", 1, "x", 1, "value")]
    assert told(floor=0) == [("y", 1, "x", 1, "value"), ("y", 1, "x", 2, "value")]
    assert told(floor=0, clip=1) == [("y", 1, "x", 1, "value")] * 2
    line = pairs_by_value(found, notes, LprValuePairs(diff=3))[0].line()
    ends = [end for _, end in found[0].turns[0].steps]
    assert (line["chosen_end"], line["rejected_end"], line["chosen_reward"]) == (ends[1], ends[0], 3.0)


def test_limits_on_rewards():
    found = [solution(n, t, r) for n, t, r in (("a", "1\n2", True), ("b", "3\n4", True), ("x", "5\n6", False))]
    rewards = {"a": 0.9, "b": 0.4, "x": 0.5}
    made = lambda **s: [
        p.chosen.id + p.rejected.id
        for p in all_pairs(found, None, [], rewards, {}, LprPairs(margin=0.1, **s), LprRead(), WORDS, ())[0]
    ]
    assert made() == ["ax", "bx", "ab"]
    assert made(min_chosen=0.9) == ["ax", "ab"] and made(min_chosen=0.91) == []
    assert made(max_rejected=0.4) == ["ab"] and made(min_chosen=0.4, max_rejected=0.5) == ["ax", "bx", "ab"]


def test_the_road_of_values_has_no_reward_model(tmp_path):
    given = {
        "method": "lpr", "out": str(tmp_path / "run"), "steps": 1, "sample": {"starts": 3, "n": 4},
        "model": {"name": "tiny", "shape": {"layers": 1, "width": 16, "heads": 2, "context": 96}},
        "task": {"name": "arith", "options": {"level": 2}}, "states": {"start": 0.0, "ratio": 1.0},
        "seats": {"policy": {"kind": "scripted", "function": f"{SOLVER}:careless"}},
        "pairs": {"values": {"diff": 2}}, "preference": {"steps": 1, "batch": 2},
    }  # fmt: skip
    c = resolve(given, LprRecipe)
    road = Road(c, Run(c.out))
    assert [s.name for s in road.stages()] == [
        "solutions-1", "cleaned-1", "states-1", "completions-1", "values-1", "pairs-1", "policy-1",
    ]  # fmt: skip
    launch(LprMethod, c)
    lines = [json.loads(x) for x in (tmp_path / "run/pairs-1/pairs.jsonl").read_text().splitlines()]
    values = {a.episode: a.values for a in read_segment(tmp_path / "run/values-1/values.jsonl", Annotation)}
    groups = {e.id: e.group for e in road.solved(1)}
    ends = {e.id: [end for _, end in e.turns[0].steps] for e in road.solved(1)}
    worth = lambda p, side: values[p[side]][ends[p[side]].index(p[f"{side}_end"])]
    assert lines and all(groups[p["chosen"]] == groups[p["rejected"]] for p in lines)
    assert all(worth(p, "chosen") - worth(p, "rejected") >= 2 and p["kind"] == "value" for p in lines)
    with pytest.raises(RecipeError, match="pairs.steps and pairs.values both"):
        resolve({**given, "pairs": {"values": {}, "steps": {}}}, LprRecipe)


def write(path, rows):
    path.write_text(json.dumps(rows))
    return path


def test_files_are_merged_question_by_question(tmp_path):
    one = write(tmp_path / "1.json", [{"text": "q", "label": 1, "response": "x", "pred": "B", "id": 7}])
    two = write(tmp_path / "2.json", [
        {"text": "q", "label": 1, "response": ["y", "z"], "pred": ["A", ""], "id": 7},
        {"text": "p", "label": 0, "response": ["w"], "pred": ["A"], "id": 8},
    ])  # fmt: skip
    assert merge_records([one, two]) == [
        {"text": "q", "label": 1, "response": ["x", "y", "z"], "pred": ["B", "A", ""], "id": 7},
        {"text": "p", "label": 0, "response": ["w"], "pred": ["A"], "id": 8},
    ]
    done = CliRunner().invoke(app, ["lpr", "merge", str(tmp_path / "all.json"), str(one), str(two)])
    assert done.exit_code == 0 and "2 questions, 4 responses" in done.output
    assert json.loads((tmp_path / "all.json").read_text())[0]["response"] == ["x", "y", "z"]
    other = write(tmp_path / "3.json", [{"text": "q", "label": 2, "response": "x", "pred": "B", "id": 7}])
    with pytest.raises(DataError, match="3.json: key '.0..label': of question '7' is not what an earlier file says"):
        merge_records([one, other])
    bare = write(tmp_path / "4.json", [{"text": "q", "label": 1, "response": "x", "id": 7}])
    done = CliRunner().invoke(app, ["lpr", "merge", str(tmp_path / "no.json"), str(one), str(bare)])
    assert done.exit_code == 2 and "'pred" in done.output.replace("[0].", "'") and not (tmp_path / "no.json").exists()


def test_a_file_is_cut_by_question(tmp_path):
    rows = [{"id": k % 10, "chosen": f"c{k}", "reject": f"r{k}"} for k in range(40)]
    file = write(tmp_path / "pairs.json", rows)
    part, rest = split_records(file, 0.4, "question", 3)
    mine, others = {r["id"] for r in part}, {r["id"] for r in rest}
    assert len(mine) == 4 and not mine & others and len(part) == 16
    assert sorted([*part, *rest], key=lambda r: int(r["chosen"][1:])) == rows
    assert [r["chosen"] for r in part] == [r["chosen"] for r in rows if r["id"] in mine]  # in their order
    assert split_records(file, 0.4, "question", 3) == (part, rest) != split_records(file, 0.4, "question", 4)
    assert len(split_records(file, 0.33, "row", 0)[0]) == 13
    names = [str(tmp_path / n) for n in ("pairs.json", "dev.jsonl", "train.jsonl")]
    done = CliRunner().invoke(app, ["lpr", "split", *names, "--share", "0.2"])
    assert done.exit_code == 0 and len(Path(names[1]).read_text().splitlines()) == 8
    done = CliRunner().invoke(app, ["lpr", "split", names[0], names[1] + "x", names[2] + "x", "--share", "0.05"])
    assert done.exit_code == 2 and "leaves nothing" in " ".join(done.output.split())
    assert not Path(names[2] + "x").exists()
