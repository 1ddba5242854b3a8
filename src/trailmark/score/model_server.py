"""A model behind a server that reads gold texts: our own (`trailmark serve`), or vLLM.

Texts are encoded here and sent as token ids, so the scored tokens are those of a model in this process, control tokens
included. The server only says how likely each of them is. It must serve the model that the recipe names, and encode a
text as we do: with another tokenizer the numbers would be of another text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from functools import cached_property
from typing import Any, TypeVar

from trailmark.config import ServerConfig
from trailmark.engines.base import EngineError
from trailmark.engines.http import OWNER, HttpEngine
from trailmark.engines.http_client import EngineGarbage, EngineRefused, EngineStatus, EngineTimeout
from trailmark.errors import JudgeError, JudgeGone
from trailmark.run_async import wait
from trailmark.score.gold import Gold, Likelihood
from trailmark.seats.open import connect
from trailmark.texts import encode

T = TypeVar("T")
PROBE = "It rained all night. In the morning the road was gone, and 3 of the 4 hens knew why."
SAME = 0.02  # nats per token: two readings of PROBE that differ by more on average are of two models


class ServedModel:
    """`tokenizer` is the one of the served model. `key` is the recipe key or the option that names the server; errors
    begin with it."""

    def __init__(self, config: ServerConfig, tokenizer: Any, key: str = "reward.server"):
        self.config, self.tokenizer, self.key, self.name = config, tokenizer, key, config.model

    def fingerprint(self) -> str:
        """The model's name on the server. `probe` tells two models of one name apart."""
        return f"served {self.name}"

    @cached_property
    def context(self) -> int | None:
        """The most tokens of a row; None if the server does not say. Prompt log-probs come with a written token, which
        needs a place, too."""
        about = self._ask(self.engine.about())
        most = about.lengths.get(self.name)
        return most if most is None or about.owner == OWNER else most - 1

    def check(self) -> None:
        """Refuse a server that cannot be reached, serves another model, or has another tokenizer."""
        self._ask(self._check())

    def likelihoods(self, rows: Sequence[Gold]) -> list[Likelihood]:
        """The likelihood of each row's gold text. The server gets all rows at once, up to `server.concurrency`."""
        self.probe  # noqa: B018  (checks the server before its first numbers are used)
        made = self._ask(self._read(rows))
        if failed := next((x for x in made if isinstance(x, EngineError)), None):
            raise JudgeGone(self._said(failed), [None if isinstance(x, EngineError) else x for x in made])
        return made

    @cached_property
    def probe(self) -> tuple[float, ...]:
        """The log-probs of a fixed text: by these the model is known, whatever its name."""
        self.check()
        return tuple(self._ask(self.engine.score(encode(self.tokenizer, PROBE))))

    @cached_property
    def engine(self) -> HttpEngine:
        try:
            return connect(self.config, self.key, self.tokenizer)
        except EngineError as problem:
            raise JudgeError(str(problem)) from None

    async def _check(self) -> None:
        await self.engine.must_serve()
        mine, theirs = encode(self.tokenizer, PROBE), await self.engine.token_ids(PROBE)
        if theirs is not None and theirs != mine:
            raise EngineError(
                f"'{self.name}' at {self.engine.wire.base_url} encodes a text as {theirs[:6]}…, and the tokenizer here "
                f"as {mine[:6]}…: name the model that it serves as `model`"
            )

    async def _read(self, rows: Sequence[Gold]) -> list[Any]:
        """A likelihood for each row, or the error in its place."""
        return list(await asyncio.gather(*map(self._read_one, rows)))

    async def _read_one(self, row: Gold) -> Likelihood | EngineError:
        try:
            logps = await self.engine.score(row.tokens[: row.end], row.start)
        except (EngineGarbage, EngineStatus) as problem:  # about this row, and not about the server
            return EngineError(f"{row.name}: {problem}" if row.name else str(problem))
        except EngineError as problem:
            return problem
        return Likelihood(float(sum(logps)), len(logps))

    def _ask(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return wait(work)
        except EngineError as problem:
            kind = JudgeGone if isinstance(problem, EngineRefused | EngineStatus | EngineTimeout) else JudgeError
            raise kind(self._said(problem)) from None

    def _said(self, problem: EngineError) -> str:
        return f"{self.key}: {str(problem).removesuffix('.')}."


def same_model(then: Any, now: Sequence[float]) -> bool:
    """Whether two readings of the probe, the first as it was stored, may be of one model: servers round differently
    from run to run."""
    if not isinstance(then, list) or not all(type(x) in (float, int) for x in then) or len(then) != len(now):
        return False
    return sum(abs(a - b) for a, b in zip(then, now)) <= SAME * max(1, len(now))
