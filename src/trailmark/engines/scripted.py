"""A Python function as an engine: oracles, teachers, baselines."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from trailmark.engines.base import Completion, Engine, EngineError, Request
from trailmark.texts import encode


class ScriptedEngine(Engine):
    """`policy(prompt_text, draw) -> text`. `draw` is a random.Random seeded by (seed, key, sample), so a scripted
    player is as reproducible as a model. Its tokens have log-prob 0, because the function chose them with certainty."""

    def __init__(self, policy: Callable[..., Any], tokenizer: Any, name: str = "scripted"):
        self.policy, self.tokenizer, self.name, self.version = policy, tokenizer, name, 0

    async def sample(self, request: Request) -> list[Completion]:
        import random

        prompt = self.tokenizer.decode(request.prompt)
        out = []
        for k in range(request.n):
            answer = self.policy(prompt, random.Random(f"{request.seed}\0{request.key}\0{k}"))
            text = str(await answer if inspect.isawaitable(answer) else answer)
            tokens = tuple(encode(self.tokenizer, text))
            cut = len(tokens) > request.max_tokens
            if cut:
                tokens = tokens[: request.max_tokens]
                text = self.tokenizer.decode(tokens)
            elif request.stop_ids and len(tokens) < request.max_tokens:
                tokens += request.stop_ids[:1]
            if request.law.allowed is not None and not set(tokens) <= set(request.law.allowed):
                raise EngineError(f"'{self.name}' answered {text!r}, which is not one of the labels it was given")
            zeros = (0.0,) * len(tokens)
            out.append(Completion(tokens, zeros, zeros, text, "length" if cut else "stopped"))
        await asyncio.sleep(0)
        return out

    async def score(self, tokens: Sequence[int], start: int = 1) -> list[float]:
        raise EngineError(f"'{self.name}' is a script: it cannot score tokens")
