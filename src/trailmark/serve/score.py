"""/v1/score: which tokens are to be scored, from which on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trailmark.serve.body import ScoreBody, encoded, listed
from trailmark.serve.errors import ApiError
from trailmark.serve.prompt_format import PromptFormat
from trailmark.types import Tokens


def score_rows(body: ScoreBody, tokenizer: Any, prompt_format: PromptFormat) -> Iterator[tuple[Tokens, int]]:
    """(tokens, first scored) of every row. Lists pair up; one prompt may have many completions."""
    if body.tokens is not None:
        return ((tuple(row), body.start) for row in listed(body.tokens))
    assert body.completion is not None
    completions = listed(body.completion)
    if body.messages is not None:
        messages = [m.plain() for m in body.messages]
        return (prompt_format.with_answer(tokenizer, messages, c) for c in completions)
    prompts = listed(body.prompt or "")
    if len(prompts) == 1:
        prompts = prompts * len(completions)
    if len(prompts) != len(completions):
        raise ApiError(400, f"{len(prompts)} prompts and {len(completions)} completions do not pair up.", "completion")
    return (_pair(p, c, tokenizer, body.add_special_tokens) for p, c in zip(prompts, completions))


def _pair(prompt: Any, completion: Any, tokenizer: Any, specials: bool) -> tuple[Tokens, int]:
    if not (before := encoded(prompt, tokenizer, specials)):
        raise ApiError(400, "an empty prompt: a first token has no probability; begin with a BOS, say.", "prompt")
    return before + encoded(completion, tokenizer), len(before)
