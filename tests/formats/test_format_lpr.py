"""LPR's records: what enters, what leaves, what cannot be tied, and what a bad record is told."""

import json
from dataclasses import replace

import numpy as np
import pytest

from trailmark import formats
from trailmark.errors import DataError
from trailmark.methods.lpr import formats as lpr
from trailmark.models.tiny import tiny_tokenizer
from trailmark.steps import mark_steps, without_end
from trailmark.types import Invalid, Parent, Scored

WORDS = tiny_tokenizer()
EOS = WORDS.eos_token
SOLUTIONS = [
    {"text": "p\n", "label": 1, "response": ["a\nb\nend", "a\nc\nend"], "pred": ["B", "A"], "id": 7},
    {"text": "q_q\n", "label": "12", "response": ["é\nend"], "pred": ["12"], "id": "s_1"},
]


def put(folder, rows, name="rows.json"):
    path = folder / name
    lines = "".join(json.dumps(r) + "\n" for r in rows)
    path.write_text(lines if name.endswith("l") else json.dumps(rows), "utf-8")
    return path


def solved(folder, rows=SOLUTIONS):
    """The solutions as a road keeps them: cut into lines."""
    found = lpr.read_solutions(put(folder, rows, "solutions.json"), WORDS, "policy")
    return [without_end(mark_steps(e, "policy", WORDS, "newline"), "policy", WORDS) for e in found]


@pytest.fixture
def good(tmp_path):
    return solved(tmp_path)


def state(e, step, index):
    return {"episode": e.id, "turn": 0, "token": e.turns[0].steps[step][1], "step": step, "type": "", "index": index}


def refused(call, path, place, why):
    """The whole sentence, with the file and the line or the key."""
    with pytest.raises(DataError) as found:
        call()
    assert str(found.value) == f"{path}{place}{why}"


# --- solutions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_solutions_enter_and_leave_as_they_were(tmp_path, name):
    found = lpr.read_solutions(put(tmp_path, SOLUTIONS, name), WORDS, "solver")
    assert [e.id for e in found] == ["7/0", "7/1", "s_1/0"] and {e.turns[0].seat for e in found} == {"solver"}
    assert [e.outcome for e in found] == [Scored(1.0, True), Scored(0.0, False), Scored(1.0, True)]
    assert all(e.turns[0].steps == () and "steps" not in e.info for e in found)  # they are cut as the recipe says
    back = lpr.solution_records(found, WORDS)
    assert back == [{**r, "id": str(r["id"]) if r["id"] == 7 else r["id"]} for r in SOLUTIONS]
    formats.write("episodes", tmp_path / "own.jsonl", found, None)
    assert lpr.read_solutions(tmp_path / "own.jsonl", WORDS, "other") == found  # episodes of ours stay as they are


def test_episodes_in_tokens_of_another_tokenizer_are_refused(tmp_path, good):
    turn = good[0].turns[0]
    odd = [tuple(t + 1 for t in turn.tokens), (*turn.tokens, len(WORDS))]
    for tokens in odd:
        other = replace(good[0], turns=(replace(turn, tokens=tokens),))
        formats.write("episodes", tmp_path / "own.jsonl", [other], None)
        refused(
            lambda: lpr.read_solutions(tmp_path / "own.jsonl", WORDS, "policy"),
            tmp_path / "own.jsonl",
            ": episode '7/0' was written in tokens of another tokenizer than the policy's: ",
            "give it as records (trailmark lpr export solutions).",
        )


def test_without_a_prediction_a_right_answer_has_the_label(good):
    bare = [replace(e, info={k: v for k, v in e.info.items() if k != "pred"}) for e in good]
    assert [r["pred"] for r in lpr.solution_records(bare, WORDS)] == [["1", ""], ["12"]]
    own = [replace(e, info={}, task=replace(e.task, data={"answer": 5}, meta={})) for e in bare[:1]]
    (row,) = lpr.solution_records(own, WORDS)
    assert (row["text"], row["label"], row["pred"], row["id"]) == ("p\n", 5, ["5"], "7")
    paid = [replace(e, outcomes={"self": Scored(r)}) for e, r in zip(bare[:2], (0.5, 0.0))]  # nobody said "success"
    assert lpr.solution_records(paid, WORDS)[0]["pred"] == ["1", ""]


def test_a_bad_solution_is_told_by_its_line(tmp_path):
    path = put(tmp_path, [SOLUTIONS[0], {**SOLUTIONS[1], "pred": ["1", "2"]}], "rows.jsonl")
    refused(lambda: lpr.read_solutions(path, WORDS, "p"), path, ":2: key 'pred': ", "has 2 entries for 1 responses.")
    path = put(tmp_path, [SOLUTIONS[0], SOLUTIONS[0]], "rows.jsonl")
    refused(lambda: lpr.read_solutions(path, WORDS, "p"), path, ":2: key 'id': ", "is 7, as in an earlier row.")


