"""GRPO's gradient on one GPU, ours against TRL's best setting, on the same weights and the same batch in one process.

    PYTHONPATH=src python bench/gpu_training.py [--commit HASH] [--repeats 5] [--cases 512,4096,12000] [--no-trl]

Qwen2-0.5B's shape with random weights in bfloat16; 16 samples of one prompt. Before anything is timed the two losses
must agree. Writes bench/results/gpu_training.jsonl and prints a JSON line for each case.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from trailmark.config import LearnerConfig
from trailmark.learn.learner import Learner
from trailmark.models.lm import LM
from trailmark.models.readout import Readout
from trailmark.models.tiny import tiny_tokenizer
from trailmark.objectives import Clipped
from trailmark.samples import build_samples
from trailmark.types import Episode, Scored, Task, Turn

CASES = {"512": (512, 512), "4096": (4096, 512), "12000": (12000, 1024)}


def shape() -> Any:
    return transformers.Qwen2Config(
        vocab_size=151936, hidden_size=896, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
        intermediate_size=4864, max_position_embeddings=32768, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip


def made(implementation: str) -> Any:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(
            shape(), dtype=torch.bfloat16, attn_implementation=implementation
        )
    return model


def episodes(prompt: int, written: int, n: int = 16) -> list[Episode]:
    draw = np.random.default_rng(0)
    shared = tuple(int(t) for t in draw.integers(0, 150000, prompt))
    tokens = [tuple(int(t) for t in draw.integers(0, 150000, written)) for _ in range(n)]
    scored = {"self": Scored(0.0)}
    return [Episode(f"e/{k}", Task("e"), "e", (Turn("policy", shared, t),), scored) for k, t in enumerate(tokens)]


def timed(call: Callable[[], Any], repeats: int) -> dict[str, Any]:
    gc.collect()
    torch.cuda.empty_cache()
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    each = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        each.append(time.perf_counter() - began)
    return {"seconds": float(np.median(each)), "least": min(each), "most": max(each),
            "gib": torch.cuda.max_memory_allocated() / 2**30}  # fmt: skip


def samples_of(played: list[Episode]) -> Any:
    advantage = {e.id: [float(a)] for e, a in zip(played, np.random.default_rng(1).normal(size=len(played)))}
    return build_samples(played, "policy", {"advantage": advantage}, mean="sequence"), advantage


def ours(played: list[Episode], repeats: int, checkpointing: bool, compiled: bool) -> dict[str, Any]:
    model = made("sdpa")
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    lm = LM(model, tiny_tokenizer(), "qwen2-0.5b")
    if not compiled:
        lm.compiled.wanted = False
    samples, _ = samples_of(played)
    learner = Learner({"policy": lm}, LearnerConfig(micro_tokens=65536))
    began = time.perf_counter()
    samples = learner.fill(samples, old=Readout(""))
    loss = learner.gradient(samples, Clipped())["loss"]
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    return {**timed(lambda: learner.gradient(samples, Clipped()), repeats), "first": first, "loss": loss}


def theirs(played: list[Episode], repeats: int) -> dict[str, Any]:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer.utils import pad

    model = made("sdpa")
    _, advantage = samples_of(played)
    turns = [e.turns[0] for e in played]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(folder, max_completion_length=len(turns[0].tokens), per_device_train_batch_size=len(played),
                          num_generations=len(played), beta=0.0, loss_type="grpo", temperature=1.0, bf16=True,
                          gradient_checkpointing=False, report_to="none", save_strategy="no")  # fmt: skip
        trainer = GRPOTrainer(
            model,
            lambda completions, **_: [0.0] * len(completions),
            args,
            Dataset.from_dict({"prompt": ["a", "b"]}),
            processing_class=copy.deepcopy(tiny_tokenizer()),
        )
    trainer.current_gradient_accumulation_steps = 1
    left = lambda rows: pad([torch.tensor(r) for r in rows], 0, padding_side="left").cuda()
    right = lambda rows: pad([torch.tensor(r) for r in rows], 0).cuda()
    inputs = {
        "prompt_ids": left([t.prompt for t in turns]), "prompt_mask": left([[1] * len(t.prompt) for t in turns]),
        "completion_ids": right([t.tokens for t in turns]),
        "completion_mask": right([[1] * len(t.tokens) for t in turns]),
        "advantages": torch.tensor([advantage[e.id][0] for e in played]).cuda(),
        "num_items_in_batch": torch.tensor(sum(len(t.tokens) for t in turns)).cuda(),
    }  # fmt: skip
    trainer.model.train()

    def part(rows: slice) -> Any:
        for values in trainer._metrics["train"].values():
            values.clear()
        return {k: (v if v.ndim == 0 else v[rows]) for k, v in inputs.items()}

    for size in (16, 4, 1):  # rows at once: its best setting is the fastest that fits
        def step(size: int = size) -> float:
            trainer.model.zero_grad(set_to_none=True)
            total = 0.0
            for first in range(0, len(played), size):
                with torch.autocast("cuda", torch.bfloat16):
                    loss = trainer.compute_loss(trainer.model, part(slice(first, first + size))) * size / len(played)
                loss.backward()
                total += float(loss.detach())
            return total

        try:
            loss = step()
            found[str(size)] = {**timed(step, repeats), "loss": loss}
        except torch.OutOfMemoryError:
            found[str(size)] = "out of memory"
        trainer.model.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
    return found


def record(case: str, found: dict[str, Any], trl: dict[str, Any], about: dict[str, Any]) -> dict[str, Any]:
    """The row of the page: gradients a second, and what each took in memory."""
    mine, prompt, written = found["tree"], *CASES[case]
    row = {"name": f"gpu_training/grpo {case}", "ours": 1 / mine["seconds"], "unit": "gradients/s", **about,
           "details": {"ours": found, "trl": trl}}  # fmt: skip
    what = f"16 samples of {written} after {prompt}; {mine['gib']:.1f} GiB"
    done = [v for v in trl.values() if isinstance(v, dict)]
    if done:
        best = min(done, key=lambda v: v["seconds"])
        row |= {"peer": 1 / best["seconds"], "peer_name": "TRL", "ratio": best["seconds"] / mine["seconds"],
                "spread": [best["least"] / mine["most"], best["most"] / mine["least"]]}  # fmt: skip
        what += f", TRL {best['gib']:.1f} GiB; losses differ by {abs(best['loss'] - mine['loss']):.1g}"
    less = found["tree, checkpointed"]
    return {**row, "what": f"{what}; checkpointed {less['seconds']:.3f} s, {less['gib']:.1f} GiB"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cases", default="512,4096,12000")
    parser.add_argument("--commit", default="")
    parser.add_argument("--no-trl", action="store_true")
    parser.add_argument("--plain", action="store_true", help="also our path without compiled layers")
    parser.add_argument("--out", default="bench/results/gpu_training.jsonl")
    args = parser.parse_args()
    about = {"commit": args.commit, "device": torch.cuda.get_device_name(), "repeats": args.repeats,
             "versions": {"torch": torch.__version__, "transformers": transformers.__version__}}  # fmt: skip
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    for case in args.cases.split(","):
        played = episodes(*CASES[case])
        found: dict[str, Any] = {"tree": ours(played, args.repeats, False, True)}
        found["tree, checkpointed"] = ours(played, args.repeats, True, True)
        if args.plain:
            found["tree, uncompiled"] = ours(played, args.repeats, False, False)
        trl = {} if args.no_trl else theirs(played, args.repeats)
        row = record(case, found, trl, about)
        print(json.dumps(row), flush=True)
        with Path(args.out).open("a") as f:
            f.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
