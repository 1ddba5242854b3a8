"""Where the host waits for a GPU inside an update, and the mean ratio of new to old log-probs, which must be 1.

    PYTHONPATH=src python bench/gpu_waits.py [--commit HASH]

One GRPO update at Qwen2-0.5B's shape under `torch.cuda.set_sync_debug_mode("warn")`: every wait is a warning with the
line that caused it. Also offloaded moments: the weights after two updates must be those without offloading. Prints one
JSON object and appends it to bench/results/gpu_waits.jsonl.
"""

from __future__ import annotations

import argparse
import collections
import traceback
import warnings
from typing import Any

import torch
import transformers
from common import need_gpu
from gpu_training import episodes, forget, keep, made, named, samples_of

from trailmark.config import LearnerConfig, OptimConfig
from trailmark.learn.learner import Learner, Update
from trailmark.models.lm import LM
from trailmark.models.readout import Readout
from trailmark.models.tiny import tiny_tokenizer
from trailmark.objectives.clipped import Clipped


def learner(**config: Any) -> Learner:
    lm = LM(made("sdpa"), tiny_tokenizer(), "qwen2-0.5b")
    return Learner({"policy": lm}, LearnerConfig(optim=OptimConfig(lr=1e-4), **config), total=100)


def updated(**config: Any) -> tuple[torch.Tensor, float]:
    one = learner(**config)
    for _ in range(2):
        samples = one.fill(samples_of(episodes(512, 256, 8))[0], old=Readout(""))
        one.update(Update(samples, Clipped()))
    weights = torch.cat([p.detach().flatten().float() for p in one.models["policy"].model.parameters()]).cpu()
    kept = sum(t.numel() * t.element_size() for t in one.optimisers["policy"].tensors().values() if t.is_cuda) / 2**30
    return weights, kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", default="bench/results/gpu_waits.jsonl")
    args = parser.parse_args()
    need_gpu()
    one = learner()
    samples = one.fill(samples_of(episodes(512, 512))[0], old=Readout(""))
    one.update(Update(samples, Clipped()))
    samples = one.fill(samples_of(episodes(512, 512))[0], old=Readout(""))
    found: collections.Counter[str] = collections.Counter()

    def noted(message: Any, *_: Any, **__: Any) -> None:
        if "synchroniz" in str(message):
            ours = [f for f in traceback.extract_stack() if "trailmark" in f.filename]
            found[
                f"{ours[-1].filename.rpartition('trailmark/')[2]}:{ours[-1].lineno} {ours[-1].line}" if ours else "?"
            ] += 1

    warnings.showwarning = noted
    warnings.simplefilter("always")
    torch.cuda.set_sync_debug_mode("warn")
    report = one.update(Update(samples, Clipped()))
    torch.cuda.set_sync_debug_mode("default")
    del one
    forget()
    plain, here = updated()
    forget()
    moved, there = updated(offload=["optimiser"])
    row = {
        "name": "gpu_waits/update", "ours": sum(found.values()), "unit": "waits", "commit": args.commit,
        "device": named(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__}, "where": dict(found),
        "report": report, "offload_equal": bool(torch.equal(plain, moved)), "moments_gib": [here, there],
    }  # fmt: skip
    row["what"] = f"of the host in one update; mean ratio {report['ratio']:.9g}, clipped {report['clip_fraction']:.9g}"
    keep(row, args.out)


if __name__ == "__main__":
    main()
