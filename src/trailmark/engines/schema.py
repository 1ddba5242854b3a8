"""JSON of a given schema from a model in this process: before each token, those are left out with which the text could
not become such JSON any more. The grammars are those of `llguidance` (extra `schema`)."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import numpy as np

from trailmark.engines.base import SchemaError
from trailmark.types import Tokens

KEPT = 64  # grammars that are kept
LETTERS, COUNT = 1 << 16, 10_000  # larger schemas, and larger bounds in them, take the library's memory
FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as json.dumps writes


class Guide:
    """One text: which tokens may come next."""

    def __init__(self, matcher: Any, vocab: int, ends: Tokens):
        self.matcher, self.vocab, self.ends = matcher, vocab, list(ends)

    def allowed(self) -> np.ndarray:
        """[V]: True for tokens that may come next. An end is allowed when the JSON is complete."""
        import llguidance.numpy as masks  # type: ignore[missing-import]

        bits = masks.allocate_token_bitmask(1, self.vocab)
        masks.fill_next_token_bitmask(self.matcher, bits)
        out = np.unpackbits(bits.view(np.uint8)[0], bitorder="little")[: self.vocab].astype(bool)
        if self.matcher.is_error():  # a limit of the library: the text ends as it is
            out[:] = False
        out[self.ends] = self.matcher.is_error() or self.matcher.is_accepting()
        return out

    def take(self, token: int) -> None:
        if token not in self.ends:
            self.matcher.consume_token(token)


class Schemas:
    """The grammars of schemas for one tokenizer, whose model knows `vocab` tokens."""

    def __init__(self, tokenizer: Any, vocab: int):
        self.tokenizer, self.vocab = tokenizer, vocab
        self._words: Any = None
        self._matcher = lru_cache(KEPT)(self._made)

    def guide(self, schema: str, ends: Tokens) -> Guide:
        """A guide for a new text of a JSON schema. `ends` are the tokens that end a text."""
        return Guide(self._matcher(schema).deep_copy(), self.vocab, ends)

    def check(self, schema: str) -> None:
        """Refuse a schema that cannot be kept to."""
        self._matcher(schema)

    def _made(self, schema: str) -> Any:
        try:
            from llguidance import LLMatcher, LLParserLimits  # type: ignore[missing-import]
            from llguidance.hf import from_tokenizer  # type: ignore[missing-import]
        except ImportError:
            raise SchemaError("a JSON schema needs llguidance: pip install 'trailmark[schema]'.") from None
        try:
            if self._words is None:
                self._words = from_tokenizer(self.tokenizer, self.vocab)
            _must_be_small(read := json.loads(schema))
            grammar = LLMatcher.grammar_from_json_schema(read, overrides=FORM)
            matcher = LLMatcher(self._words, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
            Guide(matcher, self.vocab, ()).allowed()  # the slowest mask, computed once: copies know it
            (begun := matcher.deep_copy()).consume_tokens(begun.compute_ff_tokens())
            if why := begun.get_error():
                raise ValueError(why.removesuffix("<non-verbose/>"))
            return matcher
        except (ValueError, RuntimeError) as problem:
            why = " ".join(str(problem).split())[:200].rstrip(".")
            raise SchemaError(f"this JSON schema cannot be kept to: {why}.") from None


def _must_be_small(schema: Any) -> None:
    if len(json.dumps(schema)) > LETTERS:
        raise ValueError(f"it has more than {LETTERS} letters")
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            for key in ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"):
                if isinstance(part.get(key), int | float) and part[key] > COUNT:
                    raise ValueError(f"{key} {part[key]} is more than {COUNT}")
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
