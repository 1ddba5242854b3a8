"""The embedded engine: a model in this process, a fixed number of slots, one prefill per distinct prompt.

Requests arrive from many coroutines. Those that wait are prefilled together, each distinct prompt once; every sample
then decodes in a slot of its own and leaves it when it ends. With `fixed=True` all shapes are constant (rows of a
prefill, slots, columns), which on one CPU thread, or on a GPU, makes a sample bitwise independent of slot, neighbours
and arrival order. `fixed=False` prefills only the rows, and decodes only the slots and columns in use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from trailmark.engines.base import Completion, Engine, EngineError, Request
from trailmark.engines.decoder import Decoder
from trailmark.engines.prefill import Prefiller
from trailmark.engines.running import Job, Listener
from trailmark.engines.scheduler import Scheduler
from trailmark.engines.schema import Schemas
from trailmark.engines.weights import Weights, read
from trailmark.memory import need
from trailmark.models.attention import FLEX_BLOCK
from trailmark.models.layout_check import decodes
from trailmark.models.lm import LM
from trailmark.models.readout import Readout

BUCKET = 32  # prompt lengths and attended columns are rounded up to a multiple of this
AHEAD = False  # decode as on a GPU on any device: for tests
DEFAULT_LEN = 1024  # default longest sequence; every slot reserves memory for it


class LocalEngine(Engine):
    def __init__(
        self, lm: LM, slots: int = 16, max_len: int | None = None, fixed: bool = True, prefill_rows: int | None = None
    ):
        """`prefill_rows`: how many prompts are computed at once. None: 4, or on a GPU as many as fill it."""
        self.lm, self.tokenizer, self.name, self.version = lm, lm.tokenizer, lm.name, 0
        self.slots, self.fixed = slots, fixed
        self.vocab = lm.vocab  # asked once: it is slow
        self.max_len = min(max_len or DEFAULT_LEN, lm.context)
        on_gpu = lm.device.type == "cuda"
        bucket = FLEX_BLOCK if on_gpu else BUCKET
        self.capacity = -(-self.max_len // bucket) * bucket
        if wrong := decodes(lm):
            raise EngineError(f"model '{lm.name}' cannot be sampled from here: {wrong}; use a server for it")
        self._need_memory()
        self._schemas = Schemas(self.tokenizer, lm.vocab)
        self.prefiller = Prefiller(lm, fixed, not fixed and on_gpu, bucket, prefill_rows)
        self.decoder = Decoder(lm, slots, self.capacity, bucket, self.max_len, fixed, on_gpu or AHEAD)
        self.scheduler = Scheduler(self.prefiller, self.decoder, self._schemas)
        self.counts = self.decoder.drawer.counts

    def _need_memory(self) -> None:
        """Check the memory for the keys and values of all slots, which is reserved from the start."""
        lm = self.lm
        each = lm.kept * self.capacity * lm.dtype.itemsize + 4 * lm.vocab
        what = f"engine.max_num_seqs {self.slots:,} of {self.capacity:,} tokens each"
        need(self.slots * each, what, "lower engine.max_num_seqs or engine.max_len", lm.device)

    # -- the protocol -------------------------------------------------------------------------------------------

    async def sample(
        self, request: Request, on_token: Listener | None = None, top: int = 0, party: Any = None
    ) -> list[Completion]:
        """`on_token` gets every token when it is sampled, with the `top` most likely ones. Requests of different
        parties take turns (`engines/turns.py`); without any, the first to come is the first to be served."""
        self.check(request)
        future = asyncio.get_running_loop().create_future()
        self.scheduler.submit(Job(request, future, on_token, min(top, self.lm.vocab) if on_token else 0, party))
        return await future

    def check(self, request: Request) -> None:
        """Raise an error for a request that cannot be served, before it waits."""
        room = self.max_len - len(request.prompt)
        if not request.prompt:
            raise EngineError("an empty prompt cannot be continued: give at least one token (a BOS, say)")
        if room < 1:
            more = "raise engine.max_len" if self.max_len < self.lm.context else "use a model with a longer context"
            raise EngineError(
                f"the prompt has {len(request.prompt)} tokens and '{self.name}' holds {self.max_len}: shorten it or "
                f"{more}"
            )
        vocab = self.vocab
        if not 0 <= min(request.prompt) <= max(request.prompt) < vocab:
            raise EngineError(
                f"the prompt has token {max(request.prompt)}, and '{self.name}' knows 0 to {vocab - 1}: "
                "another tokenizer?"
            )
        if request.n < 1 or request.max_tokens < 1:
            raise EngineError(f"n is {request.n} and max_tokens {request.max_tokens}: both must be at least 1")
        if "" in request.stop_strings:
            raise EngineError("an empty stop text would stop everything")
        known = (*(request.law.allowed or ()), *request.law.stop_ids, *request.stop_ids)
        if known and not 0 <= min(known) <= max(known) < vocab:
            raise EngineError(f"allowed or stopping tokens must be among 0 to {vocab - 1} of '{self.name}'")
        if request.law.min_tokens and not set(request.stop_ids) <= set(request.law.stop_ids):
            raise EngineError("a law with min_tokens must list the stopping tokens it bans in its stop_ids")
        if request.schema:
            if request.law.min_tokens or request.law.allowed is not None or not request.stop_ids:
                raise EngineError("a JSON schema needs a token that ends the text, and neither min_tokens nor a list")
            self._schemas.check(request.schema)

    async def score(self, tokens: Sequence[int], start: int = 1) -> list[float]:
        """Teacher-forced log-probs under the model itself."""
        return self.score_rows([tokens], [start])[0]

    async def publish(self, version: int, weights: Weights | None = None) -> None:
        """From now on, sample with the learner's weights. If the engine shares the learner's model, nothing is copied.
        An engine with its own copy (`engine_copy`) copies the weights, and a fixed probe is scored on both sides to
        check it."""
        if self.scheduler.open:
            raise EngineError("weights cannot change while sampling is in progress")
        if weights is not None and weights.lm is not self.lm:
            self._take(weights)
        self.version = version
        self.scheduler.ready.clear()
        self.decoder.prefixes.clear()  # these keys and values belong to the old weights

    @torch.no_grad()
    def _take(self, weights: Weights) -> None:
        """Copy the weights. Then check that every one is the learner's, rounded, and that both sides score a probe
        alike."""
        own, missing, other = self.lm.model.state_dict(), dict(self.lm.model.named_parameters()), list[torch.Tensor]()
        for name, tensor in weights.named(self.lm.dtype):
            if name in own:
                own[name].copy_(tensor)
            if (mine := missing.pop(name, None)) is not None:
                other.append((mine != tensor.to(mine.dtype)).any())
        ids = [(7 * k + 3) % self.lm.vocab for k in range(min(32, self.max_len))]
        here, there = self.score_rows([ids], [1])[0], weights.probe(ids)
        gap = float(np.abs(np.subtract(here, there)).mean())
        # The probe is random tokens: its log-probs are large, and so are their rounding errors in a short dtype.
        exact = self.lm.dtype == weights.lm.dtype and torch.finfo(self.lm.dtype).bits >= 32
        rounding = 1e-4 if exact else 0.02 * max(1.0, float(np.abs(there).mean()))
        if missing or bool(torch.stack(other).any()) or not gap <= rounding:
            raise EngineError(
                f"engine '{self.name}' does not hold the learner's weights: a probe differs by {gap:.3g} in log-prob "
                "a token"
            )

    def score_rows(self, rows: Sequence[Sequence[int]], starts: Sequence[int]) -> list[list[float]]:
        """The log-probs of each row's tokens from its start on. A single row is computed alone, and its numbers depend
        on nothing else. Several rows share their prefixes."""
        logp = read(self.lm, rows, starts, Readout("logp", law=False))
        return [[0.0] * (start == 0) + s.streams["logp"][max(start, 1) :].tolist() for s, start in zip(logp, starts)]

    def score_top(self, tokens: Sequence[int], top: int = 0) -> list[tuple[float, int, list[tuple[int, float]]]]:
        """For each token but the first: its log-prob, its rank (1: the most likely), and the `top` most likely ones."""
        kinds = [Readout("logp", law=False), Readout("rank", "rank", law=False)]
        kinds += [Readout("top", "top", law=False, top=top)] if top else []
        (s,) = read(self.lm, [tokens], [1], *kinds)
        best = s.streams["top"][1:] if top else np.zeros((len(tokens) - 1, 2, 0))
        pairs = [list(zip(i.astype(int).tolist(), v.tolist())) for i, v in best]
        ranks = s.streams["rank"][1:].astype(int).tolist()
        return list(zip(s.streams["logp"][1:].tolist(), ranks, pairs))