# --- states ----------------------------------------------------------------------------------------------------------


def test_states_enter_and_leave_as_they_were(tmp_path, good):
    states = [state(good[0], 1, 0), state(good[1], 0, 1), state(good[2], 0, 0)]
    rows = lpr.state_records(good, states, WORDS)
    assert rows[0]["inter_states"] == [
        {"state": "a\nb\n", "step_id": 1, "resp_id": 0, "type": ""},
        {"state": "a\n", "step_id": 0, "resp_id": 1, "type": ""},
    ]
    assert rows[1]["inter_states"] == [{"state": "é\n", "step_id": 0, "resp_id": 0, "type": ""}]
    assert [{k: v for k, v in r.items() if k != "inter_states"} for r in rows] == lpr.solution_records(good, WORDS)
    for name in ("states.json", "states.jsonl"):
        found, out = lpr.read_states(put(tmp_path, rows, name), good, WORDS)
        assert found == states and out == {}


def test_states_that_cannot_be_tied_are_counted_and_keep_their_numbers(tmp_path, good):
    texts = [("a\nb", 0), ("a\nb\n\n ", 0), ("a\n", 4), ("a", 1), ("a\nc\nend", 1), ("a\nc\ne", 1)]
    rows = [{"id": 7, "inter_states": [{"state": s, "resp_id": r, "type": "Thought"} for s, r in texts]}]
    found, out = lpr.read_states(put(tmp_path, rows), good, WORDS)
    assert [(s["episode"], s["step"], s["token"], s["index"]) for s in found] == [
        ("7/0", 1, 4, 0),
        ("7/0", 1, 4, 1),  # blanks at the end do not matter
        ("7/1", 0, 2, 3),
    ]
    assert {s["type"] for s in found} == {"Thought"}
    assert out == {"states of a solution that is not here": 1, "states that end inside a step": 2}


def test_a_state_without_a_type_has_that_of_its_step(tmp_path):
    said = "Thought 1: so\nAction 1: go\nend"
    found = solved(tmp_path, [{**SOLUTIONS[0], "response": [said], "pred": ["B"]}])
    rows = [{"id": 7, "inter_states": [{"state": "Thought 1: so\nAction 1: go", "resp_id": 0}]}]
    ((one,), _) = lpr.read_states(put(tmp_path, rows), found, WORDS)
    assert one["type"] == "Action" and one["step"] == 1


@pytest.mark.parametrize(
    ("row", "place", "why"),
    [
        ({"inter_states": []}, "id", "is missing. Found: inter_states."),
        ({"id": 7, "inter_state": []}, "inter_state", "is not known. Did you mean 'inter_states'?"),
        ({"id": 7, "inter_states": [{"state": "a"}]}, "inter_states[0].resp_id", "is missing. Found: state."),
        ({"id": 7, "inter_states": [{"state": 3, "resp_id": 0}]}, "inter_states[0].state", "must be text, not 3."),
        ({"id": 7, "inter_states": ["a"]}, "inter_states[0]", "must be an object, not 'a'."),
        ({"id": 7, "inter_states": "a\n"}, "inter_states", "must be a list, not 'a\\n'."),
    ],
)
def test_a_bad_state_is_told_by_its_line(tmp_path, good, row, place, why):
    path = put(tmp_path, [{"id": 7, "inter_states": []}, row], "s.jsonl")
    refused(lambda: lpr.read_states(path, good, WORDS), path, f":2: key '{place}': ", why)


def test_shards_of_one_name_are_all_there():
    lpr.all_shards(["x/s.1-of-2.json", "y/s.0-of-2.json", "more.jsonl"])
    lpr.all_shards([])
    with pytest.raises(DataError) as found:
        lpr.all_shards(["s.0-of-3.jsonl", "s.2-of-3.jsonl"])
    assert str(found.value) == (
        "s.0-of-3.jsonl: is one of 3 shards, and shard 1 is not among the named files: name them all."
    )
    with pytest.raises(DataError, match="s.0-of-2.json: is one of 2 shards, and shard 1 is not"):
        lpr.all_shards(["s.0-of-2.json", "t.1-of-2.json"])  # of two sets, and each lacks one


# --- completions -----------------------------------------------------------------------------------------------------


