import pytest
from format_files import BOS, FEW, TINY, TRAINED, more, put, say, texts, there_and_back
from hypothesis import assume, given
from hypothesis import strategies as st

from trailmark import formats
from trailmark.errors import DataError
from trailmark.methods.lpr.react import is_right, named_steps
from trailmark.types import Failed, Invalid, Scored

PROMPT = "Question:\nWhich?\n\nThought 1: "
STEPS = [
    "it is red.\n\n",
    "Action 1: look at it.\nand on.\n",
    "Observation 1: it is so.\nThought 2: \n",  # an empty thought belongs to the step before it
    "Thought 3: é🙂, so the answer is B.\n",
    "Action 3: Finish[The answer is B.]",
]
KINDS = ["Thought", "Action", "Observation", "Thought", "Action"]
RECORD = {"text": PROMPT, "label": 1, "response": "".join(STEPS), "pred": "B", "id": 17}


@pytest.mark.parametrize("tokenizer", [TINY, TRAINED, BOS], ids=["bytes", "merges", "bos"])
def test_steps_are_spans_of_tokens(tmp_path, tokenizer):
    (e,) = formats.read("react", put(tmp_path, [RECORD]), tokenizer).episodes
    (turn,) = e.turns
    assert [say(turn.tokens[a:b], tokenizer) for a, b in turn.steps] == [*STEPS[:-1], STEPS[-1] + tokenizer.eos_token]
    assert e.info["steps"] == KINDS and e.outcome == Scored(1.0, True) and turn.reward == 1.0
    assert (e.id, e.task.meta, e.turns[0].text) == ("17/0", {"id": 17, "label": 1}, "".join(STEPS))


def test_where_steps_begin():
    assert named_steps("a\nAction 1: look", "Thought 1:") == [(0, "Thought"), (2, "Action")]
    assert named_steps("a\nAction 1: look") == [(0, "Unknown"), (2, "Action")]
    assert named_steps("\n\nThought 1:\nAction 1: look") == [(0, "Thought"), (13, "Action")]
    assert named_steps("Thought 1: so\n Action 1: not at the start of its line\u2028Action 2: nor here") == [
        (0, "Thought")
    ]
    assert named_steps("Thought 1: abcdef\nAction 1: x\nAction 1:  \nAction 12: x") == [
        (0, "Thought"), (42, "Action"),
    ]  # fmt: skip
    assert named_steps("") == [(0, "Unknown")]


def test_right_and_wrong(tmp_path):
    table = [(1, "B", True), (1, "A", False), (1, "", False), ("B", "B", True), ("12", " 12", True), (12, "12", True),
             (-1, "A", None),
             (None, "A", None), (2, "C", True), ("", "", False)]  # fmt: skip
    assert [is_right(label, pred) for label, pred, _ in table] == [right for *_, right in table]
    rows = [
        {"text": PROMPT, "label": 0, "response": ["a", "b", ""], "pred": ["A", "", ""], "id": "q"},
        {"text": PROMPT, "response": "a", "pred": "A", "id": 0},
        {"text": PROMPT, "label": 0, "response": "a", "id": 1},
    ]
    found = formats.read("react", put(tmp_path, rows), TINY).episodes
    none = Invalid("no reward in the file")
    failed = Failed("the response is empty: the call that made it failed")
    assert [e.outcome for e in found] == [Scored(1.0, True), Scored(0.0, False), failed, none, none]
    assert [e.id for e in found] == ["q/0", "q/1", "q/2", "0/0", "1/0"]
    assert [e.group for e in found[:3]] == ["q"] * 3


answers = st.lists(st.tuples(texts, st.sampled_from(["A", "B", ""])), min_size=1, max_size=3)


@FEW
@given(st.lists(st.tuples(texts, answers, st.booleans(), st.sampled_from([{}, {"label": 0}, {"label": "B"}]), more),
       min_size=1, max_size=3),
       st.sampled_from([TINY, TRAINED]))  # fmt: skip
def test_there_and_back(records, tokenizer):
    assume(all(text for text, *_ in records))
    rows = []
    for n, (text, said, listed, label, rest) in enumerate(records):
        responses, preds = [r for r, _ in said], [p for _, p in said]
        row = {"response": responses, "pred": preds} if listed else {"response": responses[0], "pred": preds[0]}
        rows.append({"text": text, **label, **row, "id": n, "inter_states": [{"state": "x", "step_id": 1}], **rest})
    for e in there_and_back("react", rows, tokenizer).episodes:
        (turn,) = e.turns
        assert len(turn.steps) == len(e.info["steps"]) and turn.steps[0][0] == 0
        assert [b for _, b in turn.steps] == [a for a, _ in turn.steps[1:]] + [len(turn.tokens)]


@pytest.mark.parametrize(
    "change, key, says",
    [
        ({"pred": ["A"]}, "pred", "must be text, not ['A']"),
        ({"response": ["a", "b"], "pred": ["A"]}, "pred", "has 1 entries for 2 responses"),
        ({"response": ["a", 3], "pred": ["A", "B"]}, "response[1]", "must be text, not 3"),
        ({"response": []}, "response", "not empty"),
        ({"id": None}, "id", "must be a whole number or a text"),
        ({"id": "16"}, "id", "is '16', as in an earlier row"),
    ],
)
def test_errors(tmp_path, change, key, says):
    path = put(tmp_path, [{**RECORD, "id": 16}, RECORD | change])
    with pytest.raises(DataError) as error:
        formats.read("react", path, TINY)
    assert str(error.value).startswith(f"{path}: key '[1].{key}': ") and says in str(error.value)
    assert len(formats.read("react", path, TINY, skip_bad=True).episodes) == 1


def test_a_reward_without_a_label_has_no_place(tmp_path):
    found = formats.read("trajectories", put(tmp_path, [{"prompt": "a", "response": "b", "reward": 1}]), TINY)
    with pytest.raises(DataError, match="needs a 'label'"):
        formats.write("react", tmp_path / "out.json", found.episodes, TINY)
    assert not (tmp_path / "out.json").exists()
