import json

import numpy as np
import pytest
from format_files import BOS, FEW, TINY, TRAINED, exactly, more, put, say, take, texts, there_and_back
from hypothesis import given
from hypothesis import strategies as st

from trailmark import formats
from trailmark.engines.scripted import ScriptedEngine
from trailmark.errors import DataError
from trailmark.rollout.play import Seat, play, solo
from trailmark.samples import build_samples
from trailmark.tasks.base import Observation, Step
from trailmark.types import Annotation, Invalid, Scored, Task

ITEM = {
    "conversations": [
        {"from": "human", "value": "hi"},
        {"from": "gpt", "value": "yo", "score": "0.9900"},
        {"from": "human", "value": "so?"},
        {"from": "gpt", "value": "bye", "score": 1},
    ]
}


def read(tmp_path, rows, **options):
    return formats.read("sharegpt", put(tmp_path, rows), TINY, **options)


def test_by_hand(tmp_path):
    found = read(tmp_path, [{**ITEM, "score": 7}, ITEM], seat="strategist", prefix="a-")
    first, second = found.episodes
    assert [say(t.prompt) for t in first.turns] == [
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
        "\n<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n",
    ]
    assert [say(t.tokens) for t in first.turns] == ["yo<|im_end|>", "bye<|im_end|>"]
    assert [(t.seat, t.continues, t.text, t.stop, t.reward) for t in first.turns] == [
        ("strategist", None, "yo", "stopped", 0.0),
        ("strategist", 0, "bye", "stopped", 7.0),
    ]
    assert (first.id, second.id, first.group, second.group) == ("a-0/0", "a-0/1", "a-0", "a-0")  # one start
    assert (first.outcome, second.outcome) == (Scored(7.0), Invalid("no reward in the file"))
    assert found.annotations[:2] == [
        Annotation("a-0/0", "score", "turn", (0.99,), 0, "sharegpt"),
        Annotation("a-0/0", "score", "turn", (1.0,), 1, "sharegpt"),
    ]
    (sample,) = build_samples(found.episodes[:1], "strategist", mean="turn")
    assert say(sample.tokens[sample.streams["weight"] > 0]) == "yo<|im_end|>bye<|im_end|>"
    np.testing.assert_allclose(sorted(set(sample.streams["weight"])), [0, 1 / 8, 1 / 6])  # two turns of 4 and 3 tokens


messages = st.lists(
    st.tuples(texts, texts, st.sampled_from([None, "0.50", "1", 0.25, 2, "missing"])), min_size=1, max_size=3
)


@FEW
@given(
    st.lists(st.tuples(messages, st.sampled_from([{}, {"score": "0.7"}, {"score": 3}, {"location": [1]}]), more),
    min_size=1, max_size=3),
    st.sampled_from([TINY, TRAINED, BOS]),
)  # fmt: skip
def test_there_and_back(items, tokenizer):
    rows = []
    for talk, known, rest in items:
        said = []
        for asked, answered, score in talk:
            said.append({"from": "human", "value": asked, "score": None} | rest)
            said.append({"from": "gpt", "value": answered} | ({} if score == "missing" else {"score": score}))
        rows.append({"conversations": said, **known, **rest})
    found = there_and_back("sharegpt", rows, tokenizer)
    scores = [s for talk, _, _ in items for _, _, s in talk]
    assert [a.values[0] for a in found.annotations] == [float(s) for s in scores if s not in (None, "missing")]
    assert [t.text for e in found.episodes for t in e.turns] == [a for talk, _, _ in items for _, a, _ in talk]


def test_other_speakers_keep_their_names():
    said = [
        ("system", "s"),
        ("human", "q"),
        ("function_call", "f(1)"),
        ("observation", "2"),
        ("gpt", "two"),
        ("human", "!"),
    ]
    found = there_and_back("sharegpt", [{"conversations": [{"from": f, "value": v} for f, v in said]}])
    assert [t.text for t in found.episodes[0].turns] == ["f(1)", "two"]
    assert "<|im_start|>tool\n2<|im_end|>" in say(found.episodes[0].turns[1].prompt)


def test_a_new_score_is_written_as_text(tmp_path):
    found = read(tmp_path, [ITEM])
    marks = [Annotation("0/0", "score", "turn", (0.125,), 0), Annotation("0/0", "other", "turn", (9.0,), 1)]
    formats.write("sharegpt", tmp_path / "out.json", found.episodes, TINY, annotations=marks)
    (item,) = take(tmp_path / "out.json")
    assert [m.get("score") for m in item["conversations"]] == [None, "0.125", None, 1]
    assert (tmp_path / "out.json").read_text().startswith('[\n    {\n        "conversations": [\n')


