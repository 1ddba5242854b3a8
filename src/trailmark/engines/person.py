"""A person in the place of a model: shown what a model would be shown, and asked for a line."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from trailmark.engines.base import Completion, EngineError, Request
from trailmark.texts import encode


class PersonEngine:
    """`ask()` gives a typed line, None when the person has left; `say(text)` shows something. Of a conversation only what is new is
    shown. What is typed has log-prob 0, as a script's words have."""

    def __init__(
        self, tokenizer: Any, ask: Callable[[], str | None], say: Callable[[str], None], name: str = "person"
    ):
        self.tokenizer, self.ask, self.say, self.name, self.version = tokenizer, ask, say, name, 0
        self._shown: tuple[int, ...] = ()

    async def sample(self, request: Request) -> list[Completion]:
        old = self._shown
        new = request.prompt[len(old) :] if old and request.prompt[: len(old)] == old else request.prompt
        self._shown = request.prompt
        self.say(self.tokenizer.decode(new, skip_special_tokens=True))
        return [await self._answer(request) for _ in range(request.n)]

    async def _answer(self, request: Request) -> Completion:
        while True:
            line = await asyncio.to_thread(self.ask)
            if line is None:
                raise EngineError("the person has left")
            text = line.rstrip("\r\n")
            tokens = tuple(encode(self.tokenizer, text))
            allowed = request.law.allowed
            if allowed is not None and not (len(tokens) == 1 and tokens[0] in allowed):
                self.say(f"One of these: {' '.join(self.tokenizer.decode([t]) for t in allowed)}\n")
                continue
            if len(tokens) > request.max_tokens:
                self.say(f"That is {len(tokens)} tokens, and {request.max_tokens} are the most.\n")
                continue
            if allowed is None and request.stop_ids and len(tokens) < request.max_tokens:
                tokens += request.stop_ids[:1]
            zeros = (0.0,) * len(tokens)
            return Completion(tokens, zeros, zeros, text, "stop")

    async def score(self, tokens: Sequence[int], start: int = 1) -> list[float]:
        raise EngineError(f"'{self.name}' is a person, who has no probabilities to score with")
