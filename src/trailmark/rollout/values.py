"""Who says how good a text is so far: a value model, a model of steps, a server of values, or the policy's own log-probs.

A scorer is asked about `Line`s, prompts with what was written behind them, and answers with one number each; higher is better. A
value is read *at the last token*, so everything that was written has been seen. The token that ends an answer is left out: V is
learned in states where something is still to be written, and the last of these is the one in which the end was chosen.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from trailmark.errors import ModelError
from trailmark.types import Tokens

if TYPE_CHECKING:
    from trailmark.models.lm import LM

Over = Literal["last", "min", "mean", "product"]
Compute = Callable[[Sequence[Tokens], Sequence[tuple[int, ...]]], list[list[float]]]
ROWS, BUCKET = 4, 32  # shapes of a pass, constant so that no row depends on its neighbours
PLACES = 65536  # of a pass whose shape is free


@dataclass(frozen=True, slots=True)
class Line:
    """`tokens` were written behind `prompt`, without the token that ended them; `ends` are the places, counted in `tokens`, at
    which steps end."""

    prompt: Tokens
    tokens: Tokens
    logp: tuple[float, ...] = ()
    ends: tuple[int, ...] = ()


class Scorer(Protocol):
    async def score(self, lines: Sequence[Line]) -> list[float]: ...


class LogProb:
    """The policy's own log-prob of what was written: the sum, or the mean of a token."""

    def __init__(self, mean: bool = False):
        self.mean = mean

    async def score(self, lines: Sequence[Line]) -> list[float]:
        return [sum(x.logp) / (max(1, len(x.logp)) if self.mean else 1) for x in lines]


