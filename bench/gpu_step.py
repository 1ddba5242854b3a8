"""One whole online step (sample, score, update, publish) on one GPU: `trailmark train` against TRL's GRPOTrainer with
its own `generate`, on the same prompts, model, group size and reward, in one process.

    PYTHONPATH=src python bench/gpu_step.py [--commit HASH] [--steps 4]

Qwen2-0.5B's shape with random weights in bfloat16 and a byte tokenizer; 16 prompts of about 512 tokens, 8 answers of
128 tokens each. The reward counts letters: it means nothing and costs nothing. vLLM is not on the
machine, so TRL samples with `generate`. `--modes overlap,8-bit,offload` measures our own options against our plain
step instead. Writes bench/results/gpu_step.jsonl. `--small` rehearses it on a CPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from common import need_gpu, need_peer
from gpu_training import DEVICE, SMALL, forget, keep, made, named

from trailmark.config import load_recipe, resolve
from trailmark.methods import get_config, get_method
from trailmark.models.tiny import tiny_tokenizer
from trailmark.runs.launch import launch
from trailmark.runs.store import read_metrics

STARTS, GROUP, PROMPT, NEW = (2, 4, 32, 8) if SMALL else (16, 8, 512, 128)
REWARD = """
def score(prompt, answer, row):
    return sum(ord(c) % 2 for c in answer) / max(1, len(answer))
