"""LPR's states, values and examples on hand-made solutions, and on a solver whose true values are known."""

import json
import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from trailmark import formats
from trailmark.errors import DataError
from trailmark.methods.lpr import pairs as lpr_pairs
from trailmark.methods.lpr import states as lpr_states
from trailmark.methods.lpr.config import LprClean, LprComplete, LprLabels, LprRead, LprStates
from trailmark.models.tiny import tiny_tokenizer
from trailmark.score import classes
from trailmark.types import Annotation, Episode, Failed, Invalid, Parent, Scored, Turn

WORDS = tiny_tokenizer()


@pytest.fixture
def solutions(tmp_path):
    """Four solutions of two questions, three steps each."""

    def make(rows):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(dict(zip(("prompt", "response", "reward"), row))) + "\n" for row in rows))
        return formats.read("trajectories", path, WORDS).episodes

    return make


ROWS = [("p\n", "a\nb\nend", 1), ("p\n", "a\nc\nend", 0), ("q\n", "d\ne\nend", 1), ("q\n", "f\ng\nend", 0)]


def cleaned(episodes, clean=None, **more):
    return lpr_states.clean_all(episodes, LprClean(**more), WORDS, "policy", lambda e: "shown\n", clean)


def test_cleaning_keeps_counts_and_cuts_without_encoding_again(solutions):
    rows = [*ROWS, ("q\n", "d\ne\nend", 1), ("q\n", "x", 1)]
    episodes = solutions(rows)
    episodes.append(replace(episodes[0], id="f", outcomes={"self": Failed("no server")}))
    episodes.append(replace(episodes[0], id="i", outcomes={"self": Invalid("no reward in the file")}))
    episodes.append(replace(episodes[0], id="e", turns=(replace(episodes[0].turns[0], text=" \n"),)))
    good, out = cleaned(episodes, min_steps=2, distinct=True)
    assert [e.id for e in good] == ["0/0", "0/1", "1/0", "1/1"]
    assert out == {
        "failed": 1,
        "not judged (no reward in the file)": 1,
        "empty": 1,
        "too short": 1,
        "the same as another solution": 1,
    }
    turn = good[0].turns[0]
    assert [WORDS.decode(turn.tokens[a:b]) for a, b in turn.steps] == ["a\n", "b\n", "end"]
    assert turn.tokens == episodes[0].turns[0].tokens and turn.tokens[-1] == WORDS.eos_token_id

    first_two = lambda text: None if text.startswith("f") else text[: text.index("\n", 2)]
    good, out = cleaned(episodes[:4], first_two)
    assert out == {"not clean": 1} and [e.turns[0].text for e in good] == ["a\nb", "a\nc", "d\ne"]
    turn, was = good[0].turns[0], episodes[0].turns[0]
    assert turn.tokens == (*was.tokens[:3], WORDS.eos_token_id) and turn.stop == "stopped" and turn.prompt == was.prompt
    joined, _ = cleaned(episodes[:1], lambda text: text.replace("\n", " ", 1))  # another text: it is encoded as such
    assert WORDS.decode(joined[0].turns[0].tokens[:-1]) == "a b\nend" and len(joined[0].turns[0].steps) == 2
    assert WORDS.decode(joined[0].turns[0].prompt) == "shown\n"


def test_a_cleaner_may_say_why(solutions):
    from trailmark.tasks.logic.clean import clean

    said = ["Thought 1: so\nAction 1: Finish[The answer is A.]\nContext:\nmore", "Thought 1: so\nAction 1: look",
            "Action 1: Finish[The answer is A.]\nAction 2: Finish[The answer is B.]"]  # fmt: skip
    good, out = cleaned(solutions([("q\n", text, 1) for text in said]), clean, split="react")
    assert out == {"no finish": 1, "several finishes": 1}
    (turn,) = good[0].turns
    assert turn.text == "Thought 1: so\nAction 1: Finish[The answer is A.]" and turn.tokens[-1] == WORDS.eos_token_id
    steps = [WORDS.decode(turn.tokens[a:b]) for a, b in turn.steps]
    assert steps == ["Thought 1: so", "Action 1: Finish[The answer is A.]"]


def test_answers_of_a_chat_server_are_encoded_in_tokens_of_the_policy(solutions):
    e = solutions(ROWS)[0]
    said = replace(e, turns=(Turn("teacher", (), (1, 2), text="a\nb\nend", reward=1.0, action="a\nb\nend"),))
    (made,), _ = cleaned([said])
    turn = made.turns[0]
    assert (turn.seat, WORDS.decode(turn.prompt), WORDS.decode(turn.tokens[:-1])) == ("policy", "shown\n", "a\nb\nend")
    assert turn.action == "a\nb\nend" and turn.reward == 1.0 and len(turn.steps) == 3
    with pytest.raises(DataError, match="has 2 turns"):
        cleaned([replace(said, turns=said.turns * 2)])


