"""Plain text as a prompt: its tokens after exactly one beginning-of-sequence (BOS) token, if the tokenizer uses one.

Some tokenizers put a BOS before every text (Llama's does), and their models were trained with it. A plain-text prompt
gets its BOS here. A text that already begins with a BOS, as some published prompts do, gets no second one.
Conversations get theirs from the chat template.
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
    """The tokens of a plain-text prompt, or of a `Marked` text that may contain a marked BOS."""
    ids = encode(tokenizer, text)
    if not adds_bos(tokenizer) or ids[:1] == [tokenizer.bos_token_id]:
        return ids
    if text.startswith(tokenizer.bos_token):  # the text contains the BOS, as some published prompts do
        ids = encode(tokenizer, text.removeprefix(tokenizer.bos_token))
    return [int(tokenizer.bos_token_id), *ids]
