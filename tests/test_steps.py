"""Reasoning steps are cut in one place: texts by delimiters, ReAct by its words, tokens by where they end."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trailmark.models.tiny import tiny_tokenizer
from trailmark.steps import (
    LINES,
    SENTENCES,
    mark_steps,
    react_steps,
    split_steps,
    step_spans,
    step_types,
    token_borders,
    token_steps,
)
from trailmark.types import Episode, Scored, Task, Turn

TOKENIZER = tiny_tokenizer()


@pytest.mark.parametrize(
    ("text", "newline", "sentence"),
    [
        ("a\nb", ["a\n", "b"], ["a\n", "b"]),
        ("a\n\n\nb\n", ["a\n\n\n", "b\n"], ["a\n\n\n", "b\n"]),
        ("\n\na\nb", ["\n\na\n", "b"], ["\n\na\n", "b"]),
        ("It is 3.5. So $x=2.$ Done.", ["It is 3.5. So $x=2.$ Done."], ["It is 3.5. ", "So $x=2.$ ", "Done."]),
        ("One. Two.\nThree. ", ["One. Two.\n", "Three. "], ["One. ", "Two.\n", "Three. "]),
        ("3.5", ["3.5"], ["3.5"]),
        ("", [], []),
    ],
)
def test_split_steps(text, newline, sentence):
    for ends, want in ((LINES, newline), (SENTENCES, sentence)):
        assert split_steps(text, ends) == want and "".join(want) == text


def test_steps_of_questions_and_answers():
    """The form of the math runs: each question and each answer is a step, with its further lines."""
    text = " How many are there?\nAnswer 1: Two and two.\nSo four.\n\nSubQuestion 2: And then?\n"
    text += "Answer 2: x\nAction 1: none"
    found = react_steps(text, "Q\nSubQuestion 1:", "questions")
    assert [(s.kind, text[s.start : s.end]) for s in found] == [
        ("SubQuestion", " How many are there?"), ("Answer", "Answer 1: Two and two.\nSo four."),
        ("SubQuestion", "SubQuestion 2: And then?"), ("Answer", "Answer 2: x\nAction 1: none"),
    ]  # fmt: skip
    assert react_steps(text) == react_steps(text, "Q\nSubQuestion 1:")  # ReAct has other names
    assert [text[s.start : s.end] for s in react_steps(text)] == ["Action 1: none"]
    turn = Turn("policy", tuple(TOKENIZER("Q\nSubQuestion 1:").input_ids), tuple(TOKENIZER(text).input_ids), text=text)
    e = mark_steps(Episode("e", Task("t"), "g", (turn,), {"self": Scored(1.0)}), "policy", TOKENIZER, "questions")
    assert step_types(e, 0, TOKENIZER) == ["SubQuestion", "Answer", "SubQuestion", "Answer"]
    assert TOKENIZER.decode(e.turns[0].tokens[slice(*e.turns[0].steps[1])]) == "Answer 1: Two and two.\nSo four."


def plainly(text, ends):
    """Letter by letter: a step ends with a delimiter. Then blank pieces are joined to their neighbours."""
    pieces, piece = [], ""
    for letter in text:
        piece += letter
        if piece.endswith(tuple(ends)):
            pieces, piece = [*pieces, piece], ""
    steps = []
    for part in [*pieces, *([piece] if piece else [])]:
        if steps and (not part.strip() or not steps[-1].strip()):
            steps[-1] += part
        else:
            steps.append(part)
    return steps


@given(st.text("a.$ \n3", max_size=24), st.sampled_from([LINES, SENTENCES]))
def test_steps_are_those_of_a_loop_over_letters(text, ends):
    assert split_steps(text, ends) == plainly(text, ends) and "".join(split_steps(text, ends)) == text
    behind = {LINES: r"(?<=\n)", SENTENCES: r"(?<=\n)|(?<=\. )|(?<=\.\$ )"}[ends]
    assert {b for _, b in step_spans(text, ends)} <= {m.end() for m in re.finditer(behind, text)} | {len(text)}


def test_a_token_belongs_to_the_step_in_which_it_ends():
    assert token_borders([2, 5, 6, 9], [5, 6, 7]) == [2, 3, 3]  # the token from 6 to 9 reaches over 7


def test_steps_are_spans_of_the_tokens_that_are_there():
    text = "one\ntwo. three\n\nfour"
    tokens = (*TOKENIZER.encode(text), TOKENIZER.eos_token_id)
    spans = token_steps(TOKENIZER, tokens, text, SENTENCES)
    assert [TOKENIZER.decode(tokens[a:b]) for a, b in spans] == ["one\n", "two. ", "three\n\n", "four<|im_end|>"]
    words = tiny_tokenizer(["\n\n", "o\nt"])  # tokens that reach over a border belong to the step in which they end
    odd = (*words.encode("a\n\nb"), words.eos_token_id)
    assert [words.decode(odd[a:b]) for a, b in token_steps(words, odd, "a\n\nb")] == ["a\n\n", "b<|im_end|>"]
    over = (*words.encode("go\nto"), words.eos_token_id)
    assert [words.decode(over[a:b]) for a, b in token_steps(words, over, "go\nto")] == [
        "g",
        "o\nto<|im_end|>",
    ]
    # Other tokens for the same text (as a model may have drawn them): found by decoding, never by encoding again.
    bytes_only = (*TOKENIZER.encode("a\n\nb"), words.eos_token_id)
    assert bytes_only != odd
    assert [words.decode(bytes_only[a:b]) for a, b in token_steps(words, bytes_only, "a\n\nb")] == [
        "a\n\n",
        "b<|im_end|>",
    ]


def test_auto_looks_at_the_prompt():
    def play(prompt):
        turn = Turn("policy", tuple(TOKENIZER.encode(prompt)), tuple(TOKENIZER.encode("A. B.\nC")), text="A. B.\nC")
        return Episode("e", Task("t"), "g", (turn,), {"self": Scored(1.0)})

    spans = lambda prompt, split: len(mark_steps(play(prompt), "policy", TOKENIZER, split).turns[0].steps)
    assert spans("put it in \\boxed{}", "auto") == 3 and spans("after ####", "auto") == 2
    assert spans("after ####", "sentence") == 3 and spans("x", "turn") == 0
    marked = mark_steps(play("x"), "policy", TOKENIZER, "newline")
    assert mark_steps(marked, "policy", TOKENIZER, "sentence") == marked  # steps that are there stay
