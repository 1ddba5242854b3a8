"""What a recipe will take: memory, tokens and time, before it runs.

Memory is counted from the shapes of the models (`Method.holds`) and of the batches:

    weights       of every model, and of an engine's copy in another dtype
    gradients     of the trained weights, in their dtype
    optimiser     two moments for each trained weight, in its dtype (one byte each with bits: 8), and the moving average
    moved         what `learner.offload` brings to a GPU only while no activations lie there
    activations   what one micro-batch keeps for its backward pass (`kept_floats`), and the logits that exist at once
    engine        keys and values of all slots, which lie there whether they are used or not

Tokens are those of the first steps: rows of a file are drawn as training will draw them; of a task the starts are
drawn and shown, and the answers are as long as they may be at most. The probe plays and learns a few steps in a
folder that is thrown away. They are the first steps of the run itself, so it counts what will really be written, and
it gives the seconds of each phase. A model that does not fit the free memory is not loaded, and nothing is probed.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trailmark.config import RunConfig
from trailmark.engines import local
from trailmark.errors import ModelError, TrailmarkError
from trailmark.learn.budget import CHUNK, places
from trailmark.learn.checkpoint import seed_all
from trailmark.memory import free_memory, size
from trailmark.methods import get_method
from trailmark.methods.base import Method, ModelInMemory
from trailmark.models.context_limit import context_of, text_config
from trailmark.models.load import describe, pick_device, shape_of
from trailmark.runs.store import Run
from trailmark.seats.open import watching
from trailmark.seats.pinned_models import pin_models
from trailmark.types import Sample

STEPS = 3  # of the probe
LONG = 1800  # seconds that one would not like to lose
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


@dataclass
class Memory:
    """Bytes, by what they are for. `free` is None if the system does not say."""

    weights: float = 0
    gradients: float = 0
    optimiser: float = 0
    activations: float = 0
    engine: float = 0
    moved: float = 0
    device: str = "cpu"
    free: int | None = None

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimiser + max(self.activations, self.moved) + self.engine


@dataclass
class Tokens:
    """Tokens of one step. `learnt` are those of all samples, of which `trained` are in the loss. `prompt` and
    `written` are those of play. Without a probe they are of `first_turns` only, with answers of full length."""

    learnt: float = 0
    trained: float = 0
    prompt: float = 0
    written: float = 0
    longest: int = 0  # sequence
    first_turns: bool = False
    computed: float = 0  # of first turns: each prompt counted once, whoever shares it


@dataclass
class Part:
    """One training of a recipe."""

    name: str
    steps: int
    memory: Memory
    tokens: Tokens | None = None
    seconds: dict[str, float] | None = None  # of each phase of a step
    evaluations: int = 0
    evaluation_seconds: float = 0
    warnings: list[str] = field(default_factory=list)

    @property
    def total_seconds(self) -> float | None:
        if self.seconds is None:
            return None
        return self.steps * sum(self.seconds.values()) + self.evaluations * self.evaluation_seconds


@dataclass
class Plan:
    parts: list[Part]

    @property
    def warnings(self) -> list[str]:
        named = [(f"{p.name}: " if p.name else "", w) for p in self.parts for w in p.warnings]
        return [name + text for name, text in named]

    def to_dict(self) -> dict[str, Any]:
        out = []
        for p in self.parts:
            more = {} if p.tokens is None else {"tokens": asdict(p.tokens) | {"in_all": p.steps * p.tokens.learnt}}
            memory = asdict(p.memory) | {"total": p.memory.total}
            out.append(asdict(p) | {"memory": memory, "total_seconds": p.total_seconds} | more)
        return {"parts": out, "warnings": self.warnings}


def make_plan(config: RunConfig, probe: bool = True) -> Plan:
    """The plan of a recipe, with a part for each of its trainings."""
    trainings = get_method(config.method).trainings(pin_models(config))
    return Plan([_part(name, cls, inner, probe) for name, cls, inner in trainings])


def _part(name: str, cls: type[Method], config: Any, probe: bool) -> Part:
    held = cls.models_in_memory(config)
    device = pick_device(config.model.device)
    part = Part(name, config.steps, Memory(device=device, free=free_memory(device)))
    count_models(part.memory, held, config)
    part.warnings += _schedule_warnings(config)
    if _too_large(part):
        return part
    with tempfile.TemporaryDirectory(prefix="trailmark-plan-") as folder:
        run = Run(Path(folder))
        run.episodes_dir.mkdir()
        run.checkpoints_dir.mkdir()
        seed_all(config.seed)
        engines = Watched()
        with watching(engines):
            method = cls(config.model_copy(update={"out": folder}), run)
            part.steps = method.config.steps
            samples = _measure(part, method, engines, probe)
        starts = config.eval.n or _all_starts(method, config)
        learner = method.learner
        packed = [p.ids.shape for p in learner.pack(samples)] if samples else []
        budget = config.learner.micro_tokens or places(learner.models, learner.optimisers, config.learner.amp == "bf16")
    if not packed and part.tokens is not None:
        shares = config.learner.layout in ("auto", "tree")
        tokens = part.tokens.computed if shares else part.tokens.learnt
        packed = [(1, max(int(min(tokens, budget)), part.tokens.longest))]
    for rows, width in packed:
        each = [(h.optim is not None, activations(h, rows * width, width, config, device)) for h in held]
        learns = sum(n for trained, n in each if trained)
        part.memory.activations = max(part.memory.activations, learns, *(n for trained, n in each if not trained), 0)
    _too_large(part)
    _room_warnings(part, config, budget)
    part.evaluations = _evaluations(config, part.steps)
    if part.seconds and part.evaluations and part.tokens:
        part.evaluation_seconds = _evaluation_seconds(part, config, starts)
    if (part.total_seconds or 0) > LONG and not (config.checkpoint.every and config.checkpoint.every < part.steps):
        part.warnings.append(
            f"about {part.total_seconds or 0:,.0f} s and no checkpoint on the way: a run that is killed begins again; "
            "set checkpoint.every"
        )
    return part


# --- memory ----------------------------------------------------------------------------------------------------------


def count_models(memory: Memory, held: Sequence[ModelInMemory], config: Any) -> None:
    """Everything that does not depend on a batch."""
    away = config.learner.offload if memory.device.startswith("cuda") else []
    for h in held:
        count, item = int(describe(h.model)["parameters"]), BYTES[h.model.dtype]
        base = {"int8": 1.0, "int4": 0.5}.get(h.model.quant, item)
        adapter = adapter_weights(h.model) if h.model.lora else 0
        trained = adapter or count
        if h.optim is None and h.engine is None and not h.stays and "frozen" in away:
            memory.moved = max(memory.moved, count * base)
        else:
            memory.weights += count * base + adapter * item
        if h.optim is not None:
            moved = trained if adapter or h.output else trained - output_weights(h.model)
            memory.gradients += moved * item
            moments = moved * 2 * (1 if h.optim.bits == 8 else item)
            if "optimiser" in away:
                memory.moved = max(memory.moved, moments)
            else:
                memory.optimiser += moments
            memory.optimiser += trained * (4 if config.learner.ema else 0)
        if h.engine is not None:
            wanted = h.engine.dtype or h.model.dtype
            memory.weights += count * BYTES[wanted] if wanted != h.model.dtype else 0
            memory.engine += kept_keys(_shape(h.model), h.engine, BYTES[wanted], memory.device)


def _shape(model: Any) -> Any:
    c = text_config(shape_of(model))
    if not hasattr(c, "num_attention_heads"):
        raise ModelError(f"model '{model.name}' ({c.model_type}) has no attention heads: use another family")
    return c


def output_weights(model: Any) -> int:
    """The weights of the output layer, if they are its own."""
    c = _shape(model)
    return 0 if c.tie_word_embeddings else c.vocab_size * c.hidden_size


def adapter_weights(model: Any) -> int:
    """The weights of LoRA on linear layers: for each, rank * (inputs + outputs)."""
    c = _shape(model)
    w, ffn, queries, keys = _widths(c)
    if c.model_type == "gpt2":
        sizes = {"c_attn": w + 3 * w, "c_proj": (w + w) + (ffn + w), "c_fc": w + ffn}
    else:
        sizes = {
            "q_proj": w + queries, "k_proj": w + keys, "v_proj": w + keys, "o_proj": queries + w,
            "gate_proj": w + ffn, "up_proj": w + ffn, "down_proj": ffn + w,
        }  # fmt: skip
    wanted = sizes if model.lora.targets == "all-linear" else model.lora.targets
    return model.lora.rank * c.num_hidden_layers * sum(sizes.get(name, 0) for name in wanted)


def _widths(c: Any) -> tuple[int, int, int, int]:
    """Of the model, its feed-forward layers, all query heads, and all key heads."""
    w, heads = c.hidden_size, c.num_attention_heads
    ffn = getattr(c, "intermediate_size", None) or getattr(c, "n_inner", None) or 4 * w
    ffn = max(ffn) if isinstance(ffn, list) else ffn  # some families have one for each layer
    each = getattr(c, "head_dim", None) or w // heads
    return w, ffn, heads * each, (getattr(c, "num_key_value_heads", None) or heads) * each


def kept_keys(c: Any, engine: Any, item: int, device: str) -> float:
    """Keys and values of all slots of an engine, and its logits."""
    longest = min(engine.max_len or local.DEFAULT_LEN, context_of(c))
    bucket = local.FLEX_BLOCK if device.startswith("cuda") else local.BUCKET
    capacity = -(-longest // bucket) * bucket
    return engine.max_num_seqs * (2 * c.num_hidden_layers * _widths(c)[3] * capacity * item + 4 * c.vocab_size)


def activations(h: ModelInMemory, tokens: int, row: int, config: Any, device: str) -> float:
    """Bytes for a micro-batch of `tokens` in rows of `row`: what is kept for the backward pass, and the logits that
    exist at once."""
    c, item = _shape(h.model), BYTES[h.model.dtype]
    item = 3 if config.learner.amp == "bf16" and item == 4 else item
    block, rest = kept_floats(c, row, device)
    if h.optim is None:  # it is read at most, one block after the other
        return 2 * tokens * item * block
    layers = c.num_hidden_layers
    kept = layers * c.hidden_size + block if h.model.gradient_checkpointing else layers * block
    return tokens * item * (kept + rest) + min(tokens, CHUNK) * c.vocab_size * 12


def kept_floats(c: Any, row: int, device: str) -> tuple[int, int]:
    """Numbers that a pass over one token keeps, in each block and outside of them. On a CPU attention keeps a mask, one
    number for each token of the row; on a GPU it keeps none, and compiled blocks keep less."""
    w, ffn, queries, keys = _widths(c)
    heads = c.num_attention_heads
    if device.startswith("cuda"):
        return 8 * w + 3 * ffn, 3 * w
    if c.model_type == "gpt2":
        return 8 * w + 5 * ffn + heads + 4 + row, w + 6
    return 6 * w + 2 * queries + 2 * keys + 4 * ffn + heads + 2 + row, 2 * w + 2 * queries // heads + 3


def _too_large(part: Part) -> bool:
    m = part.memory
    part.warnings[:] = [w for w in part.warnings if "does not fit" not in w]
    if m.free is None or m.total <= m.free:
        return False
    keys = {
        "weights": "model.dtype, model.quant or a smaller model", "gradients": "model.lora", "optimiser": "model.lora",
        "activations": "learner.micro_tokens or model.gradient_checkpointing",
        "engine": "engine.max_num_seqs or engine.max_len",
    }  # fmt: skip
    most = max(keys, key=lambda k: getattr(m, k))
    part.warnings.append(
        f"it does not fit: it needs about {size(m.total)}, and {size(m.free)} are free on {m.device}. Most of it is "
        f"for {most} ({size(getattr(m, most))}): look at {keys[most]}"
    )
    return True


# --- tokens and time -------------------------------------------------------------------------------------------------


class Watched:
    """The engines that a method opens: what they are asked for (a prompt, the most tokens), and how long publishing to
    them takes. Without `answers` the prompts are only measured."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, int]] = []
        self.answers, self.publishing = True, 0.0

    def __call__(self, engine: Any) -> None:
        draw, publish = engine.sample, engine.publish

        async def sample(request: Any, *a: Any, **k: Any) -> Any:
            self.asked.extend([(request.prompt, request.max_tokens)] * request.n)
            if not self.answers:
                raise local.EngineError("the prompt was only measured")
            return await draw(request, *a, **k)

        async def timed(*a: Any, **k: Any) -> None:
            began = time.perf_counter()
            try:
                await publish(*a, **k)
            finally:
                self.publishing += time.perf_counter() - began

        engine.sample, engine.publish = sample, timed