def test_completions_enter_and_leave_as_they_were(tmp_path, good):
    states = [state(good[0], 0, 0), state(good[2], 0, 0)]
    rows = [
        {"text": "p\na\n", "label": 1, "response": ["x\ny", "z", " "], "pred": ["B", "C", ""], "id": "7_0"},
        {"text": "q_q\né\n", "label": "12", "response": ["w"], "pred": ["12"], "id": "s_1_0"},
    ]
    made, out = lpr.read_completions(put(tmp_path, rows), states, good, WORDS, "policy")
    assert out == {} and [e.id for e in made] == ["7/0>0.2/0", "7/0>0.2/1", "7/0>0.2/2", "s_1/0>0.3/0"]
    assert [e.parent for e in made[:1]] == [Parent("7/0", 0, 2)]
    assert [e.outcome.success for e in made] == [True, False, False, True]
    for e, said in zip(made, ["x\ny" + EOS, "z" + EOS, "", "w" + EOS]):
        origin = {x.id: x for x in good}[e.parent.episode].turns[0]
        assert e.turns[0].forced == origin.tokens[: e.parent.token] and e.turns[0].prompt == origin.prompt
        assert WORDS.decode(e.turns[0].tokens) == said
    assert lpr.completion_records(made, states, WORDS) == rows


def test_completions_of_no_state_and_without_a_label(tmp_path, good):
    rows = [{"response": ["x", "y"], "pred": ["", ""], "id": key} for key in ("7_1", "7", "8_0", "7_x")]
    rows.append({"response": "x", "pred": "B", "id": "7_0"})
    made, out = lpr.read_completions(put(tmp_path, rows), [state(good[0], 0, 0)], good, WORDS, "policy")
    assert out == {"completions of a state that is not here": 8}
    assert [e.outcome for e in made] == [Scored(1.0, True)]  # the label is the question's own
    hidden = [{"response": "x", "pred": "B", "id": "7_0", "label": -1}]
    (one,), _ = lpr.read_completions(put(tmp_path, hidden), [state(good[0], 0, 0)], good, WORDS, "policy")
    assert one.outcome == Invalid("no label in the file")


def test_a_bad_completion_is_told_by_its_line(tmp_path, good):
    read = lambda path: lpr.read_completions(path, [state(good[0], 0, 0)], good, WORDS, "policy")
    for row, key, why in (
        ({"response": ["x"], "pred": ["B", "C"], "id": "7_0"}, "pred", "has 2 entries for 1 responses."),
        ({"response": ["x"], "id": "7_0"}, "pred", "is missing. Found: response, id."),  # else all would be wrong
        ({"response": [3], "pred": ["B"], "id": "7_0"}, "response", "must be text, not 3."),
        ({"respons": ["x"], "id": "7_0"}, "respons", "is not known. Did you mean 'response'?"),
    ):
        path = put(tmp_path, [row])
        refused(lambda: read(path), path, f": key '[0].{key}': ", why)  # noqa: B023


# --- scores ----------------------------------------------------------------------------------------------------------


def test_scores_enter_and_leave_as_they_were(tmp_path, good):
    outputs = {(good[0].id, 0): np.arange(9.0).reshape(3, 3), (good[2].id, 0): np.array([0.25, -1.5])}
    rows = lpr.score_records(good, outputs, {good[0].id: 0.125}, WORDS)
    assert [(r["index"], r["response"], r["reward"]) for r in rows] == [
        ("7", "a\nb\nend", 0.125),
        ("s_1", "é\nend", None),
    ]
    assert rows[0]["ending_logits"] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert rows[1]["ending_logits"] == [[0.25], [-1.5]]
    notes, out = lpr.read_scores(put(tmp_path, rows, "s.jsonl"), good)
    assert {k: n for k, n in out.items() if n} == {}
    assert [(a.episode, a.name, a.values) for a in notes] == [
        ("7/0", "class_0", (0, 3, 6)),
        ("7/0", "class_1", (1, 4, 7)),
        ("7/0", "class_2", (2, 5, 8)),
        ("s_1/0", "class_0", (0.25, -1.5)),
    ]


def test_scores_that_cannot_be_tied_are_counted(tmp_path, good):
    rows = [
        {"index": 7, "response": " a\nb\nend\n", "ending_logits": [[1], [2], [3]]},
        {"index": 7, "response": "a\nb\nend", "ending_logits": [[4], [5], [6]]},  # the last one counts
        {"index": 7, "response": "a\nc\nend", "ending_logits": [[1], [2]]},
        {"index": 8, "response": "a\nb\nend", "ending_logits": [[1], [2], [3]]},
        {"index": 7, "response": "a", "ending_logits": [[1]]},
    ]
    notes, out = lpr.read_scores(put(tmp_path, rows), good)
    assert [(a.episode, a.values) for a in notes] == [("7/0", (4, 5, 6))]
    assert out == {
        "scores of a solution that is not here": 2,
        "scores of other steps than the solution has": 1,
        "solutions that are scored twice": 1,
    }