"""


def texts(n: int) -> list[str]:
    draw = np.random.default_rng(0)
    return ["".join(chr(97 + c) for c in draw.integers(0, 26, PROMPT - 1)) for _ in range(n)]


def folder(home: Path) -> Path:
    """The model as a folder that both load."""
    tokenizer = tiny_tokenizer(pad_is_eos=False)
    model = made("sdpa")
    out = home / "model"
    model.generation_config = transformers.GenerationConfig(pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


MODES = {
    "overlap": ["overlap=true"],
    "8-bit": ["learner.optim.bits=8"],
    "offload": ["learner.offload=[optimiser]"],
}


def ours(home: Path, model: Path, steps: int, more: Sequence[str] = (), name: str = "run") -> dict[str, Any]:
    (home / "reward.py").write_text(REWARD)
    (home / "rows.jsonl").write_text("".join(json.dumps({"prompt": t}) + "\n" for t in texts(STARTS * steps)))
    words = [
        f"data={home}/rows.jsonl", f"reward={home}/reward.py:score", f"out={home}/{name}", f"steps={steps}",
        f"prompts_per_step={STARTS}", f"n={GROUP}", f"model={{name: {model}, dtype: bfloat16, device: {DEVICE}}}",
        f"sampling={{max_tokens: {NEW}, min_tokens: {NEW}}}" if SMALL else f"sampling={{max_tokens: {NEW}}}",
        f"engine={{max_num_seqs: {STARTS * GROUP}, max_len: {PROMPT + NEW + 8}, batch_invariant: false}}",
        "learner={optim: {lr: 1e-6}}",
        "checkpoint={every: 0}", "eval={every: 0}", *more,
    ]  # fmt: skip
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    recipe = Path(__file__).parent.parent / "recipes" / "prompts-grpo.yaml"
    began = time.perf_counter()
    launch(get_method("policy_gradient"), resolve(load_recipe(recipe, words), get_config("policy_gradient")))
    whole = time.perf_counter() - began
    timings = [json.loads(x) for x in (home / name / "timings.jsonl").read_text().splitlines()]
    rows = read_metrics(home / name)
    seconds = [t["train_seconds"] for t in timings]
    peak = torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else 0.0
    wanted = ("written_tokens", "loss", "ratio", "stale_ratio", "stale_ratio_max", "stale_cut")
    kept = {k: rows[-1][k] for k in wanted if k in rows[-1]}
    return {"seconds": seconds, "phases": timings[-1], "whole": whole, "peak_gib": peak, **kept}


def theirs(home: Path, model: Path, steps: int) -> dict[str, Any]:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    marks: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            marks.append(time.perf_counter())

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [sum(ord(c) % 2 for c in a) / max(1, len(a)) for a in completions]

    found: dict[str, Any] = {}
    for size in (STARTS * GROUP, STARTS * GROUP // 4):  # rows at once in its update: its best setting counts
        marks.clear()
        args = GRPOConfig(
            str(home / "trl"), max_completion_length=NEW, per_device_train_batch_size=size,
            gradient_accumulation_steps=STARTS * GROUP // size, num_generations=GROUP, beta=0.0, loss_type="grpo",
            temperature=1.0, bf16=True, gradient_checkpointing=False, report_to="none", save_strategy="no",
            max_steps=steps,
            learning_rate=1e-6, logging_steps=1000, use_cpu=DEVICE == "cpu", model_init_kwargs={"dtype": "bfloat16"},
            disable_tqdm=True,
        )  # fmt: skip
        tokenizer = tiny_tokenizer(pad_is_eos=False)
        try:
            trainer = GRPOTrainer(str(model), reward, args, Dataset.from_dict({"prompt": texts(STARTS * steps)}),
                                  processing_class=tokenizer, callbacks=[Clock()])  # fmt: skip
            began = time.perf_counter()
            trainer.train()
            found[str(size)] = list(np.diff([began, *marks]))
        except torch.OutOfMemoryError:
            found[str(size)] = "out of memory"
        trainer = None
        forget()
    return found


def modes(names: Sequence[str], steps: int, about: dict[str, Any], out: str) -> None:
    """Our step with an option, against our plain step, in one process."""
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        model = folder(home)
        forget()
        plain = ours(home, model, steps)
        for name in names:
            forget()
            found = ours(home, model, steps, MODES[name], name)
            rate = lambda each: [1 / s for s in each["seconds"][2:]]
            a, b = rate(found), rate(plain)
            what = f"the online step above; peak {found['peak_gib']:.1f} GiB, plain {plain['peak_gib']:.1f} GiB"
            keep({"name": f"gpu_step/{name}", "ours": float(np.median(a)), "peer": float(np.median(b)),
                  "peer_name": "the plain step", "unit": "steps/s", "ratio": float(np.median(a) / np.median(b)),
                  "spread": [min(a) / max(b), max(a) / min(b)], "repeats": steps - 2, **about, "what": what,
                  "details": {name: found, "plain": plain}}, out)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default="")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--no-trl", action="store_true")
    parser.add_argument("--modes", default="", help="some of overlap,8-bit,offload, in place of TRL")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", default="bench/results/gpu_step.jsonl")
    args = parser.parse_args()
    need_gpu(args.small)
    if not args.no_trl:
        need_peer("trl", "datasets")
    if args.modes:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        about = {"commit": args.commit, "device": named(), "versions": versions}
        return modes(args.modes.split(","), args.steps, about, args.out)
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        model = folder(home)
        forget()
        mine = ours(home, model, args.steps)
        forget()
        peer = {} if args.no_trl else theirs(home, model, args.steps)
    median = lambda each: float(np.median(each[2:]))  # the first steps compile and warm up
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    row: dict[str, Any] = {
        "name": "gpu_step/online step", "ours": 1 / median(mine["seconds"]), "unit": "steps/s", "commit": args.commit,
        "device": named(), "repeats": args.steps - 2, "versions": versions, "details": {"ours": mine, "trl": peer},
    }  # fmt: skip
    done = {k: v for k, v in peer.items() if isinstance(v, list)}
    if done:
        import trl

        versions["trl"] = trl.__version__
        size, best = min(done.items(), key=lambda x: median(x[1]))
        row |= {
            "peer": 1 / median(best),
            "peer_name": "TRL with generate",
            "ratio": median(best) / median(mine["seconds"]),
            "spread": [min(best[2:]) / max(mine["seconds"][2:]), max(best[2:]) / min(mine["seconds"][2:])],
        }
        row["peer_rows_at_once"] = int(size)
    phases = ", ".join(f"{k} {v:.3f}" for k, v in mine["phases"].items() if "seconds" in k)
    row["what"] = f"{STARTS} prompts of {PROMPT} x {GROUP} answers of {NEW} tokens; seconds of the last step: {phases}"
    keep(row, args.out)


if __name__ == "__main__":
    main()
