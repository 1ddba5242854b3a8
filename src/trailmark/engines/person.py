"""A person as an engine: the person sees what a model would see and types the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from trailmark.engines.base import Completion, Engine, EngineError, Request
from trailmark.texts import encode


class PersonEngine(Engine):
    """`ask()` returns a typed line, or None if the person has left; `say(text)` shows a text. In a conversation only
    new messages are shown. Typed tokens have log-prob 0, like a script's."""

    def __init__(self, tokenizer: Any, ask: Callable[[], str | None], say: Callable[[str], None], name: str = "person"):
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
                self.say(f"That is {len(tokens)} tokens; the limit is {request.max_tokens}.\n")
                continue
            if allowed is None and request.stop_ids and len(tokens) < request.max_tokens:
                tokens += request.stop_ids[:1]
            zeros = (0.0,) * len(tokens)
            return Completion(tokens, zeros, zeros, text, "stopped")

    async def score(self, tokens: Sequence[int], start: int = 1) -> list[float]:
        raise EngineError(f"'{self.name}' is a person and cannot score tokens")
