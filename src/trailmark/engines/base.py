"""The protocol of everything that writes tokens. Prompts go in as token ids, samples come out as token ids."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from trailmark.errors import TrailmarkError
from trailmark.run_async import wait
from trailmark.types import CUT_OFF, ENDED, SamplingLaw, Stop, Tokens

if TYPE_CHECKING:
    from trailmark.engines.weights import Weights


class EngineError(TrailmarkError):
    """An engine cannot serve a request, or is gone. The episode that asked becomes `Failed`."""


class SchemaError(EngineError):
    """A JSON schema that an engine cannot keep to. It is the user's, so no later question can succeed."""


@dataclass(frozen=True, slots=True)
class Request:
    """`n` continuations of `prompt`. The draw depends only on (seed, key, sample, position). `key` names the decision,
    so a replay draws the same tokens whatever else is running."""

    prompt: Tokens
    law: SamplingLaw = SamplingLaw()
    n: int = 1
    max_tokens: int = 64
    stop_ids: Tokens = ()
    stop_strings: tuple[str, ...] = ()
    seed: int = 0
    key: str = ""
    schema: str = ""  # JSON schema of the text, as JSON


@dataclass(frozen=True, slots=True)
class Completion:
    tokens: Tokens  # exactly what was drawn, the stopping token included
    logp: tuple[float, ...]  # under the model
    logq: tuple[float, ...]  # under the law
    text: str  # decoded, without the stopping token or string
    stop: Stop
    # tokens of the prompt and of the answer, as a server counts them
    usage: tuple[int, int] | None = field(default=None, compare=False)
    # versions of the weights that wrote its first and its last token, if the engine can say; else its `version` counts
    versions: tuple[int, int] | None = field(default=None, compare=False)

    @property
    def ended(self) -> bool:
        return self.stop in ENDED

    @property
    def cut_off(self) -> bool:
        return self.stop in CUT_OFF


class Engine(Protocol):
    tokenizer: Any
    name: str
    version: int

    async def sample(self, request: Request) -> list[Completion]: ...

    async def score(self, tokens: Sequence[int], start: int = 1) -> list[float]:
        """log p(token t | tokens before t) under the model, for t = start … end."""
        ...

    async def publish(self, version: int, weights: Weights | None = None) -> None:
        """From now on, sample with these weights; none: those of the model that the engine shares have changed. An
        engine that holds a copy checks that they have arrived."""
        raise EngineError(f"'{self.name}' takes no weights: only a model in this process can be trained")


def draw_key(seed: int, key: str, sample: int) -> tuple[int, int]:
    """Two 32-bit words for one stream of draws."""
    digest = hashlib.blake2b(f"{seed}\0{key}\0{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def run(engine: Engine, requests: Sequence[Request]) -> list[list[Completion]]:
    """Serve several requests at once, from synchronous code."""

    async def together() -> list[list[Completion]]:
        done = await asyncio.gather(*(engine.sample(r) for r in requests), return_exceptions=True)
        for d in done:
            if isinstance(d, BaseException):
                raise d
        return [d for d in done if not isinstance(d, BaseException)]

    return wait(together())


def publish(engine: Engine, version: int, weights: Weights | None = None) -> None:
    """Publish weights, from synchronous code."""
    wait(engine.publish(version, weights))
