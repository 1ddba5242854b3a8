"""Scorers of partial texts, for searches: a value model, a model of steps, a server of values, or the policy's own
log-probs.

A scorer gets `Line`s, prompts with the text written so far, and gives one number for each; higher is better. A value is
read *at the last token*, so it depends on the whole text. The token that ends an answer is left out: V is learned in
states where more text follows, and the last of these is the state in which the end is chosen.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from trailmark.errors import ModelError
from trailmark.models.layout import FIXED_ROWS
from trailmark.score.classes import Over, check_classes, class_head, class_numbers, over_steps
from trailmark.steps import NAMES, Split
from trailmark.types import Tokens

if TYPE_CHECKING:
    from trailmark.models.lm import LM


@dataclass(frozen=True, slots=True)
class Line:
    """`tokens` were written after `prompt`, without their end token. `ends` are the positions in `tokens` at which
    steps end."""

    prompt: Tokens
    tokens: Tokens
    logp: tuple[float, ...] = ()
    ends: tuple[int, ...] = ()


class Scorer(Protocol):
    async def score(self, lines: Sequence[Line]) -> list[float]: ...


class LogProb:
    """The policy's own log-prob of the text."""

    over = "last"  # where steps end does not matter

    async def score(self, lines: Sequence[Line]) -> list[float]:
        return [sum(x.logp) for x in lines]


