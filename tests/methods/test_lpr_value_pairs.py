"""Pairs of states by their values, limits on rewards, and files that are merged and cut: worked out by hand."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.config import ModelConfig, resolve
from trailmark.errors import DataError, RecipeError
from trailmark.formats.turns import Reader, Starts, plain
from trailmark.methods.lpr.config import LprPairs, LprRead, LprRecipe, LprValuePairs
from trailmark.methods.lpr.formats import merge_records, split_records
from trailmark.methods.lpr.method import LprMethod
from trailmark.methods.lpr.pairs import Answer, all_pairs, pairs_by_value, shared_values, value_pairs
from trailmark.methods.lpr.round import Round
from trailmark.methods.lpr.vectors import same_groups, text_vectors
from trailmark.models.load import load_model
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


def test_texts_that_say_the_same_are_one():
    """0 and 1 are near, 1 and 2 are near, so all three are one; 3 is alone."""
    angle = lambda degrees: [math.cos(math.radians(degrees)), math.sin(math.radians(degrees))]
    vectors = np.array([angle(0), angle(20), angle(40), angle(90)])
    assert same_groups(vectors, math.cos(math.radians(20.1))) == [0, 0, 0, 3]
    assert same_groups(vectors, math.cos(math.radians(19.9))) == [0, 1, 2, 3]
    tiny = {"name": "tiny", "dtype": "float64", "shape": {"layers": 1, "width": 16}}
    lm = load_model(ModelConfig.model_validate(tiny))
    found = text_vectors(lm, ["ab", "", "ab", "xyz"])
    assert found[0] == pytest.approx(found[2]) and np.linalg.norm(found, axis=1) == pytest.approx([1, 0, 1, 1])
    ids = torch.tensor([lm.tokenizer("xyz").input_ids])
    plain = lm.base(ids, output_hidden_states=True).hidden_states[-1][0].mean(0).detach().numpy()
    assert found[3] == pytest.approx(plain / np.linalg.norm(plain), abs=1e-9)


def test_equal_steps_share_their_values():
    """x: a b c (wrong), y: a d e (right). The state behind a was completed twice (values 1 and 3), none of b; the one
    behind d was not, and what follows it is the right end, 3."""
    found = [solution("x", "a\nb\nc", False), solution("y", "a\nd\ne", True)]
    notes = [Annotation(n, "value", "step", (v, -1.0, -1.0), 0) for n, v in (("x", 1.0), ("y", 3.0))]
    groups = {("x", 0): [0, 1, 2], ("y", 0): [0, 3, 4]}
    made = shared_values(found, notes, groups, 3)
    assert [(a.episode, a.values) for a in made] == [("x", (2.0, 0.0, -1.0)), ("y", (2.0, 3.0, -1.0))]
    # b and d are one step: the mean of a wrong and a right end
    made = shared_values(found, notes, {("x", 0): [0, 1, 2], ("y", 0): [0, 1, 4]}, 3)
    assert [a.values for a in made] == [(2.0, 1.5, -1.0)] * 2
    # a step that comes back to itself: what leads on counts
    made = shared_values([solution("z", "a\nb\na\nc", True)], [], {("z", 0): [0, 1, 0, 3]}, 3)
    assert [a.values for a in made] == [(3.0, 3.0, 3.0, -1.0)]


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


def test_margins_by_type_and_data_set():
    """Rewards 0.9 and 0.5: a margin of 0.3 lets the pair through, one of 0.5 does not."""
    found = [replace(solution(n, t, True), group=g, task=Task(g, data=data, meta=meta)) for n, t, g, data, meta in (
        ("a", "1\n2", "p", {"dataset": "gsm8k"}, {}), ("b", "3\n4", "p", {"dataset": "gsm8k"}, {}),
        ("c", "1\n2", "q", {"dataset": "gsm8k"}, {"type": "math"}), ("d", "3\n4", "q", {}, {"type": "math"}),
    )]  # fmt: skip
    rewards = {"a": 0.9, "b": 0.5, "c": 0.9, "d": 0.5}
    made = lambda **s: [
        p.chosen.id + p.rejected.id
        for p in all_pairs(found, None, [], rewards, {}, LprPairs(**s), LprRead(), WORDS, ())[0]
    ]
    assert made(margin=0.3) == ["ab", "cd"] and made(margin=0.5) == []
    assert made(margin=0.5, margins={"math": 0.3}) == ["cd"]
    assert made(margin=0.3, margins={"math": 0.5, "other": 0.0}) == ["ab"]


def test_the_road_of_values_has_no_reward_model(tmp_path):
    given = {
        "method": "lpr", "out": str(tmp_path / "run"), "steps": 1, "sample": {"prompts": 3, "n": 4},
        "model": {"name": "tiny", "shape": {"layers": 1, "width": 16, "heads": 2, "context": 96}},
        "task": {"name": "arith", "options": {"level": 2}}, "states": {"start": 0.0, "ratio": 1.0},
        "seats": {"policy": {"kind": "scripted", "function": f"{SOLVER}:careless"}},
        "pairs": {"values": {"diff": 2}}, "preference": {"steps": 1, "batch": 2},
    }  # fmt: skip
    c = resolve(given, LprRecipe)
    road = Round(c, Run(c.out))
    assert [s.name for s in LprMethod.stages(c, road.run)] == [
        "solutions-1", "cleaned-1", "states-1", "completions-1", "values-1", "pairs-1", "policy-1",
    ]  # fmt: skip
    launch(LprMethod, c)
    lines = [json.loads(x) for x in (tmp_path / "run/pairs-1/pairs.jsonl").read_text().splitlines()]
    values = {a.episode: a.values for a in read_segment(tmp_path / "run/values-1/values.jsonl", Annotation)}
    groups = {e.id: e.group for e in road.solved()}
    ends = {e.id: [end for _, end in e.turns[0].steps] for e in road.solved()}
    worth = lambda p, side: values[p[side]][ends[p[side]].index(p[f"{side}_end"])]
    assert lines and all(groups[p["chosen"]] == groups[p["rejected"]] for p in lines)
    assert all(worth(p, "chosen") - worth(p, "rejected") >= 2 and p["kind"] == "value" for p in lines)
    again = resolve({**given, "pairs": {"values": {"diff": 0.5, "same": 0.999}}}, LprRecipe)
    launch(LprMethod, again, resume=True)
    more = [json.loads(x) for x in (tmp_path / "run/pairs-1/pairs.jsonl").read_text().splitlines()]
    assert more and all(p["chosen_reward"] - p["rejected_reward"] >= 0.5 for p in more)
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
