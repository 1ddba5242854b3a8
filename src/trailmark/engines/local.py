"""The embedded engine: a model in this process, a fixed number of slots, one prefill per distinct prompt.

Requests arrive from many coroutines. Those that wait are prefilled together, each distinct prompt once; every sample
then decodes in a slot of its own and leaves it when it ends. With `fixed=True` all shapes are constant (rows of a
prefill, slots, columns), which on one CPU thread, or on a GPU, makes a sample bitwise independent of slot, neighbours
and arrival order. `fixed=False` prefills only the rows, and decodes only the slots and columns in use.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from trailmark.config import EngineConfig
from trailmark.engines.base import Completion, Engine, EngineError, Request, draw_key
from trailmark.engines.decode_ahead import Ahead, draw
from trailmark.engines.prefill import Prefiller
from trailmark.engines.prefix_cache import Kept
from trailmark.engines.schema import Guide, Schemas
from trailmark.engines.stops import Watch
from trailmark.engines.turns import Line, Turns
from trailmark.engines.weights import Weights, engine_copy, read
from trailmark.memory import need
from trailmark.models import compiled
from trailmark.models.attention import FLEX_BLOCK, Prefill, Slots
from trailmark.models.law import NEVER, chosen, gumbel, law_logits, most_likely, working
from trailmark.models.lm import LM
from trailmark.models.load import check_bf16
from trailmark.models.probe import decodes
from trailmark.models.readout import Readout
from trailmark.types import SamplingLaw, Stop

BUCKET = 32  # prompt lengths and attended columns are rounded up to a multiple of this
WORTH_KEEPING = 64  # a shorter prompt is not kept for later prompts
HOLD = 8  # most turns that a prefill waits for more prompts
AHEAD = False  # decode as on a GPU on any device: for tests
NOISE_AHEAD = 16  # most tokens whose noise is computed at once on a CPU
SMALL_NOISE = 1 << 16  # numbers of noise: more are computed for one token at a time
NO_NOISE = np.zeros((0, 0), np.float32)
OWN = SamplingLaw()  # the model's own distribution
DEFAULT_LEN = 1024  # default longest sequence; every slot reserves memory for it


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
class _Parts:
    """The n samples of one request. They are returned together, after the last has finished."""

    future: asyncio.Future
    done: list[Completion | None]

    def deliver(self, sample: int, completion: Completion) -> None:
        self.done[sample] = completion
        if all(d is not None for d in self.done) and not self.future.done():
            self.future.set_result(self.done)


@dataclass(eq=False)
class _Live:
    """One sample in progress."""

    request: Request
    sample: int
    keys: tuple[int, int]
    parts: _Parts
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    logq: list[float] = field(default_factory=list)
    top: tuple[tuple[int, float], ...] = ()  # the most likely tokens at the last position
    watch: Watch | None = None  # for stop texts
    guide: Guide | None = None  # for a JSON schema
    noise: np.ndarray = field(default_factory=lambda: NO_NOISE)  # of the tokens before number `noise_end`, [tokens, V]
    noise_end: int = 0

    @property
    def simple(self) -> bool:
        """Whether the law is only a temperature. A step on the device can sample from such a law."""
        law = self.request.law
        return law.allowed is None and law.top_p >= 1 and not law.top_k and not law.min_tokens and self.guide is None


def local_engine(lm: LM, config: EngineConfig, apart: bool = False) -> LocalEngine:
    """The engine of a recipe for a model. It uses the model's own weights, or a copy (`apart`, or in the dtype of
    `engine.dtype`), which `publish` updates."""
    wanted = lm.dtype if config.dtype is None else getattr(torch, config.dtype)
    own = wanted == lm.dtype and not apart
    if config.dtype == "bfloat16":
        check_bf16(lm.device, "engine.dtype", "float32 or float16")
    return LocalEngine(
        lm if own else engine_copy(lm, wanted), config.max_num_seqs, config.max_len, config.batch_invariant
    )


class LocalEngine(Engine):
    def __init__(
        self, lm: LM, slots: int = 16, max_len: int | None = None, fixed: bool = True, prefill_rows: int | None = None
    ):
        """`prefill_rows`: how many prompts are computed at once. None: 4, or on a GPU as many as fill it."""
        self.lm, self.tokenizer, self.name, self.version = lm, lm.tokenizer, lm.name, 0
        self.slots, self.fixed = slots, fixed
        self.max_len = min(max_len or DEFAULT_LEN, lm.context)
        self.bucket = FLEX_BLOCK if lm.device.type == "cuda" else BUCKET
        self.capacity = -(-self.max_len // self.bucket) * self.bucket
        if wrong := decodes(lm):
            raise EngineError(f"model '{lm.name}' cannot be sampled from here: {wrong}; use a server for it")
        self._need_memory()
        self._waiting: deque[tuple[Request, asyncio.Future]] = deque()
        self._ready: deque[_Ready] = deque()  # prefilled, waiting for a slot
        self._cache = Slots(slots, self.capacity)
        self._schemas = Schemas(self.tokenizer, lm.vocab)
        self._rows: list[_Live | None] = [None] * slots
        self._index = np.zeros(slots, np.int64)
        self._last = np.zeros(slots, np.int64)
        # On a GPU the host is one step behind the device. On a CPU there is nothing to overlap.
        self._ahead = Ahead(lm, self._cache) if lm.device.type == "cuda" or AHEAD else None
        # the step whose tokens are not read yet, and its samples
        self._flying: tuple[int, list[_Live | None]] | None = None
        self.prefiller = Prefiller(lm, fixed, not fixed and lm.device.type == "cuda", self.bucket, prefill_rows)
        self._compiled_draw: Callable[..., torch.Tensor] | None = None
        self._ids = torch.arange(lm.vocab, device=lm.device)
        self._held = 0  # turns that the waiting prefill has been delayed
        self._pump_task: asyncio.Task | None = None
        self._open: set[asyncio.Future] = set()
        self._listeners: dict[asyncio.Future, tuple[Listener, int]] = {}
        self._parties: dict[asyncio.Future, Any] = {}  # on whose behalf a request is drawn
        self._line = Line()
        # With free shapes, prompts continue from what slots hold. Not with fixed shapes: the content of a slot depends
        # on neighbours, and a decoded token is not bitwise equal to a prefilled one.
        self.reuse = not fixed and self._ahead is not None
        self._kept, self._turn = Kept(), 0
        self._free_since = [0] * slots
        self._needed: set[int] = set()  # slots that a later pass of this prefill starts from
        self.computed = self.reused = 0  # tokens of prompts that were computed, or found in a slot
        self.prefills = 0  # distinct prompts computed
        self.decoded = 0  # tokens drawn

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
        self._waiting.append((request, future))
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        if on_token is not None:
            self._listeners[future] = on_token, min(top, self.lm.vocab)
            future.add_done_callback(self._listeners.pop)
        self._line.join(request, future, party)
        if party is not None:
            self._parties[future] = party
            future.add_done_callback(self._parties.pop)
        if self._pump_task is None or self._pump_task.done():
            self._pump_task = asyncio.create_task(self._pump())
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
        vocab = self.lm.vocab
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
        if self._open:
            raise EngineError("weights cannot change while sampling is in progress")
        if weights is not None and weights.lm is not self.lm:
            self._take(weights)
        self.version = version
        self._ready.clear()
        self._kept.clear()  # these keys and values belong to the old weights

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

    # -- the loop -----------------------------------------------------------------------------------------------

    async def _pump(self) -> None:
        """Runs while there is work. In each turn: admit requests, decode one token in every slot, wake finished
        callers."""
        try:
            await asyncio.sleep(0)  # callers that start together are admitted together
            while self._waiting or self._ready or any(self._rows) or self._flying:
                if self._waiting and (len(self._ready) < self.slots or self._parties) and self._worth_it():
                    self._prefill()
                self._forget()
                self._seat()
                if any(self._rows) or self._flying:
                    self._decode()
                await asyncio.sleep(0)
        # if the loop is cancelled, no caller may wait forever and no row may be half done
        except BaseException as problem:
            self._fail(problem)
            if not isinstance(problem, Exception):
                raise

    def _worth_it(self) -> bool:
        """Whether to prefill now. With free shapes, a pass over few prompts costs a GPU as much as one over many. So
        the prefill waits for more prompts, but only for a few turns."""
        self._held += 1
        if self.prefiller.free and len(self._waiting) < self.slots // 4 and self._held < HOLD:
            return False
        self._held = 0
        return True

    def _fail(self, problem: BaseException) -> None:
        error = EngineError(f"engine '{self.name}' failed: {type(problem).__name__}: {problem}")
        error.__cause__ = problem
        self._waiting.clear()
        self._ready.clear()
        self._rows = [None] * self.slots
        self._index[:] = self._last[:] = 0
        self._flying = None
        self._kept.clear()
        for future in list(self._open):
            if not future.done():
                future.set_exception(error)

    @torch.inference_mode()
    def _prefill(self) -> None:
        """Compute every distinct waiting prompt once, and sample the first token of all its samples."""
        prompts: dict[tuple[int, ...], list[tuple[Request, asyncio.Future]]] = {}
        later: deque[tuple[Request, asyncio.Future]] = deque()
        admitted = len(self._ready)
        turns, waiting = None, list(self._waiting)
        if self._parties:
            room = self.prefiller.rows(self.capacity) * self.capacity
            turns = Turns(waiting, self._parties, self._busy(), admitted, self.slots, room)
            waiting = sorted((w for w in waiting if not w[1].done()), key=lambda w: self._line.due[w[1]])
        for request, future in waiting:
            # limits the memory of the stored keys and values
            fits = request.prompt in prompts or admitted < 2 * self.slots
            if fits if turns is None else turns.admits(request, future):
                prompts.setdefault(request.prompt, []).append((request, future))
                admitted += request.n if request.max_tokens > 1 else 0
            else:
                later.append((request, future))
        self._waiting = later if turns is None else turns.left()
        self._line.admit(f for asked in prompts.values() for _, f in asked)
        if not prompts:
            return
        self.lm.train(False)
        found = {p: self._kept.find(p) for p in prompts} if self._ahead is not None and self.reuse else {}
        held = {p: slot for p, slot in found.items() if slot is not None}
        passes = list(self.prefiller.extension_parts(held))
        for k, part in enumerate(passes):
            known = [held[p] for p in part]
            self._needed = {held[p][0] for later in passes[k + 1 :] for p in later}
            self.reused += sum(n for _, n in known)
            self.computed += sum(map(len, part)) - sum(n for _, n in known)
            made = self.prefiller.extend(part, known, self._cache)
            self._first_tokens(part, [prompts[p] for p in part], *made)
            del made  # memory for the next pass
        for width, part in self.prefiller.parts([p for p in prompts if p not in held]):
            self.computed += sum(map(len, part))
            made = self.prefiller.compute(part, width, chunked=self.reuse)
            self._first_tokens(part, [prompts[p] for p in part], *made)
            del made

    def _first_tokens(
        self,
        part: list[tuple[int, ...]],
        askers: list[list[tuple[Request, asyncio.Future]]],
        layout: Prefill,
        logits: torch.Tensor,
    ) -> None:
        """Sample the first token of every sample after its prompt. Samples that continue wait for a slot."""
        self.prefills += len(part)
        lives: list[_Live] = []
        source: list[int] = []
        for r, asked in enumerate(askers):
            for request, future in asked:
                parts = _Parts(future, [None] * request.n)
                for k in range(request.n):
                    made = _Live(request, k, draw_key(request.seed, request.key, k), parts)
                    if request.stop_strings:
                        made.watch = Watch(self.tokenizer, request.stop_strings, request.law.min_tokens)
                    if request.schema:
                        made.guide = self._schemas.guide(request.schema, request.stop_ids)
                    lives.append(made)
                    source.append(r)
        self._draw_many(logits, lives, source)
        over = set(range(len(part)))
        for live, r in zip(lives, source):
            if not self._ended(live):
                self._ready.append(_Ready(live, layout.kept, r, len(live.request.prompt)))
                over.discard(r)
        if self.reuse and self._ahead is not None:
            self._remember(part, sorted(over), layout, self._ahead)

    def _remember(self, part: list[tuple[int, ...]], over: list[int], layout: Prefill, ahead: Ahead) -> None:
        """Keep prompts whose samples ended with the first token (decisions among labels) in free slots, for the next
        decision of their conversation: they never had a slot."""
        empty = (r for r, live in enumerate(self._rows) if live is None and r not in self._needed)
        free = sorted(empty, key=self._free_since.__getitem__)
        free = free[: max(0, len(free) - len(self._ready))]
        over = [r for r in over if len(part[r]) >= WORTH_KEEPING][: len(free)]
        if not over:
            return
        rows = free[: len(over)]
        self._cache.write(rows, layout.kept, over)
        ahead.seat(rows, [(len(part[r]), 0, 0, 0, 0) for r in over], [1.0] * len(rows))  # an idle slot writes after it
        self._turn += 1  # so that the next pass takes other slots
        for row, r in zip(rows, over):
            self._kept.add(row, part[r], (len(part[r]),))
            self._free_since[row] = self._turn

    def _draw_many(self, logits: torch.Tensor, lives: list[_Live], source: list[int]) -> None:
        """Sample first tokens: many samples may read one row of logits. They are sampled in blocks of constant
        height."""
        block = max(self.slots, 1)
        for first in range(0, len(lives), block):
            part, rows = lives[first : first + block], source[first : first + block]
            pad = block - len(part) if self.fixed else 0
            index = torch.as_tensor(rows + [0] * pad, device=logits.device)
            self._draw(logits[index], [*part, *[None] * pad])

    def _forget(self) -> None:
        """Free the slots of callers that have gone away."""
        self._waiting = deque(w for w in self._waiting if not w[1].done())
        self._ready = deque(r for r in self._ready if not r.live.parts.future.done())
        for row, live in enumerate(self._rows):
            if live is not None and live.parts.future.done():
                self._leave(row, live)

    def _seat(self) -> None:
        """Give free slots to waiting samples. Samples of one prefill are copied together."""
        together: dict[int, list[tuple[int, _Ready]]] = {}
        rows: Sequence[int] = range(self.slots)
        if self.reuse and self._ready:  # the slot that has waited longest for a continuing prompt is given away first
            self._turn += 1
            rows = sorted(rows, key=self._free_since.__getitem__)
        for row in rows:
            if self._ready and self._rows[row] is None:
                self._kept.drop(row)
                ready = self._next_ready()
                together.setdefault(id(ready.kept), []).append((row, ready))
                self._rows[row], self._index[row] = ready.live, ready.length
                self._last[row] = ready.live.tokens[-1]
        for part in together.values():
            self._cache.write([row for row, _ in part], part[0][1].kept, [r.source for _, r in part])
        if self._ahead is not None and (new := [one for part in together.values() for one in part]):
            state = [(r.length, r.live.tokens[-1], len(r.live.tokens), *r.live.keys) for _, r in new]
            self._ahead.seat([row for row, _ in new], state, [r.live.request.law.temperature for _, r in new])

    def _busy(self, ready: bool = True) -> Counter[Any]:
        """How many samples of each party have a slot, or are `ready` for one."""
        lives = [live for live in self._rows if live is not None] + [r.live for r in self._ready if ready]
        return Counter(self._parties.get(live.parts.future) for live in lives)

    def _next_ready(self) -> _Ready:
        """The sample to seat next: the first one, or that of the party with the fewest slots."""
        if not self._parties:
            return self._ready.popleft()
        held = self._busy(ready=False)
        at = min(range(len(self._ready)), key=lambda k: held[self._parties.get(self._ready[k].live.parts.future)])
        ready = self._ready[at]
        del self._ready[at]
        return ready

    @torch.inference_mode()
    def _decode(self) -> None:
        self.lm.train(False)
        if self._ahead is not None:
            return self._decode_ahead(self._ahead)
        rows, width = self.slots, self.capacity
        if not self.fixed:
            width = -(-(int(self._index.max()) + 1) // self.bucket) * self.bucket
            rows = self._close_gaps(width)
        index, last = (torch.as_tensor(x[:rows], device=self._ids.device) for x in (self._index, self._last))
        lives = self._rows[:rows]
        self._draw(self._next(index, last, width), lives)
        self._advance(lives)

    def _close_gaps(self, width: int) -> int:
        """How many of the first slots hold all samples. If many of these are free, the last samples move there."""
        used = [row for row, live in enumerate(self._rows) if live is not None]
        free = [row for row in range(len(used)) if self._rows[row] is None]
        if 8 * len(free) < used[-1] + 1 or not free:
            return used[-1] + 1
        moving = used[len(used) - len(free) :]
        self._cache.move(moving, free, width)
        for row, to in zip(moving, free):
            self._rows[to], self._index[to], self._last[to] = self._rows[row], self._index[row], self._last[row]
            self._rows[row], self._index[row], self._last[row] = None, 0, 0
        return len(used)

    def _decode_ahead(self, ahead: Ahead) -> None:
        """Start a step, then read the step before it. If a law needs sampling on the host, or a listener wants the most
        likely tokens, the host waits for this step."""
        waits = any(
            live is not None and (not live.simple or self._listeners.get(live.parts.future, (None, 0))[1])
            for live in self._rows
        )
        if self._flying is not None and waits:
            self._land(ahead)
        if not any(self._rows):
            self._flying = None  # all samples of that step have ended
            return
        started = ahead.launch(), list(self._rows)
        if self._flying is not None:
            self._land(ahead)
        self._flying = started
        if waits:
            self._land(ahead)

    def _land(self, ahead: Ahead) -> None:
        """Read the tokens of the step in progress, and free the slots of samples that it ended."""
        assert self._flying is not None
        (number, lives), self._flying = self._flying, None
        # the other samples had ended before this step
        lives = [live if live is self._rows[row] else None for row, live in enumerate(lives)]
        drawn, complex_ = ahead.read(number), []
        for row, (live, (t, p, q)) in enumerate(zip(lives, drawn.tolist())):
            if live is None:
                continue
            if live.simple:
                live.tokens.append(int(t))
                live.logp.append(p)
                live.logq.append(q)
                self.decoded += 1
            else:
                complex_.append(row)
        if complex_ or self._listeners:
            assert ahead.logits is not None
            if complex_:
                at = torch.as_tensor(complex_, device=ahead.logits.device)
                self._draw_by_law(ahead.logits[at], [lives[row] for row in complex_])
                ahead.correct(complex_, [lives[row].tokens[-1] for row in complex_])  # type: ignore[union-attr]
            if self._listeners:
                self._note_top(working(ahead.logits), lives)
        self._advance(lives)

    def _advance(self, lives: Sequence[_Live | None]) -> None:
        """Update the slots after a step: one token longer, or free."""
        for row, live in enumerate(lives):
            if live is None:
                continue
            self._index[row] += 1
            self._last[row] = live.tokens[-1]
            if self._ended(live):
                self._leave(row, live)

    def _leave(self, row: int, live: _Live) -> None:
        """Free a slot. A later prompt may begin with what it holds."""
        self._rows[row], self._index[row], self._last[row] = None, 0, 0
        if self.reuse:
            prompt = live.request.prompt
            self._kept.add(row, (*prompt, *live.tokens[:-1]), (len(prompt), len(prompt) + len(live.tokens) - 1))
            self._free_since[row] = self._turn

    def _next(self, index: torch.Tensor, last: torch.Tensor, width: int) -> torch.Tensor:
        """The logits after the last token of every slot, [slots, V]."""
        hidden = self.lm.hidden(last[:, None], self._cache.at(index, width), index[:, None])
        return self.lm.logits(hidden[:, 0])

    # -- drawing and stopping -----------------------------------------------------------------------------------

    def _draw(self, logits: torch.Tensor, lives: Sequence[_Live | None]) -> None:
        """Sample one token for every live row of logits [N, V], and append it with its two log-probs."""
        if self._ahead is None:
            return self._draw_by_law(logits, lives)
        easy = [live for live in lives if live is not None and live.simple]
        if easy:  # all rows, so that the shape is constant
            idle = (0, 0, 0, 1.0)
            state = [idle if x is None else (*x.keys, len(x.tokens), x.request.law.temperature) for x in lives]
            keys = torch.as_tensor([x[:2] for x in state], device=logits.device)
            written = torch.as_tensor([x[2] for x in state], device=logits.device)
            heat = torch.as_tensor([x[3] for x in state], dtype=self._ahead.heat.dtype, device=logits.device)
            drawn = self._drawer(logits, keys, written, heat, self._ahead.ids).cpu()
            for live, (t, p, q) in zip(lives, drawn.tolist()):
                if live is not None and live.simple:
                    live.tokens.append(int(t))
                    live.logp.append(p)
                    live.logq.append(q)
                    self.decoded += 1
        hard = [k for k, live in enumerate(lives) if live is not None and not live.simple]
        if hard:
            at = torch.as_tensor(hard, device=logits.device)
            self._draw_by_law(logits[at], [lives[k] for k in hard])
        if self._listeners and easy:
            self._note_top(working(logits), lives)

    def _drawer(self, *args: torch.Tensor) -> torch.Tensor:
        """`draw`, compiled if the model is, so that it samples as the recorded step does."""
        if self._compiled_draw is None:
            big = self.lm.device.type == "cuda" and self.lm.compiled.worth(self.lm.base)
            self._compiled_draw = compiled.whole(draw, "the drawing of tokens") if big else draw
        return self._compiled_draw(*args)

    def _draw_by_law(self, logits: torch.Tensor, lives: Sequence[_Live | None]) -> None:
        """As `_draw`, under any law."""
        laws = [OWN if live is None else live.request.law for live in lives]
        under = own = working(logits)
        if guides := [(row, live.guide) for row, live in enumerate(lives) if live is not None and live.guide]:
            may = torch.ones(logits.shape, dtype=torch.bool)
            for row, guide in guides:
                may[row] = torch.from_numpy(guide.allowed())
            under = logits = own.masked_fill(~may.to(own.device), NEVER)
        one = all(law is laws[0] for law in laws)  # the usual case, without hashing laws
        if not one or not laws[0].plain:
            table = {law: k for k, law in enumerate(dict.fromkeys(laws[:1] if one else laws))}
            index = np.array([0 if one else table[law] for law in laws])
            written = np.array([0 if live is None else len(live.tokens) for live in lives])
            under = law_logits(logits, list(table), index, written)
        listed = {law.allowed for law, live in zip(laws, lives) if live is not None}
        if None in listed:
            token = (under + self._noise(lives, own.dtype)).argmax(-1)
        else:  # noise for labels only
            ids = torch.as_tensor(sorted({t for allowed in listed for t in allowed or ()}), device=own.device)
            token = ids[(under[:, ids] + gumbel(*_keys(lives, own.device), ids, own.dtype)).argmax(-1)]
        logp = chosen(own, token)
        for live, t, p, q in zip(lives, *as_lists(token, logp, logp if under is own else chosen(under, token))):
            if live is not None:
                live.tokens.append(t)
                live.logp.append(p)
                live.logq.append(q)
                self.decoded += 1
                if live.guide is not None:
                    live.guide.take(t)
        if self._listeners:
            self._note_top(own, lives)

    def _noise(self, lives: Sequence[_Live | None], dtype: torch.dtype) -> torch.Tensor:
        """[N, V] noise for the next token of every sample. Little of it costs a CPU as much as that of several tokens,
        so it is computed for several."""
        many = min(NOISE_AHEAD, SMALL_NOISE // (len(lives) * len(self._ids)))
        if many < 2 or self._ids.device.type != "cpu":
            return gumbel(*_keys(lives, self._ids.device), self._ids, dtype)
        spent = [live for live in lives if live is not None and len(live.tokens) >= live.noise_end]
        if spent:
            keys, written = _keys(spent, self._ids.device)
            places = (written[:, None] + torch.arange(many)).view(-1)
            made = gumbel(keys.repeat_interleave(many, 0), places, self._ids, dtype).view(len(spent), many, -1)
            for live, noise in zip(spent, made.numpy()):
                live.noise, live.noise_end = noise, len(live.tokens) + many
        idle = np.zeros(len(self._ids), np.float64 if dtype == torch.float64 else np.float32)
        rows = [idle if live is None else live.noise[len(live.tokens) - live.noise_end] for live in lives]
        return torch.from_numpy(np.stack(rows))

    def _note_top(self, logits: torch.Tensor, lives: Sequence[_Live | None]) -> None:
        none = (None, 0)
        wanted = [0 if live is None else self._listeners.get(live.parts.future, none)[1] for live in lives]
        if max(wanted):
            best = most_likely(logits, max(wanted))
            for live, k, ids, values in zip(lives, wanted, *(x.tolist() for x in best)):
                if live is not None:
                    live.top = tuple(zip(ids[:k], values[:k]))

    def _ended(self, live: _Live) -> bool:
        done = self._completion(live)
        if live.parts.future in self._listeners:
            tell = self._listeners[live.parts.future][0]
            tell(Written(live.sample, live.tokens[-1], live.logp[-1], live.logq[-1], live.top, done))
        if done is not None:
            live.parts.deliver(live.sample, done)
        return done is not None

    def _completion(self, live: _Live) -> Completion | None:
        """The finished sample, if its last token ended it; else None."""
        request, tokens = live.request, live.tokens
        stop: Stop | None = None
        text = None
        if tokens[-1] in request.stop_ids:
            stop, text = "stopped", self.tokenizer.decode(tokens[:-1])
        elif live.watch is not None and (at := live.watch.add(tokens[-1])) is not None:
            text = live.watch.cut(self.tokenizer.decode(tokens), at)
            stop = None if text is None else "stop_string"
        full = len(request.prompt) + len(tokens) >= self.max_len
        if stop is None and (full or len(tokens) >= request.max_tokens):
            stop = "length" if len(tokens) >= request.max_tokens else "context_full"
            text = self.tokenizer.decode(tokens)
        if stop is None:
            return None
        return Completion(tuple(tokens), tuple(live.logp), tuple(live.logq), text or "", stop)


def _keys(lives: Sequence[_Live | None], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The draw keys of samples, and how many tokens each has."""
    keys = np.array([(0, 0) if live is None else live.keys for live in lives])
    written = np.array([0 if live is None else len(live.tokens) for live in lives])
    return torch.as_tensor(keys, device=device), torch.as_tensor(written, device=device)


def as_lists(token: torch.Tensor, logp: torch.Tensor, logq: torch.Tensor) -> tuple[list[int], list[float], list[float]]:
    """Three tensors [N] as lists, in one transfer."""
    if token.device.type == "cpu":
        return token.tolist(), logp.tolist(), logq.tolist()
    real = logp.dtype if token.device.type == "mps" else torch.float64
    t, p, q = torch.stack([x.to(real) for x in (token, logp, logq)]).tolist()
    return [int(x) for x in t], p, q


@dataclass(eq=False)
class _Ready:
    live: _Live
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]]
    source: int
    length: int