class HeadValues:
    """A head of a language model, read at the last token (a value), or at the end of every step and then reduced by
    `over` (a model of steps). A head of several classes gives the probability of `classes`, or of its last class.
    Simultaneous requests are computed together. With `fixed`, passes have constant shapes, so that on one CPU thread or
    a GPU a result does not depend on other requests. Without it, shared prefixes are computed once. `amp`: compute in
    bfloat16, for a value that was trained so. `split` says how answers are cut into steps, `skip` which kinds of steps
    take no part, and `offset` how many last steps of a whole answer. `raw`: the number of a class as the head has
    it."""

    def __init__(
        self,
        lm: LM,
        head: str | None = None,
        over: Over = "last",
        fixed: bool = True,
        amp: bool = False,
        classes: Sequence[int] | None = None,
        split: Split = "newline",
        skip: Sequence[str] = (),
        offset: int = 0,
        raw: bool = False,
    ):
        self.split, self.skip, self.offset, self.raw = split, tuple(skip), offset, raw
        self.picks = split in NAMES or bool(skip) or offset > 0  # some places where lines end are not read
        self.lm, self.over, self.fixed, self.amp, self.classes = lm, over, fixed, amp, classes
        first = class_head(lm) if classes is not None else "value" if "value" in lm.heads else next(iter(lm.heads), "")
        self.head = head or first
        check_classes(lm, self.head, classes)
        self._waiting: deque[tuple[Tokens, tuple[int, ...], asyncio.Future]] = deque()
        self._pump_task: asyncio.Task | None = None

    async def score(self, lines: Sequence[Line]) -> list[float]:
        asked = []
        for x in lines:
            last = len(x.prompt) + len(x.tokens) - 1
            ends = {len(x.prompt) + e - 1 for e in x.ends}
            if self.over == "last":
                ends = {max(ends)} if ends and self.picks else set()
            asked.append((x.prompt + x.tokens, tuple(sorted(ends or {last}))))
        return [over_steps(v, self.over) for v in await self.read(asked)]

    async def values(self, rows: Sequence[Tokens]) -> list[float]:
        """The value of every sequence at its last token."""
        return [v[0] for v in await self.read([(row, (len(row) - 1,)) for row in rows])]

    async def read(self, asked: Sequence[tuple[Tokens, tuple[int, ...]]]) -> list[list[float]]:
        """The head's numbers at some positions of some sequences."""
        for row, _ in asked:
            self.check(row)
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in asked]
        self._waiting += [(row, places, future) for (row, places), future in zip(asked, futures)]
        if futures and (self._pump_task is None or self._pump_task.done()):
            self._pump_task = loop.create_task(self._pump())
        return list(await asyncio.gather(*futures))

    def check(self, row: Sequence[int]) -> None:
        """Raise an error for a sequence that has no value."""
        if not row:
            raise ModelError("an empty sequence has no value: give at least one token (a BOS, say).")
        if len(row) > self.lm.context:
            raise ModelError(
                f"a sequence of {len(row)} tokens is longer than the {self.lm.context} of '{self.lm.name}'."
            )
        if not 0 <= min(row) <= max(row) < self.lm.vocab:
            raise ModelError(
                f"token {max(row)} is unknown to '{self.lm.name}', which has {self.lm.vocab}: another tokenizer?"
            )

    async def _pump(self) -> None:
        try:
            await asyncio.sleep(0)  # collect simultaneous requests, and compute them together
            while self._waiting:
                part: list[tuple[Tokens, tuple[int, ...], asyncio.Future]] = []
                while self._waiting and (not self.fixed or len(part) < FIXED_ROWS):
                    if not (one := self._waiting.popleft())[2].done():  # its caller may have left
                        part.append(one)
                if part:
                    self._answer(part)
                await asyncio.sleep(0)
        except BaseException as problem:
            for *_, future in self._waiting:
                if not future.done():
                    future.set_exception(ModelError(f"values of '{self.lm.name}' failed: {problem}"))
            self._waiting.clear()
            if not isinstance(problem, Exception):
                raise

    def _answer(self, part: Sequence[tuple[Tokens, tuple[int, ...], asyncio.Future]]) -> None:
        try:
            found = self._compute([row for row, _, _ in part], [places for _, places, _ in part])
        except Exception as problem:
            for *_, future in part:
                if not future.done():
                    future.set_exception(problem)
            return
        for (*_, future), values in zip(part, found):
            if not future.done():
                future.set_result(values)

    def _compute(self, rows: Sequence[Tokens], places: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """The numbers at some positions of each row, in one pass or several."""
        import numpy as np

        from trailmark.models.forward import fill, pack
        from trailmark.models.readout import Readout
        from trailmark.types import Sample

        samples = []
        for row, at in zip(rows, places):
            read = np.zeros(len(row), bool)
            read[list(at)] = True
            samples.append(Sample(np.array(row, np.int64), {"read": read}))
        models = {"value": self.lm}
        packs = pack(models, samples, "fixed" if self.fixed else "auto")
        head = Readout("head", "head", model="value", head=self.head, at="after", where="read")
        self.lm.train(False)
        out = fill(models, samples, packs, [head], self.amp)
        read = [s.streams["head"][list(at)] for s, at in zip(out, places)]
        return [class_numbers(numbers, self.classes, self.raw).tolist() for numbers in read]


def read_as(told: Mapping[str, Any]) -> dict[str, Any]:
    """How `HeadValues` reads a reward model, from section `read` of its recipe."""
    return {key: told[key] for key in ("over", "classes", "split", "skip", "offset", "raw") if told.get(key)}


class HttpValues:
    """Values from a server with `/v1/values` (`trailmark serve MODEL --value RUN`)."""

    def __init__(self, base_url: str, api_key: str | None = None, deadline: float = 120.0):
        from trailmark.engines.http_client import Wire

        self.wire = Wire(base_url, {"Authorization": f"Bearer {api_key}"} if api_key else {}, {}, deadline=deadline)

    async def score(self, lines: Sequence[Line]) -> list[float]:
        return await self.ask([list(x.prompt + x.tokens) for x in lines])

    async def ask(self, states: Sequence[Any]) -> list[float]:
        """The values of states: token ids, texts, or conversations that end with an answer."""
        from trailmark.engines.http_client import EngineGarbage

        said = await self.wire.post("/v1/values", {"states": list(states)}) if states else {"values": []}
        found = said.get("values") if isinstance(said, dict) else said
        if (
            not isinstance(found, list)
            or len(found) != len(states)
            or not all(isinstance(v, int | float) for v in found)
        ):
            raise EngineGarbage(
                f"{self.wire.base_url} was asked for {len(states)} values and answered {str(said)[:80]}"
            )
        return [float(v) for v in found]