def test_which_states_are_taken(solutions):
    """A solution of four steps has three states. All of them with ratio 1, none with 0; shares are rounded down."""
    good, _ = cleaned(solutions([("p\n", "a\nb\nc\nend", 1), ("q\n", "d\nend", 0), ("r\n", "x\ny\nend", 0)]))

    def take(**switches):
        found = lpr_states.sample_states(
            good, LprStates(**{"start": 0.0, "ratio": 1.0, **switches}), WORDS, "policy", 0
        )
        return [[(x["episode"], x["step"], x["index"]) for x in shard] for shard in found]

    every = [("0/0", 0, 0), ("0/0", 1, 1), ("0/0", 2, 2), ("1/0", 0, 0), ("2/0", 0, 0), ("2/0", 1, 1)]
    assert take() == [every] and take(ratio=0.0) == [[]]
    assert take(start=0.4)[0] == [("0/0", 1, 0), ("0/0", 2, 1), ("1/0", 0, 0), ("2/0", 0, 0), ("2/0", 1, 1)]
    assert take(end=0.7)[0] == [("0/0", 0, 0), ("0/0", 1, 1), ("2/0", 0, 0)]
    assert take(min_steps=3)[0] == [x for x in every if x[0] != "1/0"] and take(min_steps=5) == [[]]
    shards = take(shards=2)
    assert sum(shards, []) == every and [len({x[0] for x in s}) for s in shards] == [
        1,
        2,
    ]  # by question, at most one more
    assert [len({x[0] for x in s}) for s in take(shards=5)] == [0, 1, 0, 1, 1]
    tokens = [s["token"] for s in lpr_states.sample_states(good, LprStates(start=0, ratio=1), WORDS, "policy", 0)[0]]
    assert tokens == [2, 4, 6, 2, 2, 4]


def test_coins_are_of_the_seed_and_the_solution_alone(solutions):
    rows = [(f"{k}\n", "Thought 1: a\nAction 1: b\nObservation 1: c\n" * 4 + "end", 1) for k in range(60)]
    good, _ = cleaned(solutions(rows))

    def take(seed=0, episodes=good, **switches):
        found = lpr_states.sample_states(episodes, LprStates(start=0, **switches), WORDS, "policy", seed)
        return {(x["episode"], x["step"]) for shard in found for x in shard}

    base = take(ratio=0.3)
    n, p = 60 * 12, 0.3
    assert abs(len(base) - n * p) < 4 * math.sqrt(n * p * (1 - p))
    assert take(ratio=0.3) == base != take(1, ratio=0.3)
    assert take(ratio=0.3, remove_action=True) == {(e, s) for e, s in base if s % 3 != 1}
    assert take(ratio=0.3, types=["Thought", "Observation"]) == take(ratio=0.3, remove_action=True)
    assert take(ratio=0.3, types=["Action"]) == {(e, s) for e, s in base if s % 3 == 1}
    assert take(ratio=0.3, end=0.5) == {(e, s) for e, s in base if s < 6}
    assert take(episodes=good[30:], ratio=0.3) == {(e, s) for e, s in base if int(e.split("/")[0]) >= 30}
    assert base < take(ratio=0.6)


def test_values_count_right_completions_and_discard_what_they_must(solutions):
    good, _ = cleaned(solutions(ROWS))
    states = lpr_states.sample_states(good, LprStates(start=0, ratio=1), WORDS, "policy", 0)[0]
    assert len(states) == 8
    wins = {
        ("0/0", 0): (1, 1, 0),
        ("0/0", 1): (1, 1, 1),
        ("0/1", 0): (0, 0, 0),
        ("0/1", 1): (0, "unjudged", 1),
        ("1/0", 0): (1, 0, 0),
        ("1/0", 1): (1, 1, "empty"),
        ("1/1", 0): (1, 0, "same"),
        ("1/1", 1): (1, 0, None),
    }
    completions = []
    for s in states:
        for j, win in enumerate(wins[s["episode"], s["step"]]):
            text = {"empty": " ", "same": "0"}.get(win, str(j))
            tokens = tuple(WORDS(text, add_special_tokens=False)["input_ids"])
            odd = {None: Failed("x"), "unjudged": Invalid("x")}
            outcome = odd.get(win) or Scored(float(win == 1), win == 1)
            completions.append(
                Episode(
                    f"{s['episode']}>{s['token']}/{j}",
                    good[0].task,
                    "g",
                    (Turn("policy", (1,), tokens, text=text),),
                    {"self": outcome},
                    parent=Parent(s["episode"], 0, s["token"]),
                )
            )
    count = lambda **c: lpr_states.state_values(states, good, completions, LprComplete(**c), WORDS)
    values, out = count()
    assert {(e, t): v for (e, _, t), v in values.items()} == {
        ("0/0", 2): 2,
        ("0/0", 4): 3,
        ("0/1", 2): 0,
        ("1/0", 2): 1,
        ("1/1", 2): 1,
    }
    assert out == {"fewer than 3 completions": 2, "an empty completion": 1}
    values, out = count(duplicates="discard")
    assert len(values) == 4 and out["two equal completions"] == 1
    assert count(min_chars=2) == ({}, Counter({"a last step that says too little": 5, **count()[1]}))
    notes = lpr_states.value_notes(count()[0], good, "policy")
    assert [(a.episode, a.values) for a in notes] == [
        ("0/0", (2, 3, -1)),
        ("0/1", (0, -1, -1)),
        ("1/0", (1, -1, -1)),
        ("1/1", (1, -1, -1)),
    ]
    with pytest.raises(DataError, match="does not say which state"):
        lpr_states.state_values(states, good, [good[0]], LprComplete(), WORDS)