@pytest.mark.parametrize(
    ("table", "key", "why"),
    [
        ([[1, 2], [1], [1, 2]], "ending_logits", "must be one list of numbers for each step, all of one length."),
        ([[], [], []], "ending_logits", "must be one list of numbers for each step, all of one length."),
        ([1, 2, 3], "ending_logits", "must be one list of numbers for each step, all of one length."),
        ([], "ending_logits", "must be a list that is not empty, not []."),
        ([[1], [None], [1]], "ending_logits", "must be finite numbers."),
        ([[1], ["x"], [1]], "ending_logits[1]", "must be a finite number, not 'x'."),
    ],
)
def test_bad_scores_are_told_by_their_line(tmp_path, good, table, key, why):
    row = {"index": 7, "response": "a\nb\nend", "ending_logits": table}
    path = put(tmp_path, [{**row, "ending_logits": [[1], [1], [1]]}, row], "s.jsonl")
    refused(lambda: lpr.read_scores(path, good), path, f":2: key '{key}': ", why)


# --- pairs -----------------------------------------------------------------------------------------------------------


def test_pairs_leave_and_enter_as_they_were(tmp_path, good):
    lines = [
        {"chosen": "7/0", "rejected": "7/1", "kind": "outcome", "chosen_reward": 0.5, "rejected_reward": 0.25},
        {"chosen": "7/0", "rejected": "7/1", "kind": "state", "chosen_end": 4, "rejected_end": 2},
        {"chosen": "7/0", "rejected": "7/1", "kind": "step", "chosen_prefix": 2, "chosen_end": 4, "rejected_prefix": 2},
    ]
    rows = lpr.pair_records(lines, good, WORDS)
    assert rows == [
        {"id": "7", "chosen": "a\nb\nend", "chosen_full": True, "chosen_reward": 0.5,
         "reject": "a\nc\nend", "reject_full": True, "reject_reward": 0.25},
        {"id": "7", "chosen": "a\nb\n", "chosen_full": False, "reject": "a\n", "reject_full": False},
        {"id": "7", "chosen": "a\nb\n", "chosen_full": False, "chosen_prefix": "a\n",
         "reject": "a\nc\nend", "reject_full": True, "reject_prefix": "a\n"},
    ]  # fmt: skip
    sides, out = lpr.read_pairs(put(tmp_path, rows), {"7": "p\n"}, WORDS, "policy")
    assert out == {} and [(e.info["pair"], e.info["side"]) for e in sides[:3]] == [
        ("pair 0", "chosen"), ("pair 0", "rejected"), ("pair 1", "chosen"),
    ]  # fmt: skip
    first, second = good[0].turns[0].tokens, good[1].turns[0].tokens
    assert [(e.turns[0].forced, e.turns[0].tokens) for e in sides] == [
        ((), first), ((), second), ((), first[:4]), ((), second[:2]), (first[:2], first[2:4]), (first[:2], second[2:]),
    ]  # fmt: skip
    assert [e.outcome.reward for e in sides] == [1.0, 0.0] * 3 and len({e.id for e in sides}) == 6


def test_a_side_may_be_what_stands_behind_its_prefix_alone(tmp_path):
    row = {"chosen": "b", "reject": "a\nc", "id": 7, "chosen_prefix": "a\n", "reject_prefix": "a\n"}
    sides, _ = lpr.read_pairs(put(tmp_path, [row]), {"7": "p\n"}, WORDS, "policy")
    assert [(WORDS.decode(e.turns[0].forced), WORDS.decode(e.turns[0].tokens)) for e in sides] == [
        ("a\n", "b" + EOS), ("a\n", "c" + EOS),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "place", "why"),
    [
        ({"chosen": "a", "id": 7}, ": key '[0].reject': ", "is missing. Found: chosen, id."),
        ({"chosen": " ", "reject": "b", "id": 7}, ": key '[0].chosen': ",
         "is empty, or is its prefix alone: there is nothing to train."),
        ({"chosen": "a", "reject": None, "id": 7}, ": key '[0].reject': ", "must be text, not None."),
        ({"chosen": "a", "reject": "b", "id": 8}, ": ",
         "holds no pair that can be used: {'pairs of a question that is not here': 1}."),
        ({"chosen": "a", "reject": "a", "id": 7}, ": ",
         "holds no pair that can be used: {'pairs of two equal sides': 1}."),
    ],
)  # fmt: skip
def test_bad_pairs_are_told_by_their_place(tmp_path, row, place, why):
    path = put(tmp_path, [row])
    refused(lambda: lpr.read_pairs(path, {"7": "p\n"}, WORDS, "policy"), path, place, why)
