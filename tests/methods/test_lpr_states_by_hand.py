"""Corners of LPR's states: what is cut, taken, valued, labelled, replayed and rewarded, on a few letters each."""

import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from trailmark.errors import DataError, ModelError
from trailmark.formats.turns import Reader, Starts, plain
from trailmark.methods.lpr import pairs as lpr_pairs
from trailmark.methods.lpr import states as lpr_states
from trailmark.methods.lpr.config import LprClean, LprComplete, LprLabels, LprRead, LprStates
from trailmark.methods.lpr.states import Example
from trailmark.models.tiny import tiny_tokenizer
from trailmark.score import classes
from trailmark.steps import mark_steps, without_end
from trailmark.types import Annotation, Episode, Failed, Parent, Scored, Task, Turn

WORDS = tiny_tokenizer()
EOS = WORDS.eos_token_id


def turn(text, prompt="p\n", **more):
    return replace(plain(Reader(WORDS, "policy", Starts()), prompt, text), **more)


def solution(name, text, right=True, group="g", prompt="p\n"):
    e = Episode(name, Task(group), group, (turn(text, prompt),), {"self": Scored(float(right), right)})
    return without_end(mark_steps(e, "policy", WORDS, "newline"), "policy", WORDS)


def cleaned(e, clean=None, **more):
    return lpr_states.clean_all([e], LprClean(**more), WORDS, "policy", lambda e: "shown\n", clean)


# --- cleaning --------------------------------------------------------------------------------------------------------


def test_a_turn_is_cut_only_where_its_own_tokens_say_the_text():
    t = turn("ab\nc", logp=(-1.0,) * 5)
    cut = lpr_states.cut_turn(t, "ab", WORDS)
    assert (cut.tokens, cut.text, cut.logp, cut.stop) == ((*t.tokens[:2], EOS), "ab", (), "stopped")
    assert lpr_states.cut_turn(t, "b", WORDS) is None and lpr_states.cut_turn(t, "abc", WORDS) is None
    assert lpr_states.cut_turn(replace(t, prompt=()), "ab", WORDS) is None
    joined = tiny_tokenizer(["b\nc"])  # one token reaches over the border
    over = replace(t, tokens=(*joined("ab\nc", add_special_tokens=False)["input_ids"], EOS))
    assert len(over.tokens) == 3 and lpr_states.cut_turn(over, "ab", joined) is None
    begun = replace(t, tokens=t.tokens[:-1], stop="length")
    assert lpr_states.cut_turn(begun, "ab", WORDS).tokens == (*t.tokens[:2], EOS)  # it ends now


def test_a_blank_behind_the_prompt_stays():
    e = solution("e", " ab\nc", prompt="Thought 1:")
    ((made,), _) = cleaned(e, lambda text: text.strip().split("\n")[0])
    assert made.turns[0].text == " ab" and made.turns[0].tokens == (*e.turns[0].tokens[:3], EOS)


@pytest.mark.parametrize(
    ("said", "why"), [(None, "not clean"), ("  ", "not clean"), ((None, "no end"), "no end"), (("", ""), "not clean")]
)
def test_why_a_cleaner_left_something_out(said, why):
    assert cleaned(solution("e", "a\nb"), lambda text: said) == ([], Counter({why: 1}))


def test_an_answer_without_turns_or_steps():
    e = solution("e", "a\nb")
    assert cleaned(replace(e, turns=())) == ([], {"empty": 1})
    assert cleaned(e, split="react")[1] == {}  # steps that are there stay
    bare = replace(e, turns=(turn("a\nb"),))
    assert cleaned(bare, split="react") == ([], {"no steps": 1})
    assert cleaned(bare, min_steps=3) == ([], {"too short": 1}) and len(cleaned(bare, min_steps=2)[0]) == 1
    with pytest.raises(DataError) as found:
        cleaned(replace(bare, turns=bare.turns * 2), lambda text: "a")
    assert str(found.value) == (
        "episode 'e' has 2 turns: only an answer of one turn can be cleaned or encoded anew."
    )


def test_equal_answers_of_other_questions_are_kept():
    same = [solution("a", "x\ny"), solution("b", "x\ny"), solution("c", "x\ny", group="h")]
    good, out = lpr_states.clean_all(same, LprClean(distinct=True), WORDS, "policy", lambda e: "", None)
    assert [e.id for e in good] == ["a", "c"] and out == {"the same as another solution": 1}


# --- states and values -----------------------------------------------------------------------------------------------