NOTES = [
    Annotation("0/0", "value", "step", (2, 3, -1), 0),
    Annotation("0/1", "value", "step", (1, 0, -1), 0),
    Annotation("1/0", "value", "step", (1, -1, -1), 0),
]


def labels(good, notes=NOTES, **s):
    found, out = lpr_states.examples(good, notes, 3, LprLabels(**s), WORDS, "policy", 0)
    used, made = lpr_states.label_notes(found, good)
    assert [e.id for e in used] == [a.episode for a in made]
    return {a.episode: a.values for a in made}, {k: n for k, n in out.items() if n}


def test_examples(solutions):
    """Both solutions of p begin with a: valued 2 and 1, it is one example of 1.5, which is 2. Whole ones are 3 or 0."""
    good, _ = cleaned(solutions(ROWS))
    assert labels(good, full=False)[0] == {"0/0": (2, 3, -1), "0/1": (-1, 0, -1), "1/0": (1, -1, -1)}
    assert labels(good) == (
        {"0/0": (2, 3, 3), "0/1": (-1, 0, 0), "1/0": (1, -1, 3), "1/1": (-1, -1, 0)},
        {"equal texts": 1, "equal texts with different labels": 1},
    )
    assert labels(good, binary=True)[0] == {"0/0": (1, 1, 1), "0/1": (-1, 0, 0), "1/0": (1, -1, 1), "1/1": (-1, -1, 0)}
    made, out = labels(good, balance=True)
    right = [v for e in ("0/0", "1/0") for v in made.get(e, ()) if v >= 0]
    wrong = [v for e in ("0/1", "1/1") for v in made.get(e, ()) if v >= 0]
    assert len(right) == len(wrong) == 3 and out["more of one kind than of the other"] == 2
    assert labels(good, balance=True) == (made, out)


def test_replay(solutions):
    good, _ = cleaned(solutions(ROWS))
    found, _ = lpr_states.examples(good, NOTES, 3, LprLabels(), WORDS, "policy", 0)
    used, made = lpr_states.label_notes(found, good)
    assert len(found) == 8
    for ratio, n in ((0.0, 0), (0.1, 0), (0.34, 2), (0.5, 4), (1.0, 8)):
        again, notes, size = lpr_states.replayed(used, made, ratio, random.Random(1), "old:")
        assert size == n == sum(v >= 0 for a in notes for v in a.values)
        assert [e.id for e in again] == [a.episode for a in notes] and all(e.id.startswith("old:") for e in again)
        known = {f"old:{a.episode}": a.values for a in made}
        assert all(v in (-1, known[a.episode][i]) for a in notes for i, v in enumerate(a.values))


def test_rewards_of_solutions(solutions):
    """Logits 0, 0, ln 2, ln 5 give {2, 3} the probability 7/9; 0, 0, 0, 0 give 1/2."""
    good, _ = cleaned(solutions([("p\n", "Thought 1: a\nAction 1: b\nend", 1), ("p\n", "x\nend", 0)]))
    high, even = [0.0, 0.0, math.log(2), math.log(5)], [0.0] * 4
    outputs = {("0/0", 0): np.array([high, even, high])}
    notes = classes.output_notes(outputs, "m")
    assert [a.name for a in notes] == ["class_0", "class_1", "class_2", "class_3"]
    assert classes.outputs_of(notes)["0/0", 0] == pytest.approx(outputs["0/0", 0])
    reward = lambda **r: lpr_pairs.solution_rewards(good, outputs, LprRead(**{"classes": [2, 3], **r}), WORDS)
    a = 7 / 9
    assert reward() == {"0/0": pytest.approx(a * a / 2)} and reward(over="min") == {"0/0": pytest.approx(0.5)}
    assert reward(skip=["Action"]) == {"0/0": pytest.approx(a * a)} and reward(over="last") == {"0/0": pytest.approx(a)}
    assert reward(offset=1) == {"0/0": pytest.approx(a / 2)} and reward(offset=3) == {}  # no step takes part: no reward
    assert reward(over="geomean", skip=["Action", "Thought"]) == {"0/0": pytest.approx(a)}
    assert reward(classes=[3], over="last") == {"0/0": pytest.approx(5 / 9)}
    assert reward(classes=[1, 2, 3], over="last") == {"0/0": pytest.approx(8 / 9)}
    assert reward(raw=True, over="sum") == {"0/0": pytest.approx(2 * math.log(5))}
    with pytest.raises(DataError, match="read.classes has 4"):
        reward(classes=[4])
    single = classes.outputs_of(classes.output_notes({("0/0", 0): np.array([0.5, 0.25, 0.5])}, "m"))
    assert lpr_pairs.solution_rewards(good, single, LprRead(), WORDS) == {"0/0": 0.0625}