def _measure(part: Part, method: Method, engines: Watched, probe: bool) -> list[Sample]:
    """Tokens of the first steps, and with the probe their seconds. Returns the samples of one step."""
    steps = min(STEPS, part.steps)
    if getattr(method.config, "overlap", False):  # play no batch that is not measured
        method.config = method.config.model_copy(update={"steps": steps if probe else 1})
    if probe:
        return _probe(part, method, engines, steps)
    try:
        drawn = [method.unscored_samples(step) for step in range(1, steps + 1)]
        samples = [s for step in drawn for s in step or []]
    except NotImplementedError:
        samples, drawn = [], [None]
    if drawn[0] is not None:
        part.tokens = _of_samples(samples, steps)
        return drawn[0]
    engines.answers = False
    with contextlib.suppress(TrailmarkError):
        for _ in method.updates(1):
            break
    if asked := engines.asked:
        prompt, most = sum(len(p) for p, _ in asked), sum(n for _, n in asked)
        longest, once = max(len(p) + n for p, n in asked), sum(len(p) for p in {p for p, _ in asked})
        part.tokens = Tokens(prompt + most, most, prompt, most, longest, True, once + most)
    return []


def _of_samples(samples: Sequence[Sample], steps: int) -> Tokens:
    trained = sum(int(np.any([s.streams[n] != 0 for n in _in_loss(s)], 0).sum()) for s in samples)
    total = sum(len(s.tokens) for s in samples)
    return Tokens(total / steps, trained / steps, longest=max((len(s.tokens) for s in samples), default=0))


