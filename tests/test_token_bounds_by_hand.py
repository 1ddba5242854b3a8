"""The bound of a text in numbers: tokens for each byte, by what a tokenizer does to a text before it cuts it."""

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trailmark.models.tiny import tiny_tokenizer
from trailmark.texts import encode
from trailmark.token_bounds import EXTRA, LONGER, Bounds

ALPHABET = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
BYTES = {f"<0x{i:02X}>": i for i in range(256)} | {"▁": 256, "a": 257}
LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
SPACED = pre_tokenizers.ByteLevel(add_prefix_space=True)
FALLBACK = "fallback"


def made(normaliser=None, cutter=LEVEL, model=None):
    core = Tokenizer(models.BPE(BYTES, [], byte_fallback=True) if model == FALLBACK else models.BPE(ALPHABET, []))
    if normaliser is not None:
        core.normalizer = normaliser
    if cutter is not None:
        core.pre_tokenizer = cutter
    core.add_special_tokens([AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")


both = pre_tokenizers.Sequence
ROWS = {  # tokenizer; for each byte of a text of ASCII, and of another text
    "bytes": (made(), 1, 1),
    "a space in front": (made(cutter=SPACED), 2, 2),
    "cut first": (made(cutter=both([pre_tokenizers.Digits(True), LEVEL])), 1, 1),
    "cut in a sequence in a sequence": (made(cutter=both([both([pre_tokenizers.Punctuation()]), SPACED])), 2, 2),
    "NFC": (made(normalizers.NFC()), 1, LONGER),
    "NFKD in a sequence": (made(normalizers.Sequence([normalizers.NFD(), normalizers.NFKD()]), SPACED), 2, 2 * LONGER),
    "an empty sequence": (made(normalizers.Sequence([]), both([both([]), LEVEL])), 1, 1),
    "bytes as a last resort": (made(None, None, FALLBACK), 1, 1),
    "a sign for a space": (made(normalizers.Replace(" ", "▁"), None, FALLBACK), 4, 4),
    "a sign in front": (made(normalizers.Prepend("▁"), None, FALLBACK), 4, 4),
    "a sign by the cutter": (made(None, pre_tokenizers.Metaspace(), FALLBACK), 4, 4),
    "a sign and a normal form": (
        made(normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" ", "▁")]), None, FALLBACK), 4, 4 * LONGER,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ROWS)
def test_numbers_by_hand_and_never_too_low(kind):
    tokenizer, plain, other = ROWS[kind]
    bounds = Bounds(tokenizer)
    for text in ("a", "a b", "ab 12, c", "  a", "a\n\nb"):
        assert bounds.most(text) == plain * len(text) + EXTRA
    for text, size in (("é", 2), ("aé b", 5), ("ﷺ", 3), ("日本", 6), ("🙂", 4)):
        assert bounds.most(text) == other * size + EXTRA
    for text in ("a b", "é", "ﷺ ﷺ", "🙂 1", "\u0958", " a ▁"):
        assert 1 <= len(encode(tokenizer, text)) <= bounds.most(text)


NONE = {
    "lower case": lambda: made(normalizers.Lowercase()),
    "stripped": lambda: made(normalizers.Strip()),
    "a longer text in place of a shorter": lambda: made(normalizers.Replace("a", "bcd")),
    "nothing in place of something": lambda: made(normalizers.Replace("a", "")),
    "spaces are dropped": lambda: made(cutter=both([pre_tokenizers.Whitespace(), LEVEL])),
    "punctuation is dropped": lambda: made(cutter=both([pre_tokenizers.Punctuation("removed"), LEVEL])),
    "no bytes": lambda: made(cutter=None),
}


@pytest.mark.parametrize("kind", NONE)
def test_what_is_not_sure_has_no_number(kind):
    assert Bounds(NONE[kind]()).most("abc") is None


def test_texts_without_a_number():
    bounds = Bounds(ROWS["bytes"][0])
    for text in ("", " ", "\n\t ", "\u3000", "a</s>", "</s>", "\udc80"):
        assert bounds.most(text) is None
    assert bounds.most("</s") == 3 + EXTRA
    assert Bounds(tiny_tokenizer()).most("abc") == len("abc") + EXTRA
