"""The core on a GPU: tree = flat = rows in float32, engine = learner, engine bitwise over neighbours, bf16 below its
own noise.

    python bench/gpu_core.py [--out FILE]

Prints one JSON object last. Runs on a CPU too (then FlexAttention is not used), with smaller models.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from pathlib import Path

import numpy as np
import torch
import transformers

from trailmark.config import LearnerConfig
from trailmark.engines.base import Request, run
from trailmark.engines.local import LocalEngine
from trailmark.learn.learner import Learner
from trailmark.models.layout_check import check_layout
from trailmark.models.lm import LM
from trailmark.models.readout import Readout
from trailmark.models.tiny import build, tiny_config, tiny_tokenizer
from trailmark.objectives.weighted_logp import WeightedLogp
from trailmark.types import Sample, SamplingLaw

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDE = DEVICE == "cuda"


def model(family: str, dtype: torch.dtype = torch.float32) -> LM:
    tokenizer = tiny_tokenizer(pad_is_eos=True)
    config = tiny_config(
        family, vocab=8192 if WIDE else 512, layers=4, width=512 if WIDE else 64, heads=8,
        kv_heads=None if family == "gpt2" else 2,
        context=2048, window=48 if family == "mistral" else None,
    )  # fmt: skip
    return LM(build(config, 0, dtype, DEVICE), tokenizer, family)


def batch(groups: int = 6, n: int = 6, prompt: int = 96, longest: int = 80) -> list[Sample]:
    draw = np.random.default_rng(0)
    out = []
    for _ in range(groups):
        shared = draw.integers(0, 250, int(prompt * draw.uniform(0.5, 1)))
        for _ in range(n):
            written = draw.integers(0, 250, int(draw.integers(4, longest)))
            weight, advantage = np.zeros((2, len(shared) + len(written)))
            weight[len(shared) :], advantage[len(shared) :] = 1.0, draw.normal()
            law = np.where(weight > 0, 0, -1)
            out.append(Sample(np.concatenate([shared, written]), {"weight": weight, "advantage": advantage, "law": law},
                              {"weight": float(len(written))}, (SamplingLaw(temperature=0.9),)))  # fmt: skip
    return out


def gradient(lm: LM, samples: list[Sample], layout: str, budget: int = 4096) -> tuple[torch.Tensor, float]:
    learner = Learner({"policy": lm}, LearnerConfig(micro_tokens=budget).model_copy(update={"layout": layout}))
    for _, p in lm.parameters():
        p.grad = None
    learner.gradient(samples, WeightedLogp())
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _, p in lm.parameters():
        p.grad = None
    learner.gradient(samples, WeightedLogp())
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return torch.cat(
        [p.grad.double().flatten() for _, p in lm.parameters() if p.grad is not None]
    ), time.perf_counter() - began


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def check(family: str) -> dict:
    lm, samples = model(family), batch()
    flat, seconds_flat = gradient(lm, samples, "flat")
    tree, seconds_tree = gradient(lm, samples, "tree")
    rows, _ = gradient(lm, samples, "rows")
    split, _ = gradient(lm, samples, "tree", 1024)
    noisy = model(family, torch.bfloat16)
    bf_tree, bf_flat = (
        relative(gradient(noisy, samples, "tree")[0], flat),
        relative(gradient(noisy, samples, "flat")[0], flat),
    )
    return {
        "family": family,
        "probe": check_layout(lm) or "exact",
        "tree_vs_flat": relative(tree, flat),
        "rows_vs_flat": relative(rows, flat),
        "split_vs_flat": relative(split, flat),
        "bf16_error_tree_over_flat": bf_tree / bf_flat,
        "seconds_flat": seconds_flat,
        "seconds_tree": seconds_tree,
        **engine(lm),
    }


def engine(lm: LM) -> dict:
    """Sampler against learner, and bitwise equality over neighbours and arrival order."""
    draw = np.random.default_rng(1)
    laws = [SamplingLaw(), SamplingLaw(temperature=0.7, top_p=0.9), SamplingLaw(allowed=tuple(range(20)))]
    asked = [
        Request(tuple(int(t) for t in draw.integers(0, 250, 5 + 9 * k)), laws[k % 3], 3, 32, key=str(k))
        for k in range(9)
    ]
    made = lambda: LocalEngine(lm, slots=16, max_len=256)
    together = run(made(), asked)
    alone = [run(made(), [r])[0] for r in asked]
    backwards = run(made(), asked[::-1])[::-1]
    samples = []
    for request, done in zip(asked, together):
        for c in done:
            n = len(request.prompt)
            streams = {name: np.zeros(n + len(c.tokens)) for name in ("weight", "old")}
            streams["weight"][n:], streams["old"][n:] = 1.0, c.logq
            law = np.where(streams["weight"] > 0, 0, -1)
            samples.append(
                Sample(np.array(request.prompt + c.tokens), {**streams, "law": law}, {"weight": 1.0}, (request.law,))
            )
    scored = Learner({"policy": lm}, LearnerConfig(layout="tree")).fill(samples, now=Readout(""))
    worst = max(float(np.abs(s.streams["now"] - s.streams["old"])[s.streams["weight"] > 0].max()) for s in scored)
    began = time.perf_counter()
    fast = LocalEngine(lm, slots=64, max_len=256)
    run(fast, [Request(r.prompt, SamplingLaw(), 16, 128, key=r.key) for r in asked])
    rate = fast.counts.decoded / (time.perf_counter() - began)
    return {
        "sampler_vs_learner": worst,
        "bitwise_over_neighbours": together == alone == backwards,
        "tokens_per_second": round(rate),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    results = []
    for family in ("llama", "gpt2", "mistral"):
        results.append(check(family))
        print(json.dumps(results[-1]), flush=True)
    commit = (
        args.commit
        or subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    )
    report = {
        "name": "gpu_core",
        "passed": all(r["probe"] == "exact" and r["tree_vs_flat"] <= 1e-5 and r["sampler_vs_learner"] <= 1e-3
                      and r["bitwise_over_neighbours"] for r in results),
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else platform.processor() or "cpu",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__,
        "python": platform.python_version()},
        "commit": commit,
        "results": results,
    }  # fmt: skip
    print(json.dumps(report))
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
