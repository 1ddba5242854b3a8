"""How much of a file is shown."""

import pytest

from trailmark.errors import TaskError
from trailmark.models.tiny import tiny_tokenizer
from trailmark.tasks.auto_explore.contents import NotText, decode, first_tokens, kind_of, limits


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.py", "code"), ("A.PY", "code"), ("x.ipynb", "code"), ("t.tsv", "data"), ("b.c.md", "text"),
    ("run.sh", "shell"),
     ("a.bin", ""), ("Makefile", ""), (".py", ""), ("py", "")],
)  # fmt: skip
def test_kinds(name, kind):
    assert kind_of(name) == kind


def test_lines_are_cut_by_kind():
    text = "".join(f"{i}\n" for i in range(30))
    assert limits().cut(text, "code") == (text, "")
    assert limits().cut(text, "data") == ("0\n1\n2\n3\n4\n", "(cut: the first 5 lines are shown)")
    assert limits().cut("0\n1\n2\n3\n4\n", "data") == ("0\n1\n2\n3\n4\n", "")
    assert limits().cut("0\n1\n2\n3\n4\n5", "data")[0] == "0\n1\n2\n3\n4\n"
    assert limits({"code": 2}).cut(text, "code")[0] == "0\n1\n"


def test_without_tokenizer_a_token_is_four_bytes():
    assert first_tokens("abcdefghij", 2, None) == "abcdefgh"
    assert first_tokens("abcdeféé", 2, None) == "abcdefé"
    assert first_tokens("abcdefgéé", 2, None) == "abcdefg"  # half a letter is not shown
    assert limits(tokens=2).cut("abcdefghij", "text") == ("abcdefgh", "(cut: the first 2 tokens are shown)")


def test_tokens_are_those_of_the_tokenizer():
    bytewise = tiny_tokenizer(["cdcdcd"])
    assert first_tokens("abcdcdcdef", 3, bytewise) == "abcdcdcd"
    assert first_tokens("abcdcdcdef", 5, bytewise) == "abcdcdcdef"
    assert first_tokens("abéé", 3, bytewise) == "ab"  # é is two tokens: one of them would be half a letter
    assert first_tokens("ab" * 1000, 3, bytewise) == "aba"


def test_a_very_wide_token_is_one_token():
    wide = "x" * 300
    assert first_tokens(wide + "abc", 2, tiny_tokenizer([wide])) == wide + "a"


class Slow:
    """A tokenizer without offsets."""

    is_fast = False

    def encode(self, text, add_special_tokens=True):
        return list(text)

    def decode(self, ids):
        return "".join(ids)


def test_slow_tokenizers_count_too():
    assert first_tokens("abcdef", 4, Slow()) == "abcd"


def test_decode():
    assert decode(b"\xef\xbb\xbfa\r\nb\rc\n", False) == "a\nb\nc\n"
    assert decode("aé".encode()[:-1], True) == "a"
    for data, why in (
        (b"a\0b", "is a binary file"),
        (b"\xff\xfe", "is not UTF-8"),
        ("aé".encode()[:-1], "is not UTF-8"),
    ):
        with pytest.raises(NotText, match=why):
            decode(data, False)


@pytest.mark.parametrize(
    ("lines", "tokens", "why"),
    [({"kode": 3}, 5, "no kind 'kode'. Did you mean 'code'"), ({"code": 0}, 5, "at least 1, not 0"),
     ({}, {"text": "many"}, "at least 1, not 'many'"), ({}, 0, "max_tokens of 'code'")],
)  # fmt: skip
def test_limits_that_cannot_be(lines, tokens, why):
    with pytest.raises(TaskError, match=why):
        limits(lines, tokens)
