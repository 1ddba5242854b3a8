"""GRPO's gradient on one GPU, ours against TRL's best setting, on the same weights and the same batch in one process.

    PYTHONPATH=src python bench/gpu_training.py [--commit HASH] [--repeats 5] [--cases 512,4096,12000] [--no-trl]

Qwen2-0.5B's shape with random weights in bfloat16; 16 samples of one prompt. The losses are written down beside the
times. One more row is the same gradient with `prefix-grouper` (prompt and completions in two attentions) on the same
model, and one is how far gradients of the tree are from those of single rows. Writes bench/results/gpu_training.jsonl
and prints a JSON line for each case. `--small` rehearses everything on a CPU.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from common import keep_in, need_gpu, need_peer

from trailmark.config import LearnerConfig
from trailmark.learn.learner import Learner
from trailmark.models.lm import LM
from trailmark.models.readout import Readout
from trailmark.models.tiny import tiny_tokenizer
from trailmark.objectives.clipped import Clipped
from trailmark.samples import build_samples
from trailmark.types import Episode, Scored, Task, Turn

CASES = {"512": (512, 512), "4096": (4096, 512), "12000": (12000, 1024)}
if "--small" in sys.argv:
    CASES = {"512": (48, 16)}
WORDS = 500 if "--small" in sys.argv else 150000
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = "--small" in sys.argv


def shape() -> Any:
    if SMALL:
        return transformers.Qwen2Config(
            vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=128, max_position_embeddings=32768, tie_word_embeddings=True, use_cache=False,
        )  # fmt: skip
    return transformers.Qwen2Config(
        vocab_size=151936, hidden_size=896, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
        intermediate_size=4864, max_position_embeddings=32768, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip


def made(implementation: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return transformers.AutoModelForCausalLM.from_config(
            shape(), dtype=dtype, attn_implementation=implementation, trust_remote_code=False
        )


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def forget() -> None:
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def episodes(prompt: int, written: int, n: int = 16) -> list[Episode]:
    draw = np.random.default_rng(0)
    shared = tuple(int(t) for t in draw.integers(0, WORDS, prompt))
    tokens = [tuple(int(t) for t in draw.integers(0, WORDS, written)) for _ in range(n)]
    scored = {"self": Scored(0.0)}
    return [Episode(f"e/{k}", Task("e"), "e", (Turn("policy", shared, t),), scored) for k, t in enumerate(tokens)]


def timed(call: Callable[[], Any], repeats: int) -> dict[str, Any]:
    forget()
    call()
    wait()
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    each = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        wait()
        each.append(time.perf_counter() - began)
    gib = torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else 0.0
    return {"seconds": float(np.median(each)), "least": min(each), "most": max(each), "gib": gib}


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
    learner = Learner({"policy": lm}, LearnerConfig())
    began = time.perf_counter()
    samples = learner.fill(samples, old=Readout(""))
    loss = learner.gradient(samples, Clipped())["loss"]
    wait()
    first = time.perf_counter() - began
    parts = len(learner.pack(samples))
    times = timed(lambda: learner.gradient(samples, Clipped()), repeats)
    return {**times, "first": first, "loss": loss, "micro_batches": parts, "micro_tokens": learner.places}


KERNELS = {  # what a kernel is for, by parts of its name; the first that fits counts
    "attention": ("flex", "flash", "fmha", "attention", "sdpa"),
    "matrix products": ("gemm", "cutlass", "cublas", "nvjet", "wgmma", "mm_", "aten::mm", "aten::addmm", "bmm"),
    "loss over the vocabulary": ("logsumexp", "softmax", "_numbers", "gather"),
    "copies": ("memcpy", "memset", "copy"),
}


def profiled(played: list[Episode]) -> dict[str, float]:
    """Where the time of one gradient goes: seconds of kernels by what they are for, and the time without any."""
    lm = LM(made("sdpa"), tiny_tokenizer(), "qwen2-0.5b")
    samples, _ = samples_of(played)
    learner = Learner({"policy": lm}, LearnerConfig())
    samples = learner.fill(samples, old=Readout(""))
    for _ in range(2):
        learner.gradient(samples, Clipped())
    wait()
    kinds = [torch.profiler.ProfilerActivity.CUDA if DEVICE == "cuda" else torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds) as seen:
        began = time.perf_counter()
        learner.gradient(samples, Clipped())
        wait()
        whole = time.perf_counter() - began
    found: dict[str, float] = dict.fromkeys([*KERNELS, "other kernels"], 0.0)
    for event in seen.key_averages():
        spent = event.self_device_time_total if DEVICE == "cuda" else event.self_cpu_time_total
        name = event.key.lower()
        kind = next((k for k, parts in KERNELS.items() if any(p in name for p in parts)), "other kernels")
        found[kind] += spent / 1e6
    return {**found, "no kernel": max(0.0, whole - sum(found.values())), "whole": whole}


def grouped(played: list[Episode], repeats: int) -> dict[str, Any]:
    """The same gradient through prefix-grouper: its two attentions by SDPA, logits as TRL makes them."""
    import torch.nn.functional as F
    from prefix_grouper import PrefixGrouper
    from prefix_grouper.forward import AttentionForward
    from torch.nn.attention.bias import causal_lower_right
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface
    from trl.trainer.utils import selective_log_softmax

    def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(q.shape[2], k.shape[2]))
        return out.transpose(1, 2)

    def interface(module: Any, q: Any, k: Any, v: Any, mask: Any, prefix_grouper: Any = None, **_: Any) -> Any:
        return AttentionForward(attend)(prefix_grouper, q, k, v), None

    AttentionInterface.register("grouper", interface)
    AttentionMaskInterface.register("grouper", lambda *_, **__: None)
    model = made("grouper").train()
    _, advantage = samples_of(played)
    turns = [e.turns[0] for e in played]
    prompt, written = len(turns[0].prompt), len(turns[0].tokens)
    group = PrefixGrouper([[prompt, *[written] * len(turns)]], device=DEVICE)
    ids = torch.tensor([[*turns[0].prompt, *(t for turn in turns for t in turn.tokens)]], device=DEVICE)
    suffix = torch.arange(prompt, prompt + written)
    position = torch.cat([torch.arange(prompt), suffix.repeat(len(turns))])[None].to(DEVICE)
    goal = torch.tensor([t.tokens for t in turns], device=DEVICE)
    weight = torch.tensor([advantage[e.id][0] for e in played], device=DEVICE)[:, None]

    def step() -> float:
        model.zero_grad(set_to_none=True)
        hidden = model.model(input_ids=ids, position_ids=position, prefix_grouper=group, use_cache=False)
        states = group.split_output(hidden.last_hidden_state, include_prefix_last=1)[2][:, :-1]
        logp = selective_log_softmax(model.lm_head(states), goal)
        ratio = torch.exp(logp - logp.detach())
        loss = -torch.min(ratio * weight, ratio.clamp(0.8, 1.2) * weight).mean(1).mean()
        loss.backward()
        return float(loss.detach())

    return {"loss": step(), **timed(step, repeats)}


def exactness(played: list[Episode]) -> dict[str, float]:
    """Distances between gradients, relative to the norm: of the tree from single rows in float32, and of both in
    bfloat16 from the rows in float32."""
    samples, _ = samples_of(played)

    def gradient(dtype: torch.dtype, layout: str) -> torch.Tensor:
        torch.backends.cuda.matmul.allow_tf32 = False
        lm = LM(made("sdpa", dtype), tiny_tokenizer(), "qwen2-0.5b")
        lm.model.load_state_dict(made("sdpa", torch.bfloat16).state_dict())  # the same rounded weights in every dtype
        learner = Learner({"policy": lm}, LearnerConfig().model_copy(update={"layout": layout}))
        filled = learner.fill(samples, old=Readout(""))
        learner.gradient(filled, Clipped())
        out = torch.cat([p.grad.flatten().float() for p in lm.model.parameters() if p.grad is not None]).cpu()
        del lm, learner
        forget()
        return out

    exact = gradient(torch.float32, "flat")
    size = float(exact.norm())
    off = lambda g: float((g - exact).norm()) / size
    tree = off(gradient(torch.float32, "tree"))
    rounded = {k: off(gradient(torch.bfloat16, k)) for k in ("tree", "flat")}
    return {"float32_tree_against_flat": tree, "bfloat16_tree": rounded["tree"], "bfloat16_flat": rounded["flat"],
            "bfloat16_ratio": rounded["tree"] / rounded["flat"]}  # fmt: skip


def theirs(played: list[Episode], repeats: int, model: Any = None) -> dict[str, Any]:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer.utils import pad

    model = model or made("sdpa")
    _, advantage = samples_of(played)
    turns = [e.turns[0] for e in played]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(folder, max_completion_length=len(turns[0].tokens), per_device_train_batch_size=len(played),
                          num_generations=len(played), beta=0.0, loss_type="grpo", temperature=1.0, bf16=True,
                          gradient_checkpointing=False, report_to="none", save_strategy="no",
                          use_cpu=DEVICE == "cpu")  # fmt: skip
        trainer = GRPOTrainer(
            model,
            lambda completions, **_: [0.0] * len(completions),
            args,
            Dataset.from_dict({"prompt": ["a", "b"]}),
            processing_class=copy.deepcopy(tiny_tokenizer()),
        )
    trainer.current_gradient_accumulation_steps = 1
    left = lambda rows: pad([torch.tensor(r) for r in rows], 0, padding_side="left").to(DEVICE)
    right = lambda rows: pad([torch.tensor(r) for r in rows], 0).to(DEVICE)
    inputs = {
        "prompt_ids": left([t.prompt for t in turns]), "prompt_mask": left([[1] * len(t.prompt) for t in turns]),
        "completion_ids": right([t.tokens for t in turns]),
        "completion_mask": right([[1] * len(t.tokens) for t in turns]),
        "advantages": torch.tensor([advantage[e.id][0] for e in played]).to(DEVICE),
        "num_items_in_batch": torch.tensor(sum(len(t.tokens) for t in turns)).to(DEVICE),
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
                with torch.autocast(DEVICE, torch.bfloat16):
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
        forget()
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
    if isinstance(other := found.get("prefix-grouper"), dict):
        what += f"; prefix-grouper {other['seconds']:.3f} s, {other['gib']:.1f} GiB"
    less = found["tree, checkpointed"]
    return {**row, "what": f"{what}; checkpointed {less['seconds']:.3f} s, {less['gib']:.1f} GiB"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--commit", default="")
    parser.add_argument("--no-trl", action="store_true")
    parser.add_argument("--plain", action="store_true", help="also our path without compiled layers")
    parser.add_argument("--no-exactness", action="store_true")
    parser.add_argument("--profile", action="store_true", help="where the time goes, in place of times")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", default="bench/results/gpu_training.jsonl")
    args = parser.parse_args()
    need_gpu(args.small)
    if not args.no_trl:
        need_peer("trl", "datasets", "prefix_grouper")
    about = {"commit": args.commit, "device": named(), "repeats": args.repeats,
             "versions": {"torch": torch.__version__, "transformers": transformers.__version__}}  # fmt: skip
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    for case in filter(None, args.cases.split(",")):
        played = episodes(*CASES[case])
        if args.profile:
            parts = profiled(played)
            whole = parts.pop("whole")
            what = ", ".join(f"{k} {v / whole:.0%}" for k, v in parts.items())
            keep({"name": f"gpu_training/profile {case}", "ours": whole, "unit": "s", **about, "what": what,
                  "details": parts}, args.out)  # fmt: skip
            continue
        found: dict[str, Any] = {"tree": ours(played, args.repeats, False, True)}
        found["tree, checkpointed"] = ours(played, args.repeats, True, True)
        if args.plain:
            found["tree, uncompiled"] = ours(played, args.repeats, False, False)
        trl = {} if args.no_trl else theirs(played, args.repeats)
        if not args.no_trl:
            try:
                found["prefix-grouper"] = grouped(played, args.repeats)
            except torch.OutOfMemoryError:
                found["prefix-grouper"] = "out of memory"
            forget()
        row = record(case, found, trl, about)
        keep(row, args.out)
    if not args.no_exactness and not args.profile:
        found = exactness(episodes(512, 256, 8))
        row = {"name": "gpu_training/gradient of a tree", "ours": found["float32_tree_against_flat"],
               "unit": "distance from flat", **about, "details": found}  # fmt: skip
        what = f"float32, relative; in bfloat16 {found['bfloat16_ratio']:.3f} times the distance of flat bfloat16"
        keep({**row, "what": what}, args.out)


def named() -> str:
    return torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"


def keep(row: dict[str, Any], out: str) -> None:
    keep_in(row, out)


if __name__ == "__main__":
    main()