def _in_loss(s: Sample) -> list[str]:
    """The streams that say which tokens are trained on; a value counts where nothing else is learnt."""
    named = [n for n in ("weight", "action", "class_weight") if n in s.streams]
    return named or [n for n in ("value_weight",) if n in s.streams]


def _probe(part: Part, method: Method, engines: Watched, steps: int) -> list[Sample]:
    """The first steps, really made. The first one also warms up, so with several it is not timed."""
    spent = dict.fromkeys(("sample", "score", "update", "publish"), 0.0)
    fill = method.learner.fill

    def scored(*a: Any, **k: Any) -> Any:
        began = time.perf_counter()
        try:
            return fill(*a, **k)
        finally:
            spent["score"] += time.perf_counter() - began

    method.learner.fill = scored  # type: ignore[method-assign]
    every: list[Sample] = []
    written = learnt = trained = timed = 0
    last: list[Sample] = []
    for step in range(1, steps + 1):
        if step == 2:
            spent.update(dict.fromkeys(spent, 0.0))
            engines.publishing, timed = 0.0, 0
        timed += 1
        last, began, before = [], time.perf_counter(), spent["score"] + engines.publishing
        for update in method.updates(step):
            made = time.perf_counter()
            spent["sample"] += made - began
            inside = spent["score"]
            method.learner.update(update)
            began = time.perf_counter()
            spent["update"] += began - made - (spent["score"] - inside)
            last += update.samples
            learnt += update.passes * sum(len(s.tokens) for s in update.samples)
            trained += update.passes * int(_of_samples(update.samples, 1).trained)
        spent["sample"] += time.perf_counter() - began - (spent["score"] + engines.publishing - before)
        every += last
        written += int(method.metrics().get("written_tokens", 0))
    spent["publish"] = engines.publishing
    longest = max((len(s.tokens) for s in every), default=0)
    prompts = sum(len(prompt) for prompt, _ in engines.asked)
    part.tokens = Tokens(learnt / steps, trained / steps, prompts / steps, written / steps, longest)
    part.seconds = {name: max(0.0, s) / timed for name, s in spent.items()}
    return last


