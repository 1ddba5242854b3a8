"""A request that an engine in this process works on, and each of its samples."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from trailmark.engines.base import Completion, Request, draw_key
from trailmark.engines.schema import Guide
from trailmark.engines.stops import Watch
from trailmark.types import Stop

KeysValues = dict[int, tuple[Tensor, Tensor]]  # of each layer
NO_NOISE = np.zeros((0, 0), np.float32)


@dataclass(frozen=True, slots=True)
class Written:
    """One token of one sample, reported as soon as it is sampled. `top` are the most likely tokens under the model, if
    requested. `done` is set on the last token."""

    sample: int
    token: int
    logp: float
    logq: float
    top: tuple[tuple[int, float], ...] = ()
    done: Completion | None = None


Listener = Callable[[Written], None]  # called between two steps of all samples: it must be quick, and must not raise


@dataclass(eq=False)
class Job:
    """A request, and who waits for it. Its n samples are returned together, after the last has finished."""

    request: Request
    future: asyncio.Future
    on_token: Listener | None = None
    top: int = 0  # how many of the most likely tokens `on_token` gets
    party: Any = None  # on whose behalf it is (`engines/turns.py`)
    due: int = 0

    def __post_init__(self) -> None:
        self.done: list[Completion | None] = [None] * self.request.n

    def deliver(self, sample: int, completion: Completion) -> None:
        self.done[sample] = completion
        if all(d is not None for d in self.done) and not self.future.done():
            self.future.set_result(self.done)


@dataclass(eq=False)
class Running:
    """One sample in progress."""

    job: Job
    sample: int
    prefilled: tuple[KeysValues, int]  # its prefill, and its row there, until it has a slot
    watch: Watch | None = None  # for stop texts
    guide: Guide | None = None  # for a JSON schema
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    logq: list[float] = field(default_factory=list)
    top: tuple[tuple[int, float], ...] = ()  # the most likely tokens at the last position
    noise: np.ndarray = field(default_factory=lambda: NO_NOISE)  # of the tokens before number `noise_end`, [tokens, V]
    noise_end: int = 0

    def __post_init__(self) -> None:
        self.request, law = self.job.request, self.job.request.law
        self.keys = draw_key(self.request.seed, self.request.key, self.sample)
        # whether the law is only a temperature: a step on the device can sample from such a law
        self.simple = law.allowed is None and law.top_p >= 1 and not law.top_k and not law.min_tokens
        self.simple = self.simple and self.guide is None

    def add(self, token: int, logp: float, logq: float) -> None:
        self.tokens.append(token)
        self.logp.append(logp)
        self.logq.append(logq)
        if self.guide is not None:
            self.guide.take(token)

    def ended(self, tokenizer: Any, max_len: int) -> bool:
        """Report the last token. Whether the sample ended with it."""
        done = self._completion(tokenizer, max_len)
        if self.job.on_token is not None and not self.job.future.done():
            self.job.on_token(Written(self.sample, self.tokens[-1], self.logp[-1], self.logq[-1], self.top, done))
        if done is not None:
            self.job.deliver(self.sample, done)
        return done is not None

    def _completion(self, tokenizer: Any, max_len: int) -> Completion | None:
        """The finished sample, if its last token ended it; else None."""
        request, tokens = self.request, self.tokens
        stop: Stop | None = None
        text = None
        if tokens[-1] in request.stop_ids:
            stop, text = "stopped", tokenizer.decode(tokens[:-1])
        elif self.watch is not None and (at := self.watch.add(tokens[-1])) is not None:
            text = self.watch.cut(tokenizer.decode(tokens), at)
            stop = None if text is None else "stop_string"
        full = len(request.prompt) + len(tokens) >= max_len
        if stop is None and (full or len(tokens) >= request.max_tokens):
            stop = "length" if len(tokens) >= request.max_tokens else "context_full"
            text = tokenizer.decode(tokens)
        if stop is None:
            return None
        return Completion(tuple(tokens), tuple(self.logp), tuple(self.logq), text or "", stop)
