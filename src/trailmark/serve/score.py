"""/v1/score: which tokens are to be scored, from which on."""

from __future__ import annotations

from typing import Any

from trailmark.chat import sequences
from trailmark.serve.body import ScoreBody, encoded, listed
from trailmark.serve.errors import ApiError
from trailmark.types import Tokens


def score_rows(body: ScoreBody, tokenizer: Any) -> list[tuple[Tokens, int]]:
    """(tokens, first scored) of every row. Lists pair up; one prompt may have many completions."""
    if body.tokens is not None:
        return [(tuple(row), body.start) for row in listed(body.tokens)]
    assert body.completion is not None
    completions = listed(body.completion)
    if body.messages is not None:
        told = [m.plain() for m in body.messages]
        return [spoken(told, c, tokenizer) for c in completions]
    prompts = listed(body.prompt or "")
    if len(prompts) == 1:
        prompts = prompts * len(completions)
    if len(prompts) != len(completions):
        raise ApiError(400, f"{len(prompts)} prompts and {len(completions)} completions do not pair up.", "completion")
    rows = []
    for p, c in zip(prompts, completions):
        before = encoded(p, tokenizer, body.add_special_tokens)
        if not before:
            raise ApiError(400, "an empty prompt: a first token has no probability; begin with a BOS, say.", "prompt")
        rows.append((before + encoded(c, tokenizer), len(before)))
    return rows


def spoken(messages: list[dict[str, Any]], said: Any, tokenizer: Any) -> tuple[Tokens, int]:
    """What the assistant would have written to say this, without the end of its turn."""
    if not isinstance(said, str):
        raise ApiError(400, "behind messages a completion is a text.", "completion")
    template = "own" if getattr(tokenizer, "chat_template", None) else None
    told = [*messages, {"role": "assistant", "content": said}]
    for row in sequences(tokenizer, told, template=template):
        if row.spans[-1].message == len(messages):
            span = row.spans[-1]
            return row.tokens[: span.end - 1], span.start
    raise ApiError(400, "the chat template does not show the completion.", "completion")
