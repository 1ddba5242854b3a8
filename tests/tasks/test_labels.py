import os
import random
from pathlib import Path

import pytest
import torch

from trailmark.errors import ModelError, TaskError
from trailmark.models.tiny import tiny_tokenizer
from trailmark.tasks.labels import (
    CHOICES,
    NEXT_PAGE,
    PREVIOUS_PAGE,
    Page,
    add_labels,
    alphabet,
    check_labels,
    pages,
    shuffled,
)


def test_choices():
    assert len(CHOICES) == 252 and len(set(CHOICES)) == 252
    assert CHOICES[:2] == ("0", "1") and CHOICES[199:202] == ("199", "a", "b") and CHOICES[-1] == "Z"


def test_alphabet_of_bytes_and_of_words():
    letters = (*"0123456789", *CHOICES[200:])
    assert alphabet(tiny_tokenizer()) == letters
    assert alphabet(tiny_tokenizer(["17", "199"])) == (*letters[:10], "17", "199", *letters[10:])


class Unknowing:
    """One token for everything."""

    def encode(self, text, add_special_tokens=True):
        return [0] * len(text.split("\n")) if text != "\n" else [0]

    def decode(self, ids):
        return "<unk>"


class Glueing(Unknowing):
    """A tokenizer that joins a newline with what follows."""

    def encode(self, text, add_special_tokens=True):
        return [len(text)]

    def decode(self, ids):
        return "a"


@pytest.mark.parametrize("tokenizer", [Unknowing(), Glueing()])
def test_a_tokenizer_without_labels_is_refused(tokenizer):
    with pytest.raises(TaskError, match="has 0 of the 252 labels as single tokens, and 3 are needed"):
        alphabet(tokenizer)


@pytest.mark.parametrize(
    ("labels", "why"),
    [
        (("a", "b", "a"), "label 'a' is listed twice"),
        (("a", "b"), "2 labels are too few"),
        (("a", "b c", "d"), "label 'b c' cannot be used"),
        (("a", "1.", "d"), "label '1.' cannot be used"),
        (("a", "", "d"), "label '' cannot be used"),
        (("a", 3, "d"), "label 3 cannot be used"),
    ],
)
def test_labels_that_cannot_be_used(labels, why):
    with pytest.raises(TaskError, match=why):
        check_labels(labels)


def test_one_page_where_all_fit():
    assert pages(["x", "y"], "abc") == (Page(("a", "b"), ("x", "y")),)
    assert pages(["x", "y", "z"], "abc") == (Page(("a", "b", "c"), ("x", "y", "z")),)
    assert pages([], "abc") == (Page((), ()),)


def test_pages_lead_to_one_another():
    first, second, third = pages("12345", "abcd")
    assert first == Page(("a", "b", "d"), ("1", "2", NEXT_PAGE))
    assert second == Page(("a", "b", "c", "d"), ("3", "4", PREVIOUS_PAGE, NEXT_PAGE))
    assert third == Page(("a", "c"), ("5", PREVIOUS_PAGE))


@pytest.mark.parametrize("n", [1, 61, 62, 63, 120, 121, 500])
def test_pages_hold_every_action_once(n):
    actions = [f"cat {i}" for i in range(n)]
    made = pages(actions, CHOICES[:62])
    assert [a for p in made for a in p.actions if a not in (NEXT_PAGE, PREVIOUS_PAGE)] == actions
    assert all(len(set(p.labels)) == len(p.labels) == len(p.actions) <= 62 for p in made)


def test_pages_of_too_few_labels():
    with pytest.raises(TaskError, match="3 actions do not fit 2 labels"):
        pages("123", "ab")


def test_shuffled_labels_come_from_the_whole_alphabet():
    draw, seen = random.Random(0), dict.fromkeys(CHOICES, 0)
    for _ in range(2520):
        drawn = shuffled(CHOICES, 10, draw)
        assert len(set(drawn)) == 10
        for label in drawn:
            seen[label] += 1
    # 100 expected of each; chi-square with 251 degrees of freedom is below 320 with probability 0.998, and drawing
    # without replacement only narrows it
    assert sum((k - 100) ** 2 / 100 for k in seen.values()) < 320
    assert sorted(shuffled("abc", 10, draw)) == ["a", "b", "c"]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_added_labels_are_tokens_of_tokenizer_and_model(make_lm, family):
    lm = make_lm(family)
    before, rows = lm.vocab, lm.base.get_input_embeddings().weight.detach().clone()
    new = add_labels(lm)
    assert new == CHOICES[10:200] and alphabet(lm.tokenizer) == CHOICES
    assert lm.vocab == before + 190 == len(lm.tokenizer)
    after = lm.base.get_input_embeddings().weight.detach()
    assert torch.equal(after[:before], rows)
    ids = {w: lm.tokenizer.encode(w, add_special_tokens=False)[0] for w in ("1", "2", "12", "21")}
    mean = (rows[ids["1"]] + rows[ids["2"]]) / 2
    for word in ("12", "21"):
        assert 0 < float((after[ids[word]] - mean).norm()) < float(mean.norm())
    assert not torch.equal(after[ids["12"]], after[ids["21"]])
    assert add_labels(lm) == () and lm.vocab == before + 190
    lm.check_output_layer()


def test_added_labels_leave_numbers_inside_words_alone(make_lm):
    lm = make_lm()
    old = lm.tokenizer.encode("x2017 v17b", add_special_tokens=False)
    add_labels(lm)
    assert lm.tokenizer.encode("x2017 v17b", add_special_tokens=False) == old
    assert len(lm.tokenizer.encode("17. cd src\n", add_special_tokens=False)) == 1 + len(". cd src\n")


def test_labels_are_not_added_under_a_lora_of_the_output_layer(make_lm):
    from peft import LoraConfig, get_peft_model

    lm = make_lm()
    lm.model = get_peft_model(lm.model, LoraConfig(r=2, target_modules=["lm_head"], task_type="CAUSAL_LM"))
    with pytest.raises(ModelError, match="cannot be added under a LoRA"):
        add_labels(lm)


@pytest.mark.data
@pytest.mark.parametrize(("name", "count"), [("gpt2", 252), ("smollm2", 62)])
def test_real_alphabets(name, count):
    from transformers import AutoTokenizer

    root = os.environ.get("TRAILMARK_DATA")
    assert root, "set TRAILMARK_DATA to the folder of data"
    assert len(alphabet(AutoTokenizer.from_pretrained(Path(root) / "tokenizers" / name))) == count
