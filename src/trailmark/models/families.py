"""Model families, checked on tiny random models: Trailmark computes what transformers computes.

`check` builds a small model of a family with random weights in float64 and compares three things with transformers' own
attention: the gradient of a batch with shared prefixes, the log-probs, and greedy decoding. `trailmark models` prints
the table for the transformers that is installed.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trailmark.errors import TrailmarkError, first_line
from trailmark.models.attention import NAME
from trailmark.models.forward import pack, view
from trailmark.models.layout_check import decodes, richest_layout
from trailmark.models.lm import LM
from trailmark.models.readout import Readout
from trailmark.models.tiny import tiny_tokenizer
from trailmark.types import Sample

VOCAB, WIDTH, LAYERS, HEADS = 260, 32, 2, 4
CLOSE = 1e-9  # relative, in float64


@dataclass(frozen=True)
class Family:
    """The name of a transformers config, and what it needs besides the common sizes."""

    config: str
    extra: dict[str, Any]
    note: str = ""


EXPERTS = {"num_experts_per_tok": 2}
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, Family] = {
    "Llama 1-3, SmolLM2, MiniCPM in Llama's format": Family("LlamaConfig", {}),
    "Mistral, with its window": Family("MistralConfig", {"sliding_window": 8}),
    "Mixtral": Family("MixtralConfig", {"num_local_experts": 4, **EXPERTS}),
    "Qwen2": Family("Qwen2Config", {}),
    "Qwen3": Family("Qwen3Config", {"head_dim": 8}),
    "Qwen3 MoE": Family("Qwen3MoeConfig", {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 32, **EXPERTS}),
    "Gemma": Family("GemmaConfig", {"head_dim": 8}),
    "Gemma 2, with windows and soft caps": Family("Gemma2Config", {"head_dim": 8, **WINDOWS}),
    "Gemma 3, with windows": Family("Gemma3TextConfig", {"head_dim": 8, **WINDOWS}),
    "Phi-3": Family("Phi3Config", {"pad_token_id": 0}),
    "OLMo 2": Family("Olmo2Config", {}),
    "SmolLM3, layers without positions": Family("SmolLM3Config", {"no_rope_layers": [1, 0], "pad_token_id": 0}),
    "GPT-2": Family("GPT2Config", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "MiniCPM3": Family(
        "MiniCPM3Config",
        {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
    ),
}


@dataclass(frozen=True)
class Checked:
    family: str
    layout: str  # the richest layout that is exact, or "" if the family is refused
    gradient: float = 0.0  # relative distance from transformers
    logp: float = 0.0  # largest difference
    decoding: str = ""  # "equal", or why slots cannot decode it
    refused: str = ""


def config_of(family: Family) -> Any:
    import transformers

    made = getattr(transformers, family.config, None)
    if made is None:
        raise TrailmarkError(f"transformers {transformers.__version__} has no {family.config}")
    if family.config == "GPT2Config":
        sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 128}
    else:
        sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
                 "num_key_value_heads": HEADS if family.config == "MiniCPM3Config" else 2,
                 "intermediate_size": 48, "max_position_embeddings": 128}  # fmt: skip
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return made(vocab_size=VOCAB, **{**ends, **sizes, **family.extra})


def build_family(name: str) -> LM:
    """A tiny model of a family with random weights, large enough that attention matters."""
    from transformers import AutoModelForCausalLM

    config = config_of(FAMILIES[name])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = (
            AutoModelForCausalLM.from_config(config, attn_implementation=NAME, trust_remote_code=False).double().eval()
        )
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # grouped products know no float64
        with torch.no_grad():
            for p in model.parameters():
                if p.ndim > 1:
                    p.normal_(std=0.15)
    return LM(model, tiny_tokenizer(pad_is_eos=True), config.model_type)


def rows() -> list[np.ndarray]:
    """Rows that share beginnings at two levels, longer than the windows above."""
    draw = np.random.default_rng(0)
    a, b = draw.integers(0, VOCAB, 12), draw.integers(0, VOCAB, 7)
    ends = [draw.integers(0, VOCAB, n) for n in (5, 9, 3, 8)]
    return [np.r_[a, b, ends[0]], np.r_[a, b, ends[1]], np.r_[a, ends[2]], ends[3]]


def gradient(lm: LM) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in lm.model.parameters() if p.grad is not None])


@contextlib.contextmanager
def plain(lm: LM):
    """The model with transformers' own attention: SDPA, or eager where scores are capped."""
    capped = getattr(lm.base.config, "attn_logit_softcapping", None)
    try:
        lm.base.set_attn_implementation("eager" if capped else "sdpa")
        yield lm.base
    finally:
        lm.base.set_attn_implementation(NAME)