def test_the_window_of_states_by_enumeration():
    """Of n states those from floor(start n) to floor(end n) are taken; the last step is never one."""
    for steps in range(1, 6):
        e = solution("e", "\n".join("abcdef"[:steps]))
        for start in (0.0, 0.2, 0.5, 0.9):
            for end in (0.0, 0.4, 0.75, 1.0):
                s = LprStates(start=start, end=end, ratio=1.0)
                (found,) = lpr_states.sample_states([e], s, WORDS, "policy", 0)
                n = steps - 1
                assert [x["step"] for x in found] == [k for k in range(n) if int(n * start) <= k < int(n * end)]
                assert all(x["token"] == 2 * (x["step"] + 1) for x in found)


def test_shards_hold_whole_questions_in_order():
    many = [solution(f"{q}/{i}", "a\nb", group=f"q{q}") for q in range(7) for i in range(2)]
    for n in range(1, 10):
        shards = lpr_states.sample_states(many, LprStates(start=0, ratio=1, shards=n), WORDS, "policy", 0)
        groups = [sorted({x["episode"].split("/")[0] for x in shard}) for shard in shards]
        assert sum(groups, []) == [str(q) for q in range(7)] and len(shards) == n
        assert max(map(len, groups)) - min(map(len, groups)) <= 1
        assert [x["index"] for shard in shards for x in shard] == [0, 1] * 7


def test_no_states_of_another_seat_and_of_episodes_that_are_not_there():
    e = solution("e", "a\nb\nc")
    assert lpr_states.sample_states([e], LprStates(start=0, ratio=1), WORDS, "teacher", 0) == [[]]
    (states,) = lpr_states.sample_states([e], LprStates(start=0, ratio=1), WORDS, "policy", 0)
    assert [(p.episode.id, p.turn, p.token) for p in lpr_states.points_of(states, [e])] == [("e", 0, 2), ("e", 0, 4)]
    with pytest.raises(DataError) as found:
        lpr_states.points_of(states, [])
    assert str(found.value) == "a state is of episode 'e', which is not among the solutions."


def completion(j, text, outcome, token=2):
    t = turn(text)
    return Episode(f"c{j}", Task("g"), "c", (t,), {"self": outcome}, parent=Parent("e", 0, token))


def test_more_completions_than_k_and_other_states_completions():
    """A failed call is no completion. The first k of the others count: a value is never above k."""
    e = solution("e", "a\nb\nc")
    (states,) = lpr_states.sample_states([e], LprStates(start=0, end=0.5, ratio=1), WORDS, "policy", 0)
    wins = [Scored(1.0, True), Failed("x"), Scored(0.5), Scored(0.0), Scored(1.0, False)]
    made = [completion(j, f"{j}", o) for j, o in enumerate(wins)] + [completion(9, "z", Scored(1.0, True), token=4)]
    value = lambda **c: lpr_states.state_values(states, [e], made, LprComplete(**c), WORDS)
    assert value(n=4) == ({("e", 0, 2): 2}, {}) and value(n=1)[0] == {("e", 0, 2): 1}
    assert value(n=5) == ({}, {"fewer than 5 completions": 1})
    assert value(n=4, min_chars=1)[0] == {("e", 0, 2): 2}  # the step "a" has one letter
    assert value(n=4, min_chars=2) == ({}, {"a last step that says too little": 1})
    silent = replace(made[0], turns=())
    assert lpr_states.written(silent, WORDS) == "" and lpr_states.written(made[0], WORDS) == "0"
    assert lpr_states.written(replace(made[0], turns=(Turn("p", (), (), text=" x "),)), WORDS) == "x"


# --- examples --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "wanted"), [((0, 1), 1), ((0, 0, 1), 0), ((1, 2), 2), ((3, 0), 2), ((3, 3, 2), 3), ((2,), 2)]
)
def test_equal_texts_have_their_mean_and_halves_go_up(labels, wanted):
    out = Counter()
    found = [Example(f"e{i}", 0, 0, x, True, ("g", "a")) for i, x in enumerate(labels)]
    other = Example("o", 0, 0, 3, True, ("h", "a"))  # the same words of another question
    one, two = lpr_states.one_of_each([*found, other], out)
    assert (one.episode, one.label) == ("e0", wanted) and two == other
    assert out["equal texts"] == len(labels) - 1 and out["equal texts with different labels"] == (len({*labels}) > 1)


def test_both_sides_are_as_large_as_the_smaller_one():
    found = [Example(f"e{i}", 0, 0, 1, i % 4 == 0, ("g", str(i))) for i in range(12)]
    out = Counter()
    kept = lpr_states.balanced(found, random.Random(0), out)
    assert len(kept) == 6 and sum(x.right for x in kept) == 3 and out["more of one kind than of the other"] == 6
    assert kept == [x for x in found if x in kept]
    assert lpr_states.balanced([x for x in found if x.right], random.Random(0), Counter()) == []


