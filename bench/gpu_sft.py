"""Supervised fine-tuning on one GPU at Qwen2-0.5B's shape: tokens a second and the share of the card's arithmetic, ours
against TRL's SFTTrainer with packing, in one process.

    PYTHONPATH=src python bench/gpu_sft.py [--commit HASH] [--lengths 2048,4096,8192]

Every step is 32,768 tokens in rows of one length: forward, backward, AdamW. FLOPs of a token at length L, forward and
backward: 6 * (weights of all matrix products, the output layer included) + 6 * layers * width * L (causal attention:
half of 12). The card: 989 TFLOP/s in bfloat16. Writes bench/results/gpu_sft.jsonl. `--small` rehearses it on a CPU.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from typing import Any

import numpy as np
import torch
import transformers
from common import need_gpu, need_peer
from gpu_training import DEVICE, SMALL, WORDS, forget, keep, made, named, shape, timed

from trailmark.config import LearnerConfig, OptimConfig
from trailmark.learn.learner import Learner, Update
from trailmark.models.lm import LM
from trailmark.models.tiny import tiny_tokenizer
from trailmark.objectives.sft import Sft
from trailmark.types import Sample

PEAK = 989e12
TOKENS = 512 if SMALL else 32768


def flops_per_token(length: int) -> float:
    c = shape()
    head = c.hidden_size // c.num_attention_heads
    block = (
        2 * c.hidden_size**2
        + 2 * c.hidden_size * c.num_key_value_heads * head
        + 3 * c.hidden_size * c.intermediate_size
    )
    weights = c.num_hidden_layers * block + c.vocab_size * c.hidden_size
    return 6 * weights + 6 * c.num_hidden_layers * c.hidden_size * length


def rows(length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, WORDS, (TOKENS // length, length))


def ours(length: int, repeats: int) -> dict[str, Any]:
    lm = LM(made("sdpa"), tiny_tokenizer(), "qwen2-0.5b")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        learner = Learner({"policy": lm}, LearnerConfig(optim=OptimConfig(lr=1e-6)), total=1000)
    weight = np.r_[0.0, np.ones(length - 1)]
    samples = [Sample(r, {"weight": weight}, {"weight": float(length - 1)}) for r in rows(length)]
    began = time.perf_counter()
    losses = [learner.update(Update(samples, Sft()))["loss"]]
    first = time.perf_counter() - began
    found = timed(lambda: losses.append(learner.update(Update(samples, Sft()))["loss"]), repeats)
    return {**found, "first": first, "loss": losses[0], "micro_tokens": learner.places,
            "micro_batches": len(learner.pack(samples))}  # fmt: skip


def theirs(length: int, repeats: int) -> dict[str, Any]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    found: dict[str, Any] = {}
    whole = TOKENS // length
    for size in sorted({whole, max(1, whole // 4)}, reverse=True):
        marks: list[float] = []

        class Clock(transformers.TrainerCallback):
            def on_step_end(self, *_: Any, marks: list[float] = marks, **__: Any) -> None:
                if DEVICE == "cuda":
                    torch.cuda.synchronize()
                marks.append(time.perf_counter())

        with tempfile.TemporaryDirectory() as folder:
            args = SFTConfig(
                folder, max_length=length, packing=True, per_device_train_batch_size=size, bf16=True,
                gradient_accumulation_steps=whole // size, gradient_checkpointing=False, report_to="none",
                save_strategy="no", max_steps=repeats + 2, learning_rate=1e-6, logging_steps=1000, disable_tqdm=True,
                use_cpu=DEVICE == "cpu", dataloader_pin_memory=DEVICE == "cuda", optim="adamw_torch_fused",
            )  # fmt: skip
            data = Dataset.from_dict(
                {"input_ids": [r.tolist() for r in np.concatenate([rows(length)] * (repeats + 2))]}
            )
            try:
                if DEVICE == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                trainer = SFTTrainer(made("sdpa"), args, train_dataset=data, processing_class=tiny_tokenizer(),
                                     callbacks=[Clock()])  # fmt: skip
                trainer.train()
                each = list(np.diff(marks))[1:]
                gib = torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else 0.0
                found[str(size)] = {
                    "seconds": float(np.median(each)),
                    "least": min(each),
                    "most": max(each),
                    "gib": gib,
                }
            except torch.OutOfMemoryError:
                found[str(size)] = "out of memory"
            trainer = None
        forget()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default="")
    parser.add_argument("--lengths", default="64,128" if SMALL else "2048,4096,8192")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-trl", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", default="bench/results/gpu_sft.jsonl")
    args = parser.parse_args()
    need_gpu(args.small)
    if not args.no_trl:
        need_peer("trl", "datasets")
    for length in map(int, args.lengths.split(",")):
        mine = ours(length, args.repeats)
        forget()
        peer = {} if args.no_trl else theirs(length, args.repeats)
        share = lambda seconds, length=length: TOKENS * flops_per_token(length) / seconds / PEAK
        row: dict[str, Any] = {
            "name": f"gpu_sft/sft {length}", "ours": TOKENS / mine["seconds"], "unit": "tokens/s",
            "commit": args.commit,
            "device": named(), "repeats": args.repeats, "flops_per_token": flops_per_token(length),
            "share_of_peak": share(mine["seconds"]), "details": {"ours": mine, "trl": peer},
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        }  # fmt: skip
        row["what"] = f"{100 * share(mine['seconds']):.1f} % of 989 TFLOP/s, {mine['gib']:.1f} GiB"
        done = [v for v in peer.values() if isinstance(v, dict)]
        if done:
            best = min(done, key=lambda v: v["seconds"])
            row |= {"peer": TOKENS / best["seconds"], "peer_name": "TRL with packing",
                    "ratio": best["seconds"] / mine["seconds"],
                    "spread": [best["least"] / mine["most"], best["most"] / mine["least"]]}  # fmt: skip
            row["what"] += f"; TRL {100 * share(best['seconds']):.1f} %, {best['gib']:.1f} GiB"
        keep(row, args.out)


if __name__ == "__main__":
    main()