class HeadValues:
    """A head of a language model, read at the last token (a value), or at the end of every step and then taken `over` them (a
    model of steps). A head of several classes gives the probability of its last one. Lines that are asked about at the same time
    are computed together, in passes of constant height, so that on one CPU thread or a GPU nothing depends on what else is asked.
    Without `fixed` a GPU computes them as a trie (where the model's attention can), as many places in one pass as fill it; a
    CPU would look at the whole square of it. `amp`: in bfloat16, as a value that was trained so."""

    def __init__(self, lm: LM, head: str | None = None, over: Over = "last", fixed: bool = True, amp: bool = False):
        self.lm, self.over, self.amp = lm, over, amp
        self.free = not fixed and lm.device.type == "cuda"  # of shapes
        self.head = head or ("value" if "value" in lm.heads else next(iter(lm.heads), ""))
        if self.head not in lm.heads:
            raise ModelError(
                f"model '{lm.name}' has no head '{self.head or 'value'}' to read values from (heads: {', '.join(lm.heads) or 'none'})."
            )
        self._waiting: deque[tuple[Tokens, tuple[int, ...], asyncio.Future]] = deque()
        self._pump_task: asyncio.Task | None = None

    async def score(self, lines: Sequence[Line]) -> list[float]:
        asked = []
        for x in lines:
            last = len(x.prompt) + len(x.tokens) - 1
            ends = {len(x.prompt) + e - 1 for e in x.ends} if self.over != "last" else set()
            asked.append((x.prompt + x.tokens, tuple(sorted(ends | {last}))))
        return [_over(v, self.over) for v in await self.read(asked)]

    async def values(self, rows: Sequence[Tokens]) -> list[float]:
        """The value of every sequence at its last token."""
        return [v[0] for v in await self.read([(row, (len(row) - 1,)) for row in rows])]

    async def read(self, asked: Sequence[tuple[Tokens, tuple[int, ...]]]) -> list[list[float]]:
        """The head's numbers at some places of some sequences."""
        for row, _ in asked:
            self.check(row)
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in asked]
        self._waiting += [(row, places, future) for (row, places), future in zip(asked, futures)]
        if futures and (self._pump_task is None or self._pump_task.done()):
            self._pump_task = loop.create_task(self._pump())
        return list(await asyncio.gather(*futures))

    def check(self, row: Sequence[int]) -> None:
        """Refuse what has no value."""
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
            await asyncio.sleep(0)  # who asks together is answered together
            while self._waiting:
                if self.free:
                    part, self._waiting = list(self._waiting), deque()
                    self._answer(part, self._trie)
                else:
                    self._block([self._waiting.popleft() for _ in range(min(ROWS, len(self._waiting)))])
                await asyncio.sleep(0)
        except BaseException as problem:
            for *_, future in self._waiting:
                if not future.done():
                    future.set_exception(ModelError(f"values of '{self.lm.name}' failed: {problem}"))
            self._waiting.clear()
            if not isinstance(problem, Exception):
                raise

    def _block(self, part: Sequence[tuple[Tokens, tuple[int, ...], asyncio.Future]]) -> None:
        """One pass over a few rows. Each has its own width, rounded up: a row's shape must not depend on its neighbours, so only
        rows of one width share a pass."""
        widths: dict[int, list[tuple[Tokens, tuple[int, ...], asyncio.Future]]] = {}
        multiple = max(BUCKET, self.lm.pad_multiple)
        for item in part:
            widths.setdefault(-(-len(item[0]) // multiple) * multiple, []).append(item)
        for width, group in widths.items():
            self._answer(group, lambda rows, places, width=width: self._pass(rows, places, width))

    def _answer(self, part: Sequence[tuple[Tokens, tuple[int, ...], asyncio.Future]], compute: Compute) -> None:
        try:
            found = compute([row for row, _, _ in part], [places for _, places, _ in part])
        except Exception as problem:
            for *_, future in part:
                if not future.done():
                    future.set_exception(problem)
            return
        for (*_, future), values in zip(part, found):
            if not future.done():
                future.set_result(values)

    def _trie(self, rows: Sequence[Tokens], places: Sequence[tuple[int, ...]]) -> list[list[float]]:
        import numpy as np

        from trailmark.models.layout import micro_batches
        from trailmark.types import Sample

        samples = [Sample(np.array(row), {}, {}) for row in rows]
        number = {id(s): k for k, s in enumerate(samples)}
        out: list[list[float]] = [[]] * len(rows)
        shape: Any = self.lm.sharing
        for packed in micro_batches(samples, PLACES, shape, self.lm.pad_multiple):
            numbers = self._read(packed.ids, packed.end, packed.pos).reshape(-1)[packed.where]
            first = 0
            for s in packed.samples:
                k = number[id(s)]
                out[k] = numbers[[first + at for at in places[k]]].tolist()
                first += len(s.tokens)
        return out

    def _pass(self, rows: Sequence[Tokens], places: Sequence[tuple[int, ...]], width: int) -> list[list[float]]:
        import numpy as np

        ids, pos = np.zeros((ROWS, width), np.int64), np.zeros((ROWS, width), np.int64)
        end = np.broadcast_to(np.arange(1, width + 1), ids.shape).copy()
        for r, row in enumerate(rows):
            n = len(row)
            ids[r, :n], pos[r, :n], end[r, :n] = row, np.arange(n), n
        numbers = self._read(ids, end, pos)
        return [numbers[r, list(at)].tolist() for r, at in enumerate(places)]

    def _read(self, ids: Any, end: Any, pos: Any) -> Any:
        """The head's number at every place of a layout."""
        import torch

        from trailmark.models.attention import Layout

        with torch.inference_mode():
            self.lm.train(False)
            a, b, c = (torch.as_tensor(x, device=self.lm.device) for x in (ids, end, pos))
            with torch.autocast(self.lm.device.type, torch.bfloat16, enabled=self.amp):
                hidden = self.lm.hidden(a, Layout(b, c), c)
            head: Any = self.lm.heads[self.head]
            out = head(hidden.to(head.weight.dtype)).double()
            numbers = out[..., 0] if out.shape[-1] == 1 else out.softmax(-1)[..., -1]
            return numbers.cpu()


def _over(values: Sequence[float], over: Over) -> float:
    if over == "last":
        return values[-1]
    return min(values) if over == "min" else math.prod(values) if over == "product" else sum(values) / len(values)


class HttpValues:
    """Values from a server that has `/v1/values` (`trailmark serve MODEL --value RUN`)."""

    def __init__(self, base_url: str, api_key: str | None = None, deadline: float = 120.0):
        from trailmark.engines.wire import Wire

        self.wire = Wire(base_url, {"Authorization": f"Bearer {api_key}"} if api_key else {}, {}, deadline=deadline)

    async def score(self, lines: Sequence[Line]) -> list[float]:
        from trailmark.engines.wire import EngineGarbage

        states = [list(x.prompt + x.tokens) for x in lines]
        said = await self.wire.post("/v1/values", {"states": states}) if states else {"values": []}
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


def load_values(folder: str | Path, tokenizer: Any = None, device: str = "auto", dtype: str = "float32") -> HeadValues:
    """The value model in a folder (`seats.locate.locate_value` finds that of a run), frozen. `tokenizer` is the policy's, whose
    tokens it will be shown."""
    from trailmark.config import ModelConfig
    from trailmark.models.load import load_model

    lm = load_model(
        ModelConfig.model_validate({"name": str(folder), "device": device, "dtype": dtype})
    ).freeze()
    if tokenizer is not None and lm.tokenizer.get_vocab() != tokenizer.get_vocab():
        raise ModelError(
            f"the value model {folder} has another tokenizer than the policy: it would not read what that writes."
        )
    return HeadValues(lm)