def check(name: str) -> Checked:
    """Compare one family with transformers."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            lm = build_family(name)
            lm.check_output_layer()
            layout, _ = richest_layout(lm)
    except (TrailmarkError, ValueError, TypeError, RuntimeError, AttributeError, IndexError) as problem:
        return Checked(name, "", refused=first_line(problem))
    samples = [Sample(r, {"weight": np.r_[0.0, np.ones(len(r) - 1)]}, {"weight": 1.0}) for r in rows()]
    lm.model.zero_grad(set_to_none=True)
    ours: dict[int, torch.Tensor] = {}
    place = {id(s): k for k, s in enumerate(samples)}
    for packed in pack({"policy": lm}, samples, layout):  # type: ignore[arg-type]
        seen = view({"policy": lm}, packed, [Readout("logp", law=False)], ["policy"])
        (seen["weight"] * seen["logp"]).sum().backward()
        for k, s in enumerate(packed.samples):
            ours[place[id(s)]] = seen.read["logp"][torch.as_tensor(packed.row == k)].detach()
    mine = gradient(lm).clone()
    lm.model.zero_grad(set_to_none=True)
    gap = 0.0
    with plain(lm) as base:
        for k, row in enumerate(rows()):
            ids = torch.as_tensor(row)[None]
            logp = base(input_ids=ids, use_cache=False).logits[0, :-1].double().log_softmax(-1)
            own = logp.gather(1, ids[0, 1:, None])[:, 0]
            own.sum().backward()
            gap = max(gap, float((own.detach() - ours[k][1:]).abs().max()))
    theirs = gradient(lm)
    lm.model.zero_grad(set_to_none=True)
    return Checked(name, layout, float((mine - theirs).norm() / theirs.norm()), gap, decodes(lm) or "equal")


def table(say: Callable[[str], None] = lambda name: None) -> list[Checked]:
    found = []
    for name in FAMILIES:
        say(name)
        found.append(check(name))
    return found


def markdown(found: list[Checked]) -> str:
    """The table as a page."""
    import transformers

    lines = [HEAD.format(version=transformers.__version__), "| family | layout | gradient | log-probs | decoding |"]
    lines.append("|---|---|---:|---:|---|")
    for c in found:
        if c.refused:
            lines.append(f"| {c.family} | refused | – | – | {c.refused} |")
        else:
            lines.append(f"| {c.family} | {c.layout} | {c.gradient:.1e} | {c.logp:.1e} | {c.decoding} |")
    return "\n".join([*lines, TAIL])


HEAD = """# Model families

`trailmark models --markdown > docs/models.md` makes this page. Each row is a tiny model of the family with random
weights in float64, compared with transformers {version}: the gradient of rows that share their beginnings (relative
distance), the log-probs (largest difference), and whether decoding token by token in slots equals one whole pass.
`tree`: shared beginnings are computed once. `trailmark train` makes the same checks on the model of a recipe and takes
the richest layout that is exact for it.
"""
TAIL = """
Families with attention sinks (gpt-oss), and those whose attention transformers cannot replace (Falcon, GPT-J, Bloom),
are refused. Those with a state of their own (convolutions, recurrences) are trained in padded rows and sampled behind a
server. A model that needs code from its own repository (the first MiniCPM) is refused: convert it to Llama's format
first.

A model whose rotary positions change with the length of a batch (`longrope`: Phi-3 with 128k) has its original context
here (4,096 tokens): up to there its numbers do not depend on the other rows. If a window is only in a model's masks
(Phi-3.5-MoE), its context ends with the window. `trailmark train` says so when it loads such a model.
"""
