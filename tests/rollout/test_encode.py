"""A text encoded by its lines has the tokens of the whole text, or is encoded whole."""

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trailmark.models.tiny import tiny_tokenizer
from trailmark.rollout import encode as lines

PIECES = ["a", "Is", " it", "'s", "'re", " 17", "17", "12.", ",", " #", " # Action:\n", "\n", "\n\n", " \n", "\n ",
          "\r\n", "\t", "  ", "é", "漢字", "\u2028", "\x1c", "<|im_end|>", "...", "-", "🙂",
          "\n# Head\n", "\n- "]  # fmt: skip


def texts(n=400):
    draw = random.Random(3)
    return ["".join(draw.choice(PIECES) for _ in range(draw.randrange(1, 30))) for _ in range(n)]


def trained(**cutter):
    """A BPE with merges, some of them of newlines."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, **cutter)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator(texts(2000), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")


def whole(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)


@pytest.mark.parametrize("make", [tiny_tokenizer, lambda: tiny_tokenizer([" # Action:\n", "17", "Is it"]), trained])
def test_lines_have_the_tokens_of_the_text(make):
    tokenizer = make()
    assert lines.keeps_lines_apart(tokenizer)
    for text in texts():
        assert lines.encode(tokenizer, text) == whole(tokenizer, text), repr(text)
        assert lines.encode(tokenizer, text) == whole(tokenizer, text)


def test_a_tokenizer_that_joins_lines_gets_the_whole_text():
    joining = trained(use_regex=False)
    assert not lines.keeps_lines_apart(joining) and not lines.keeps_lines_apart(tiny_tokenizer(["x\ny"]))
    greedy = tiny_tokenizer()
    greedy.add_tokens([AddedToken("<mask>", lstrip=True)])
    assert not lines.keeps_lines_apart(greedy)
    end = joining.eos_token_id  # this one learnt to write its own end from letters: such a text is broken up
    assert end in whole(joining, "a<|im_end|>")
    for text in texts(60):
        found = lines.encode(joining, text)
        assert end not in found and joining.decode(found) == text
        assert end in whole(joining, text) or found == whole(joining, text)


@pytest.mark.parametrize("make", [tiny_tokenizer, trained, lambda: trained(use_regex=False)])
def test_halves_of_characters_null_bytes_and_endless_lines(make):
    tokenizer = make()
    assert lines.encode(tokenizer, "a\ud800b\nc\udfff") == whole(tokenizer, "a\ufffdb\nc\ufffd")
    assert tokenizer.decode(lines.encode(tokenizer, "a\x00b\n\x00")) == "a\x00b\n\x00"
    long = "<|im_end|>" * 2000 + "x" * 20000
    found = lines.encode(tokenizer, long)
    assert tokenizer.eos_token_id not in found and tokenizer.decode(found) == long


def test_new_tokens_are_noticed_and_memory_is_bounded(monkeypatch):
    tokenizer = tiny_tokenizer()
    assert len(lines.encode(tokenizer, "17. go\n")) == 7
    tokenizer.add_tokens(["17"])
    assert len(lines.encode(tokenizer, "17. go\n")) == 6
    monkeypatch.setattr(lines, "MOST", 3)
    for k in range(9):
        assert lines.encode(tokenizer, f"a{k}\nb{k}\na{k}\n") == whole(tokenizer, f"a{k}\nb{k}\na{k}\n")
        assert len(lines._known[tokenizer][1]) <= 3


@pytest.mark.data
@pytest.mark.parametrize("name", ["gpt2", "smollm2"])
def test_real_tokenizers(name, real_tokenizer):
    tokenizer = real_tokenizer(name)
    assert lines.keeps_lines_apart(tokenizer)
    for text in texts(2000):
        assert lines.encode(tokenizer, text) == whole(tokenizer, text), repr(text)
