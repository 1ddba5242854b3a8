"""Real tokenizers: `make test-data DATA_ROOT=folder` with `tokenizers/gpt2` and `tokenizers/smollm2` in it."""

import os
import string
from pathlib import Path

import pytest

pytestmark = pytest.mark.data

LABELS = [*map(str, range(200)), *string.ascii_lowercase, *string.ascii_uppercase]


@pytest.fixture(scope="module")
def root():
    place = os.environ.get("TRAILMARK_DATA")
    assert place, "set DATA_ROOT: make test-data DATA_ROOT=folder"
    return Path(place)


def tokenizer(root, name):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(root / "tokenizers" / name)


def test_labels(root):
    """All 252 labels of Reflect-RL are single tokens of GPT-2; SmolLM2, whose digits stand alone, has 62 of them."""
    from trailmark.errors import TaskError
    from trailmark.rollout.play import label_ids

    assert len(set(label_ids(tokenizer(root, "gpt2"), tuple(LABELS)))) == 252
    smol = tokenizer(root, "smollm2")
    single = [x for x in LABELS if len(smol.encode(x, add_special_tokens=False)) == 1]
    assert len(single) == 62 and len(label_ids(smol, tuple(single))) == 62
    with pytest.raises(TaskError, match="label '10' is 2 tokens"):
        label_ids(smol, ("1", "10"))


def test_chat(root):
    """SmolLM2's template extends, pad = eos, and the end of turn is trained."""
    from trailmark import chat

    smol = tokenizer(root, "smollm2")
    assert smol.pad_token_id == smol.eos_token_id == chat.end_of_turn(smol)
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello. "},
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": "4"}]  # fmt: skip
    (one,) = chat.sequences(smol, talk)
    for span, want in zip(one.spans, ("Hello. <|im_end|>", "4<|im_end|>")):
        assert smol.decode(one.tokens[span.start : span.end]) == want
    c = chat.Conversation(smol)
    c.add(talk[0])
    first, _ = c.prompt()
    assert one.tokens[: len(first)] == first
