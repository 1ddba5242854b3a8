"""A bound is never below the tokens that a text has."""

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trailmark import chat
from trailmark.models.tiny import tiny_tokenizer
from trailmark.texts import encode
from trailmark.token_bounds import Bounds

TEXTS = [
    "a b  c", "größer", "ﷺﷺ", "\u0958\u0958", "日本語", "🙂🙂", "x = 3;\n\treturn", "the the", ". . .", "\u00a0x",
    "é" * 9,
]  # fmt: skip


def wrapped(core, **more):
    core.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", bos_token="<s>", **more)


def bytewise(normaliser, cutter=None):
    core = Tokenizer(models.BPE())
    core.normalizer = normaliser
    words = pre_tokenizers.ByteLevel(add_prefix_space=True)
    core.pre_tokenizer = words if cutter is None else pre_tokenizers.Sequence([cutter, words])
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    core.train_from_iterator(["the cat", "the dog"], trainer)
    return wrapped(core)


def fallback():
    letters = ["▁", "a", "b", "c", "t", "h", "e"]
    vocab = {f"<0x{i:02X}>": i for i in range(256)} | {c: 256 + i for i, c in enumerate(letters)}
    core = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return wrapped(core)


def words():
    core = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return wrapped(core)


def drops():
    return bytewise(None, pre_tokenizers.Split(" ", "removed"))


BOUNDED = {
    "tiny": tiny_tokenizer,
    "none": lambda: bytewise(None),
    "nfc": lambda: bytewise(normalizers.NFC()),
    "nfkc": lambda: bytewise(normalizers.Sequence([normalizers.NFKC()])),
    "digits": lambda: bytewise(None, pre_tokenizers.Digits(True)),
    "fallback": fallback,
}


@pytest.mark.parametrize("kind", BOUNDED)
def test_a_text_has_at_most_so_many_tokens_and_at_least_one(kind):
    tokenizer, draw = BOUNDED[kind](), random.Random(0)
    bounds = Bounds(tokenizer)
    for _ in range(200):
        text = "".join(draw.choice(TEXTS) for _ in range(draw.randrange(1, 6)))
        most = bounds.most(text)
        assert most is not None and 1 <= len(encode(tokenizer, text)) <= most
    for text in ("", " \n", "a<|im_end|>" if kind == "tiny" else "a</s>"):
        assert bounds.most(text) is None


@pytest.mark.parametrize("make", [words, drops, lambda: bytewise(normalizers.Replace("a", "long"))])
def test_other_tokenizers_have_no_bound(make):
    assert Bounds(make()).most("abc") is None


REWRITES = (  # drops old thoughts, trims, and wants roles that alternate
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('order') }}{% endif %}"
    "<{{ m.role }}>{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content | trim }}{% endif %}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize("template", ["own", None])
def test_a_conversation_has_at_most_so_many_tokens(template):
    tokenizer, draw = BOUNDED["none"](), random.Random(1)
    tokenizer.chat_template = REWRITES
    bounds, sure = chat.ChatBounds(tokenizer, template), 0
    for n in range(200):
        roles = ("user", "assistant") * draw.randrange(1, 4) if n % 5 else ("user", "user", "assistant")
        odd = ["<think>so</think>yes", " a", "a "]
        talk = [{"role": r, "content": draw.choice(TEXTS[:9] + odd * (n % 3 == 0))} for r in roles]
        most = bounds.most(talk)
        if most is None:
            assert n % 5 == 0 or any(m["content"] in odd for m in talk)
            continue
        sure += 1
        assert max(len(s.tokens) for s in chat.sequences(tokenizer, talk, template=template)) <= most
    assert sure > 80
    assert bounds.most([{"role": "user", "content": "a", "id": 1}, {"role": "assistant", "content": "b"}]) is None
