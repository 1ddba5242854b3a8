"""The answer parser, the cleaning of responses, and the steps of ReAct solutions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trailmark.answers import Answer, leaf_value, most_common, read_answer
from trailmark.models.tiny import tiny_tokenizer
from trailmark.steps import mark_steps, react_steps, react_token_steps
from trailmark.tasks.logic.clean import STRICT, Cleaning, clean, clean_all
from trailmark.types import Episode, Scored, Task, Turn

TOKENIZER = tiny_tokenizer()


@pytest.mark.parametrize(
    ("text", "options", "letter", "why"),
    [
        ("Action 3: Finish[The answer is B.]", 4, "B", ""),
        ("Finish the task. Action 2: Finish[The answer is B.]", 4, "B", ""),  # an earlier bare word Finish
        ("Finish[The answer is B.] Because A and C are wrong.", 4, "B", ""),  # capitals behind the bracket
        ("Finish[The answer is B. Because it Does.]", 4, "B", ""),  # capitals inside other words
        ("Finish[B. B is right.]", 4, "B", ""),
        ("Finish[The answer is A and B.]", 4, "", "multiple"),
        ("Finish[The answer is A/B]", 4, "", "multiple"),
        ("Finish[The answer is E.]", 4, "", "missing"),
        ("Finish[The answer is E.]", 5, "E", ""),
        ("Finish[The answer is C.]", 2, "", "missing"),
        ("Finish[The answer is b.]", 4, "", "missing"),
        ("Finish[]", 4, "", "missing"),
        ("Finish[The answer is (D)]", 4, "D", ""),
        ("Finish[The answer is [D].]", 4, "D", ""),
        ("Finish[The answer\nis A]", 4, "A", ""),
        ("Finish[The answer is B", 4, "", "invalid"),
        ("Finish[The answer is A\nAction 2: Finish[The answer is C.]", 4, "C", ""),  # the first is not closed
        ("Finish[The answer is A.]\nAction 2: Finish[The answer is C.]", 4, "A", ""),
        ("finish[A]", 4, "", "invalid"),
        ("The answer is A.", 4, "", "invalid"),
        ("", 4, "", "invalid"),
        ("So.\n\nContext:\nNew. Finish[The answer is A.]", 4, "", "invalid"),
        ("In this Context: Finish[The answer is A.]", 4, "A", ""),  # only with a newline is it a new problem
        ("Finish[The answer is A_1.]", 4, "", "missing"),
    ],
)
def test_one_parser(text, options, letter, why):
    assert read_answer(text, options) == Answer(letter, why)


def test_the_parser_is_keyed_to_the_number_of_options():
    for options in range(2, 27):
        for k, letter in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZ"):
            found = read_answer(f"Finish[The answer is {letter}.]", options)
            assert found.index == (k if k < options else None)
    with pytest.raises(ValueError, match="2 to 26"):
        read_answer("Finish[A]", 1)


@pytest.mark.parametrize(
    ("text", "label", "want"),
    [
        ("Finish[The answer is B.]", 1, (1.0, "right")),
        ("Finish[The answer is B.]", 0, (0.0, "wrong")),
        ("Finish[The answer is A, B.]", 0, (0.0, "multiple")),
        ("Finish[none]", 0, (0.0, "missing")),
        ("", 0, (0.0, "invalid")),
        ("Finish[The answer is B.]", -1, (None, "hidden")),
    ],
)
def test_leaf_values_are_those_of_the_same_parser(text, label, want):
    assert leaf_value(text, label, 4) == want


def test_blanks_do_not_vote_and_the_first_wins_a_tie():
    assert most_common(["", "", "", "B"]) == "B"
    assert most_common(["C", "A", "A", "C", ""]) == "C"
    assert most_common(["C", "A", "A"]) == "A"
    assert most_common(["", ""]) == "" and most_common([]) == ""


FIN = "Action 2: Finish[The answer is B.]"


@pytest.mark.parametrize(
    ("raw", "plain", "strict"),
    [
        (f"so\nAction 1: look\n{FIN}", f"so\nAction 1: look\n{FIN}", f"so\nAction 1: look\n{FIN}"),
        (f"  so\n\n{FIN}\nmore\n", f"so\n\n{FIN}", f"so\n{FIN}"),
        (f"so\n{FIN}\n{FIN}", "several finishes", "several finishes"),
        (f"so\n{FIN}\n\nContext:\nnew\n{FIN}", f"so\n{FIN}", f"so\n{FIN}"),
        ("so\nContext:\nnew\n" + FIN, "no finish", "no finish"),
        ("so\nFinish[The answer is B.]", "no finish", "no finish"),  # not an Action line
        ("so\nAction 2: Finish[B]", "no finish", "no finish"),
        ("", "empty", "empty"),
        (" \n ", "empty", "empty"),
        (f"a\nThought 1: it\ngoes\n\non\n{FIN}", f"a\nThought 1: it\ngoes\n\non\n{FIN}",
         f"a\nThought 1: it goes on\n{FIN}"),
        (f"a\nThought 3:\nThought 4: ok\n{FIN}", f"a\nThought 3:\nThought 4: ok\n{FIN}", f"a\nThought 4: ok\n{FIN}"),
        (f"a\nThought 3:\nlong enough\n{FIN}", f"a\nThought 3:\nlong enough\n{FIN}",
         f"a\nThought 3: long enough\n{FIN}"),
        ("a\nAction is needed: Finish[The answer is B.]", "a\nAction is needed: Finish[The answer is B.]",
         "finish is not the last step"),
        (f"x\n{FIN}", f"x\n{FIN}", f"x\n{FIN}"),  # a first line without a name is never short
    ],
)  # fmt: skip
def test_cleaning(raw, plain, strict):
    for rules, want in ((Cleaning(), plain), (STRICT, strict)):
        found = clean(raw, rules)
        assert (found.text or found.why) == want
        assert (found.text is None) == bool(found.why)
    text, _, end = clean(raw)
    if text is not None:
        assert raw[:end].strip() == text  # where tokens can be cut


def test_min_step_counts_lines_and_reasons_are_counted():
    raw = f"first\nThought 1: second\n\n{FIN}"
    assert clean(raw, Cleaning(min_step=3)).text and clean(raw, Cleaning(min_step=4)).why == "too few steps"
    kept, dropped = clean_all([raw, "", raw, f"other\n{FIN}", "no"], Cleaning(distinct=True))
    assert kept == [(0, raw), (3, f"other\n{FIN}")] and dropped == {"empty": 1, "twice": 1, "no finish": 1}
    assert len(clean_all([raw, raw])[0]) == 2


TEXT = "Thought 1:\nAction 1: look\n\nObservation 1: a\nb c\n\n\n"
TEXT += "Thought 2: x\nAction is needed\nAction 2: y\nAction 3:  \n"


def test_react_steps_by_hand():
    steps = react_steps(TEXT)
    assert [(s.kind, TEXT[s.start : s.end]) for s in steps] == [
        ("Thought", "Thought 1:"),  # never short
        ("Action", "Action 1: look"),
        ("Observation", "Observation 1: a\nb c"),
        ("Thought", "Thought 2: x\nAction is needed"),  # no number, so no step of its own
    ]  # "Action 2: y" has four characters behind the word, "Action 3:" two
    assert react_steps("before\nThought 1: abc")[0][:2] == (7, 21)
    assert react_steps("") == [] and react_steps("no steps\nat all") == []
    two = react_steps("Thought 1:\nThought 1:\nThought 1: abc")
    assert [s.start for s in two] == [0, 22]  # of two short "Thought 1:" the first counts


def test_the_prompt_may_open_the_first_step():
    said = " I look\nat it.\nAction 1: go on"
    for prompt in ("Options:\nA. x\n\nThought 1:", "Thought 1: "):
        assert [(said[a:b], kind) for a, b, kind in react_steps(said, prompt)] == [
            (" I look\nat it.", "Thought"), ("Action 1: go on", "Action"),
        ]  # fmt: skip
    assert [s.kind for s in react_steps(said, "Say what you think.")] == ["Action"]
    assert react_steps("\nAction 1: go on", "Thought 1:") == [(1, 16, "Action")]  # nothing was thought


@given(st.lists(st.sampled_from(["Thought 1: ab", "Action 2: cde", "word é", "", "Observation 3:", "x→"]), max_size=7))
def test_token_ends_are_the_ends_of_the_text(lines):
    text = "\n".join(lines)
    tokens = (*TOKENIZER.encode(text), TOKENIZER.eos_token_id)
    spans, kinds = react_token_steps(TOKENIZER, tokens, text)
    steps = react_steps(text)
    assert kinds == tuple(s.kind for s in steps)
    for (a, b), step in zip(spans, steps):
        assert TOKENIZER.decode(tokens[:b]) == text[: step.end]  # the text up to the end is the step's prefix
        assert TOKENIZER.decode(tokens[a:b]) == text[step.start : step.end]


def test_tokens_that_reach_over_a_border_and_tokens_that_encode_otherwise():
    words = tiny_tokenizer([".\n", "d\nAct", "Thought 1:"])
    text = "Thought 1: so.\nThought 2: good\nAction 2: x now"
    tokens = (*words.encode(text), words.eos_token_id)
    spans, _ = react_token_steps(words, tokens, text)
    assert [words.decode(tokens[a:b]) for a, b in spans] == [
        "Thought 1: so.\n",  # the token with the last character
        "Thought 2: goo",  # "d\nAct" ends in the next step and belongs to it
        "d\nAction 2: x now",
    ]
    other = (*TOKENIZER.encode(text + "é"), words.eos_token_id)  # what a model may have drawn
    assert list(other[:-1]) != words.encode(text + "é")
    spans, _ = react_token_steps(words, other, text + "é")
    assert [words.decode(other[a:b]) for a, b in spans] == ["Thought 1: so.", "Thought 2: good", "Action 2: x nowé"]


def test_marked_steps_count_from_the_written_tokens():
    enc = lambda s: tuple(TOKENIZER.encode(s))
    prompt, state, more = "Q?\n\nThought 1:", " I look.\nAction 1: go", " on there.\nAction 2: Finish[The answer is A.]"
    turn = Turn("policy", enc(prompt), enc(more), forced=enc(state), text=state + more)
    e = Episode("e", Task("t"), "g", (turn,), {"self": Scored(1.0)})
    (marked,) = mark_steps(e, "policy", TOKENIZER, "react").turns
    assert [TOKENIZER.decode(marked.tokens[a:b]) for a, b in marked.steps] == [
        " on there.", "Action 2: Finish[The answer is A.]",
    ]  # fmt: skip
