"""Plain text as a prompt: its tokens behind exactly one beginning-of-sequence token, where the tokenizer wants one.

A tokenizer that puts a BOS before every text (Llama's does) was trained with it. A prompt of plain text gets it here,
and a text that brings it along, as some published prompts do, keeps that one and no second. Conversations get theirs
from the chat template.
"""

from __future__ import annotations

import weakref
from typing import Any

from trailmark.rollout.encode import encode

_adds: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def adds_bos(tokenizer: Any) -> bool:
    """Whether this tokenizer puts a BOS before a text."""
    if not getattr(tokenizer, "bos_token", None):
        return False
    if tokenizer not in _adds:
        _adds[tokenizer] = list(tokenizer("")["input_ids"][:1]) == [tokenizer.bos_token_id]
    return _adds[tokenizer]


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a prompt that is plain text, or a `Marked` text that may have its BOS marked."""
    ids = encode(tokenizer, text)
    if not adds_bos(tokenizer) or ids[:1] == [tokenizer.bos_token_id]:
        return ids
    if text.startswith(tokenizer.bos_token):  # written out, as some published prompts have it
        ids = encode(tokenizer, text.removeprefix(tokenizer.bos_token))
    return [int(tokenizer.bos_token_id), *ids]
