"""VR-CLI on one GPU: a whole GRPO update over long prompts, and the reward's likelihoods, with shared prefixes (tree)
against packed rows (flat), in turns in one process.

    PYTHONPATH=src python bench/gpu_vrcli.py [--commit HASH] [--repeats 5]

SmolLM2-135M's shape with random weights, float32 with bfloat16 autocast, an adapter and gradient checkpointing, as in
recipes/vrcli-novels-gpu.yaml. An update is: old log-probs, those of the reference, the gradient, and the optimiser's
step, for 16 answers of 256 tokens to each prompt of 4,096. "one group" has one prompt, and all its 16 answers are in
one micro-batch: its memory is that of the layout. "four groups" has four prompts, and micro-batches fill the card. A
likelihood is that of a gold text of 512 tokens after the prompt and a plan. Writes bench/results/gpu_vrcli.jsonl and
prints a JSON line for each case; a case that stands there for this commit and device is not measured again, so a call
that was cut goes on. `--small` rehearses everything on a CPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from common import need_gpu
from gpu_training import DEVICE, SMALL, forget, keep, named, wait

from trailmark.config import LearnerConfig, ModelConfig
from trailmark.errors import LearnError
from trailmark.learn.learner import Learner, Update
from trailmark.models.adapters import add_lora
from trailmark.models.lm import LM
from trailmark.models.readout import Readout
from trailmark.models.tiny import tiny_tokenizer
from trailmark.objectives.clipped import Clipped
from trailmark.samples import build_samples
from trailmark.score.likelihood import Gold, likelihoods
from trailmark.types import Episode, Scored, Task, Turn

N = 16
PROMPT, WRITTEN, GOLD = (64, 8, 16) if SMALL else (4096, 256, 512)
LAYOUTS = ("tree", "flat")
WORDS = 500 if SMALL else 49152


def made(lora: bool) -> LM:
    sizes: dict[str, int] = (
        {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 128, "vocab_size": 512} if SMALL
        else {"num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3,
              "intermediate_size": 1536, "vocab_size": 49152}
    )  # fmt: skip
    shape = transformers.LlamaConfig(**sizes, max_position_embeddings=8192, tie_word_embeddings=True, use_cache=False)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model: Any = transformers.AutoModelForCausalLM.from_config(
            shape, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
        )
    if lora:
        config = ModelConfig.model_validate({"name": "smollm2", "lora": {"rank": 32, "alpha": 64}})
        model = add_lora(model, config).to(DEVICE)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    return LM(model, tiny_tokenizer(), "smollm2")


def plays(groups: int) -> list[Episode]:
    """`groups` prompts with 16 answers each; every group has its own prompt."""
    found = []
    for g in range(groups):
        draw = np.random.default_rng(g)
        prompt, *written = (
            tuple(int(t) for t in draw.integers(0, WORDS, size)) for size in (PROMPT, *[WRITTEN] * N)
        )
        for k, tokens in enumerate(written):
            turn = Turn("policy", prompt, tokens)
            found.append(Episode(f"{g}/{k}", Task(f"{g}"), f"{g}", (turn,), {"self": Scored(0.0)}))
    return found


def updates(groups: int, layout: str, whole: bool) -> Callable[[], float]:
    """A function that does one update. `whole`: a group in one micro-batch."""
    lm = made(lora=True)
    config = LearnerConfig.model_validate(
        {"layout": layout, "amp": "bf16", "micro_tokens": N * (PROMPT + WRITTEN) if whole else None}
    )
    learner = Learner({"policy": lm}, config, total=1000)
    played = plays(groups)
    advantage = {e.id: [float(a)] for e, a in zip(played, np.random.default_rng(1).normal(size=len(played)))}
    samples = build_samples(played, "policy", {"advantage": advantage}, mean="sequence")
    objective = Clipped(beta=1e-6, ref="policy/base")

    def step() -> float:
        filled = learner.fill(samples, old=Readout(""), ref=Readout("", model="policy/base"))
        return learner.update(Update(filled, objective))["grad_norm"]

    return step


def scores(layout: str) -> Callable[[], float]:
    """A function that computes the likelihoods of one gold text after 16 plans."""
    lm = made(lora=False).freeze()
    played, draw = plays(1), np.random.default_rng(7)
    gold = tuple(int(t) for t in draw.integers(0, WORDS, GOLD))
    rows = [(*e.turns[0].prompt, *e.turns[0].tokens, *gold) for e in played]
    told = [Gold(r, len(r) - GOLD, len(r)) for r in rows]
    return lambda: sum(x.logp for x in likelihoods(lm, told, layout))  # type: ignore[arg-type]


def compared(make: Callable[[str], Callable[[], float]], repeats: int) -> dict[str, Any]:
    """Both layouts in turns: seconds, memory, and the first value of each."""
    calls = {layout: make(layout) for layout in LAYOUTS}
    found: dict[str, Any] = {layout: {"value": call(), "seconds": [], "gib": 0.0} for layout, call in calls.items()}
    for _ in range(repeats + 1):
        for layout, call in calls.items():
            forget()
            if DEVICE == "cuda":
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            wait()
            began = time.perf_counter()
            call()
            wait()
            found[layout]["seconds"].append(time.perf_counter() - began)
            if DEVICE == "cuda":  # what this call needed beside the models of both layouts
                found[layout]["gib"] = max(
                    found[layout]["gib"], (torch.cuda.max_memory_allocated() - before) / 2**30
                )
    for layout in LAYOUTS:
        del found[layout]["seconds"][0]  # the first one warms up
    return found


def record(name: str, found: dict[str, Any], what: str, about: dict[str, Any]) -> dict[str, Any]:
    values = "log-probs" if name == "likelihoods" else "gradient norms"
    tree, flat = (found[layout]["seconds"] for layout in LAYOUTS)
    ratios = [f / t for t, f in zip(tree, flat)]
    apart = abs(found["tree"]["value"] - found["flat"]["value"]) / abs(found["flat"]["value"])
    told = f"{what}; {np.median(tree):.3f} s and {found['tree']['gib']:.1f} GiB, flat {np.median(flat):.3f} s and "
    told += f"{found['flat']['gib']:.1f} GiB; {values} differ by {100 * apart:.1g} %"
    return {"name": f"gpu_vrcli/{name}", "ours": 1 / np.median(tree), "unit": "1/s", "peer": 1 / np.median(flat),
            "peer_name": "the same without sharing", "ratio": float(np.median(ratios)),
            "spread": [min(ratios), max(ratios)], **about, "what": told, "details": found}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default="")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", default="bench/results/gpu_vrcli.jsonl")
    args = parser.parse_args()
    need_gpu(args.small)
    about = {"commit": args.commit, "device": named(), "repeats": args.repeats,
             "versions": {"torch": torch.__version__, "transformers": transformers.__version__}}  # fmt: skip
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    cases: dict[str, tuple[Callable[[str], Callable[[], float]], str]] = {
        "update, one group": (lambda x: updates(1, x, True), f"{N} answers of {WRITTEN} after one prompt of {PROMPT}"),
        "update, four groups": (lambda x: updates(4, x, False), f"{N} answers of {WRITTEN} after four of {PROMPT}"),
        "likelihoods": (scores, f"a gold text of {GOLD} after {N} plans of {WRITTEN} and one prompt of {PROMPT}"),
    }
    held = [json.loads(line) for line in Path(args.out).read_text().splitlines()] if Path(args.out).exists() else []
    known = {r["name"] for r in held if (r["commit"], r["device"]) == (args.commit, named())}
    for name, (make, what) in cases.items():
        if args.commit and f"gpu_vrcli/{name}" in known:
            print(f"{name}: measured before", flush=True)
            continue
        try:
            keep(record(name, compared(make, args.repeats), what, about), args.out)
        except (torch.OutOfMemoryError, LearnError) as problem:
            print(f"{name}: {problem}", flush=True)
        forget()


if __name__ == "__main__":
    main()