class Echo:
    """A world that repeats what it hears, thrice."""

    name, markov = "echo", False

    def tasks(self, split="train", n=None, seed=0):
        return [Task("e0"), Task("e1")]

    def make(self):
        return Echo()

    def reset(self, task):
        self.heard = 0
        return Observation(f"start {task.id}\n")

    def step(self, action):
        self.heard += 1
        over = self.heard == 3
        return Step(Observation(f"<{action}> [é"), 0.5 * over, over, False, Scored(0.5) if over else None)


@pytest.mark.parametrize("budget", [64, 5])  # with and without an end of turn
def test_what_was_played_is_trained_on_as_it_was_seen(tmp_path, budget):
    engine = ScriptedEngine(lambda prompt, draw: f"  say {draw.random()} ", TINY)
    played = play(Echo(), Echo().tasks(), [Seat("policy", engine, max_tokens=budget)], solo(chat=True))
    formats.write("sharegpt", tmp_path / "out.json", played, TINY)
    back = formats.read("sharegpt", tmp_path / "out.json", TINY).episodes
    assert [e.outcome for e in back] == [Scored(0.5), Scored(0.5)]
    for a, b in zip(played, back):
        assert [t.text for t in a.turns] == [t.text for t in b.turns]
        assert [a.context(i) for i in range(3)] == [b.context(i) for i in range(3)]
        if budget == 64:
            assert a.sequence(2) == b.sequence(2)


def test_what_was_no_conversation_is_refused(tmp_path):
    engine = ScriptedEngine(lambda prompt, draw: "a", TINY)
    played = play(Echo(), Echo().tasks()[:1], [Seat("policy", engine)], solo(markov=True))
    with pytest.raises(DataError, match="turn 0 is not part of a conversation"):
        formats.write("sharegpt", tmp_path / "out.json", played, TINY)
    assert list(tmp_path.iterdir()) == []


def edited(change):
    item = json.loads(json.dumps(ITEM))
    change(item)
    return item


@pytest.mark.parametrize(
    "change, key, says",
    [
        (lambda i: i["conversations"][1].update(score="high"), "[1].conversations[1].score",
        "must be a finite number, not 'high'"),
        (lambda i: i["conversations"][1].update(score="nan"), "[1].conversations[1].score", "finite"),
        (lambda i: i["conversations"][0].update(score=1), "[1].conversations[0].score", "on a message from 'human'"),
        (lambda i: i["conversations"][0].update({"from": "humans"}), "[1].conversations[0].from",
        "Did you mean 'human'?"),
        (lambda i: i["conversations"][1].update(value=3), "[1].conversations[1].value", "must be text, not 3"),
        (lambda i: i["conversations"][1].pop("value"), "[1].conversations[1].value", "is missing. Found: from, score"),
        (lambda i: i["conversations"][1].update(scores=i["conversations"][1].pop("score")),
        "[1].conversations[1].scores", "Did you mean 'score'?"),
        (lambda i: i.update(conversation=i.pop("conversations")), "[1].conversation", "Did you mean 'conversations'?"),
        (lambda i: i.update(conversations=[]), "[1].conversations", "not empty"),
        (lambda i: i.update(score=[1]), "[1].score", "finite number"),
        (lambda i: i.update(system="be nice"), "[1].system", "as a message from 'system'"),
        (lambda i: i["conversations"].__delitem__(slice(1, None)), "[1]", "no message of the assistant"),
        (lambda i: i["conversations"].__delitem__(0), "[1]", "needs a message before"),
    ],
)  # fmt: skip
def test_errors_and_skipping(tmp_path, change, key, says):
    rows = [ITEM, edited(change), ITEM]
    with pytest.raises(DataError) as error:
        read(tmp_path, rows)
    assert says in str(error.value) and str(error.value).startswith(f"{tmp_path / 'in.json'}: key '{key}': ")
    found = read(tmp_path, rows, skip_bad=True)
    assert [e.id for e in found.episodes] == ["0/0", "0/1"] and len(found.skipped) == 1 and says in found.skipped[0]
    formats.write("sharegpt", tmp_path / "out.json", found.episodes, TINY, annotations=found.annotations)
    assert exactly(take(tmp_path / "out.json")) == exactly([ITEM, ITEM])
