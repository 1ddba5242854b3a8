"""Our engine in this process against `transformers.generate`: the same weights, prompts, law and stopping tokens.

    python bench/sampling.py [--repeats 7] [--sizes 0.2M,2.5M,135M] [--quick]

Free text: groups of 8 samples share a prompt of 12 to 60 tokens, and end at one of 8 stopping tokens or after 64
tokens, so lengths are ragged; counted are tokens up to the stop. Ours returns log-probs with them, `generate` does not.
Labels: one decision is one token out of six, over distinct prompts of 60 to 96 tokens.
135M is the shape of SmolLM2-135M with random weights. It has 49,152 tokens, so almost none of its texts ends early.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import compare, one_thread

from trailmark.engines.base import Request, run
from trailmark.engines.local import LocalEngine
from trailmark.models.lm import LM
from trailmark.models.tiny import build, tiny_config, tiny_tokenizer
from trailmark.types import SamplingLaw

PEER = "transformers.generate"
STOPS, LONGEST, GROUP = tuple(range(200, 208)), 64, 8
LABELS = tuple(range(15, 21))
SHAPES: dict[str, dict[str, Any]] = {
    "0.2M": {"layers": 2, "width": 64, "heads": 4},
    "2.5M": {"layers": 4, "width": 224, "heads": 4},
    "135M": {"layers": 30, "width": 576, "heads": 9, "kv_heads": 3, "ffn": 1536, "vocab": 49152, "tied": True},
}


def pair(size: str) -> tuple[LM, torch.nn.Module]:
    """One set of weights behind our attention and behind theirs."""
    from transformers import AutoModelForCausalLM

    tokenizer = tiny_tokenizer()
    config = tiny_config("llama", **{"vocab": len(tokenizer), "context": 256, **SHAPES[size]})
    ours = build(config, 0)
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", trust_remote_code=False).eval()
    theirs.load_state_dict(ours.state_dict())
    return LM(ours, tokenizer, size), theirs


def prompts(n: int, low: int, high: int) -> list[tuple[int, ...]]:
    draw = np.random.default_rng(n)
    return [tuple(int(t) for t in draw.integers(0, 200, draw.integers(low, high + 1))) for _ in range(n)]


def padded(rows: list[tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Padded on the left, as `generate` wants it."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(r)) + list(r) for r in rows])
    mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows])
    return {"input_ids": ids, "attention_mask": mask}


def often(batch: int, once: Callable[[], float]) -> Callable[[], float]:
    """Small batches several times over: their ragged lengths, and the clock, are then worth comparing."""
    return lambda: sum(once() for _ in range(max(1, 64 // batch)))


def free_text(size: str, batch: int, fixed: bool, repeats: int) -> None:
    lm, theirs = pair(size)
    shared = prompts(max(1, batch // GROUP), 12, 60)
    engine = LocalEngine(lm, slots=batch, max_len=128, fixed=fixed)
    law, seed = SamplingLaw(), iter(range(10**9))

    def ours() -> float:
        k = next(seed)
        asked = [Request(p, law, GROUP, LONGEST, STOPS, seed=k, key=str(i)) for i, p in enumerate(shared)]
        return sum(len(c.tokens) for done in run(engine, asked) for c in done)

    inputs = padded(shared)
    width = inputs["input_ids"].shape[1]

    def peer() -> float:
        with torch.inference_mode():
            out = theirs.generate(**inputs, do_sample=True, max_new_tokens=LONGEST, num_return_sequences=GROUP, top_k=0,
                                  eos_token_id=list(STOPS), pad_token_id=0)[:, width:]  # fmt: skip
        stopped = torch.isin(out, torch.tensor(STOPS))
        first = torch.where(stopped.any(1), stopped.float().argmax(1) + 1, out.shape[1])
        return float(first.sum())

    kind = "fixed shapes" if fixed else "free shapes"
    compare(f"sampling/text {size} batch {batch}{' fixed' if fixed else ''}", often(batch, ours), often(batch, peer),
            PEER, "tokens/s", repeats, f"free text, groups of {GROUP}, ragged, {kind}")  # fmt: skip


def labels(size: str, batch: int, repeats: int) -> None:
    lm, theirs = pair(size)
    rows = prompts(batch, 60, 96)
    engine = LocalEngine(lm, slots=min(batch, 64), max_len=128, fixed=False)
    law = SamplingLaw(allowed=LABELS)

    def ours() -> float:
        return sum(len(done) for done in run(engine, [Request(p, law, 1, 1, key=str(i)) for i, p in enumerate(rows)]))

    inputs = padded(rows)
    allowed = list(LABELS)

    def peer() -> float:
        with torch.inference_mode():
            out = theirs.generate(**inputs, do_sample=True, max_new_tokens=1, top_k=0, pad_token_id=0,
                                  prefix_allowed_tokens_fn=lambda _, __: allowed)  # fmt: skip
        return float(len(out))

    compare(
        f"sampling/labels {size} batch {batch}",
        often(batch, ours),
        often(batch, peer),
        PEER,
        "decisions/s",
        repeats,
        "one label of six, distinct prompts",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--sizes", default=",".join(SHAPES))
    parser.add_argument("--quick", action="store_true", help="the smallest batch of each, to see that it runs")
    args = parser.parse_args()
    sizes = ["0.2M"] if args.quick else args.sizes.split(",")
    one_thread()
    if "0.2M" in sizes:
        batches = (8,) if args.quick else (8, 64, 256)
        for batch in batches:
            free_text("0.2M", batch, False, args.repeats)
        free_text("0.2M", batches[-1] if args.quick else 64, True, args.repeats)
        for batch in batches:
            labels("0.2M", batch, args.repeats)
    for size in sizes:
        if size != "0.2M":
            free_text(size, 64, False, args.repeats)
            labels(size, 64, args.repeats)


if __name__ == "__main__":
    main()