def _evaluations(config: Any, steps: int) -> int:
    return math.ceil(steps / config.eval.every) + config.eval.first if config.eval.every else 0


def _all_starts(method: Any, config: Any) -> int:
    """The number of starts of the split that is evaluated."""
    source = getattr(method, "source", None)
    return len(source.tasks(config.eval.split)) if config.eval.every and source is not None else 0


def _evaluation_seconds(part: Part, config: Any, starts: int) -> float:
    """An evaluation plays its starts as fast as a step plays its own. One that reads a file takes a third of what
    learning the same number of rows takes."""
    assert part.seconds is not None
    if part.tokens is not None and part.tokens.written:
        rl = getattr(config, "rl", None)
        episodes = config.prompts_per_step * config.n if rl is None else rl.prompts_per_step
        return part.seconds["sample"] * starts / max(1, episodes)
    return part.seconds["update"] / 3


# --- warnings --------------------------------------------------------------------------------------------------------


def _schedule_warnings(config: Any) -> list[str]:
    out = []
    if config.eval.every > config.steps:
        out.append(f"eval.every is {config.eval.every}, steps is {config.steps}: the only evaluation is at the end")
    if config.eval.patience is not None and not config.eval.every:
        out.append("eval.patience needs evaluations, and eval.every is 0: the run never stops early")
    if getattr(config, "eval_data", None) and not config.eval.every:
        out.append("eval_data is never read: eval.every is 0")
    if config.checkpoint.every > config.steps:
        every = config.checkpoint.every
        out.append(f"checkpoint.every is {every}, steps is {config.steps}: the only checkpoint is at the end")
    if (warmup := config.learner.optim.warmup) >= max(1, config.steps):
        out.append(f"learner.optim.warmup is {warmup:g} of {config.steps} steps: the learning rate never reaches lr")
    return out


def _room_warnings(part: Part, config: Any, budget: int) -> None:
    tokens = part.tokens
    longest = 0 if tokens is None else tokens.longest
    engine = getattr(config, "engine", None)
    if tokens is not None and tokens.first_turns and engine is not None:
        context = int(describe(config.model)["context"])
        room = min(engine.max_len or local.DEFAULT_LEN, context)
        if tokens.longest > room:
            key = f"engine.max_len={tokens.longest}" if context >= tokens.longest else "a model with a longer context"
            part.warnings.append(
                f"prompts and answers of up to {tokens.longest} tokens do not fit the {room} of the engine: answers "
                f"are cut, or prompts refused; set {key}, or lower sampling.max_tokens"
            )
    if longest > budget:
        part.warnings.append(
            f"a sequence has {longest} tokens and a micro-batch {budget}: each sequence is computed alone, and shared "
            f"prefixes are computed again; raise learner.micro_tokens"
        )
    if tokens is None:
        part.warnings.append("its tokens are not known before it runs")