def test_labels_of_several_turns_and_seats():
    """Each turn of the seat ends with the label of the whole; turns of others have none."""
    one, two = solution("e", "a\nb").turns[0], solution("e", "c\nd").turns[0]
    e = Episode("e", Task("g"), "g", (one, replace(one, seat="other"), two), {"self": Scored(1.0, True)})
    notes = [Annotation("e", "value", "step", (1.0, -1.0), 0), Annotation("e", "value", "step", (2.0, -1.0), 2)]
    found, _ = lpr_states.examples([e], notes, 3, LprLabels(), WORDS, "policy", 0)
    assert [(x.turn, x.step, x.label, x.text[1]) for x in found] == [
        (0, 0, 1, "a\n"), (0, 1, 3, "a\nb"), (2, 0, 2, "c\n"), (2, 1, 3, "c\nd"),
    ]  # fmt: skip
    used, made = lpr_states.label_notes(found, [e])
    assert used == [e] and [(a.turn, a.values) for a in made] == [(0, (1.0, 3.0)), (2, (2.0, 3.0))]
    assert lpr_states.label_notes([], [e]) == ([], [])


def test_a_replay_of_other_annotations_is_empty():
    e = solution("e", "a\nb")
    notes = [Annotation("e", "value", "step", (1.0, 2.0), 0), Annotation("e", "label", "step", (-1.0, -1.0), 0)]
    assert lpr_states.replayed([e], notes, 1.0, random.Random(0), "r:")[2] == 0
    both = [Annotation("e", "label", "step", (1.0, 0.0), 0)]
    (again,), (kept,), n = lpr_states.replayed([e], both, 1.0, random.Random(0), "r:")
    assert n == 2 and (again.id, kept.episode, kept.values) == ("r:e", "r:e", (1.0, 0.0))
    assert again.turns == e.turns


# --- rewards ---------------------------------------------------------------------------------------------------------


def test_classes_come_back_in_the_order_of_their_numbers():
    """Class 10 stands behind class 9, not behind class 1."""
    table = np.arange(24.0).reshape(2, 12)
    notes = classes.output_notes({("e", 0): table, ("e", 1): table[:1] + 1}, "m")
    random.Random(0).shuffle(notes)
    back = classes.outputs_of([*notes, Annotation("e", "advantage", "token", (1.0,), 0)])
    assert back["e", 0].tolist() == table.tolist() and back["e", 1].tolist() == (table[:1] + 1).tolist()
    assert len(back) == 2 and classes.outputs_of([]) == {}


def test_numbers_of_steps():
    out = np.array([[0.0, math.log(3)], [math.log(4), 0.0]])
    number = lambda **r: lpr_pairs.step_numbers(out, LprRead(**r))
    assert number() == pytest.approx([0.75, 0.2]) and number(classes=[0]) == pytest.approx([0.25, 0.8])
    assert number(classes=[0, 1]) == pytest.approx([1.0, 1.0])
    assert number(raw=True) == [math.log(3), 0.0] and number(raw=True, classes=[0]) == [0.0, math.log(4)]
    assert lpr_pairs.step_numbers(np.array([0.5, 2.0]), LprRead(classes=[7], raw=True)) == [0.5, 2.0]
    with pytest.raises(DataError) as found:
        number(classes=[0, 2])
    assert str(found.value) == "read.classes has 2, and the scores are of classes 0 to 1."


def test_a_reward_over_all_turns():
    """Steps 0.5 and 0.4 of one turn and 0.2 of another; the turn of the other seat was not scored."""
    one, two = solution("e", "a\nb").turns[0], solution("e", "c").turns[0]
    e = Episode("e", Task("g"), "g", (one, replace(one, seat="other"), two), {"self": Scored(1.0)})
    outputs = {("e", 0): np.array([0.5, 0.4]), ("e", 2): np.array([0.2])}
    read = lambda **r: lpr_pairs.solution_rewards([e], outputs, LprRead(**r), WORDS)["e"]
    wanted = {"product": 0.04, "min": 0.2, "mean": 1.1 / 3, "last": 0.2, "sum": 1.1, "geomean": 0.04 ** (1 / 3)}
    for over, number in wanted.items():
        assert read(over=over) == pytest.approx(number, abs=1e-12)
    assert read(offset=1, over="sum") == 0.5  # the last step of each turn takes no part
    with pytest.raises(ModelError, match="a geometric mean needs numbers that are not negative, and one is -0.5"):
        lpr_pairs.solution_rewards([e], {("e", 2): np.array([-0.5])}, LprRead(over="geomean"), WORDS)
