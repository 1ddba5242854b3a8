"""Encode text to tokens, each line only once.

The prompts of a play repeat most of their lines, and so do menus and lessons. If a tokenizer never joins two lines, the
tokens of a text are the tokens of its lines in order, and a known line costs one look-up.

Which tokenizers never join lines? A byte-level BPE with GPT-2's pattern splits a text into words before it merges
anything. No word extends over a newline between two letters or signs (`borders`): that newline is a word of its own.
Added tokens are matched first, so none of them may continue after a newline or absorb the text around it. All other
tokenizers encode the whole text.

A text is content: a control token in it is encoded as its characters (`texts.py`).
"""

from __future__ import annotations

import re
import weakref
from typing import Any

from trailmark import texts

MOST = 1 << 16  # most lines in the cache of a tokenizer
borders = re.compile(r"(?<=\S\n)(?=\S)")

_known: weakref.WeakKeyDictionary[Any, tuple[int, dict[str, list[int]] | None]] = weakref.WeakKeyDictionary()


def encode(tokenizer: Any, text: str) -> list[int]:
    """The tokens of `text` as content. Repeated lines come from a cache."""
    if (lines := _lines(tokenizer)) is None or getattr(text, "spans", ()):
        return texts.encode(tokenizer, text)
    parts = borders.split(text)
    new = [line for line in dict.fromkeys(parts) if line not in lines]
    if new:
        if len(lines) + len(new) > MOST:
            lines.clear()
            new = list(dict.fromkeys(parts))
        whole = [texts.whole_letters(line) for line in new]
        made = tokenizer(whole, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        control = texts.controls_of(tokenizer).ids
        for line, ids in zip(new, made):
            lines[line] = ids if control.isdisjoint(ids) else texts.encode(tokenizer, line)
    return [token for line in parts for token in lines[line]]


def _lines(tokenizer: Any) -> dict[str, list[int]] | None:
    """The cache of a tokenizer (None: it may join lines). New tokens in the tokenizer give a new cache."""
    if not getattr(tokenizer, "is_fast", False):
        return None
    size = len(tokenizer)
    held = _known.get(tokenizer)
    if held is None or held[0] != size:
        held = _known[tokenizer] = (size, {} if keeps_lines_apart(tokenizer) else None)
    return held[1]


def keeps_lines_apart(tokenizer: Any) -> bool:
    """Whether the tokens of a text are those of its lines. The parts of the tokenizer decide it (see above)."""
    core = tokenizer.backend_tokenizer
    cutter = core.pre_tokenizer
    if core.normalizer is not None or type(core.model).__name__ != "BPE" or type(cutter).__name__ != "ByteLevel":
        return False
    if cutter.add_prefix_space:
        return False
    if not cutter.use_regex and any("Ċ" in t[:-1] for t in core.get_vocab(with_added_tokens=False)):
        return False
    added = tokenizer.added_tokens_decoder.values()
    return not any(t.lstrip or t.rstrip or "\n" in t.content[:-1] for t in added)
