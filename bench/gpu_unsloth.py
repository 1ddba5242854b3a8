"""GRPO's gradient on one GPU, ours against Unsloth's, on the same weights and the same batch in one process.

    PYTHONPATH=src python bench/gpu_unsloth.py [--commit HASH] [--repeats 5] [--cases 512,4096,12000]

The batches of gpu_training.py: Qwen2-0.5B's shape with random weights in bfloat16, 16 samples of one prompt. Unsloth's
GRPO computes a shared prompt once (its own prefix grouper, on by default), trains all weights here, and is asked for
16, 4 and 1 rows at once; the fastest counts. It changes classes of transformers, so ours runs first, and it wants TRL
of at most 1.15. Writes bench/results/gpu_unsloth.jsonl.
"""

from __future__ import annotations

try:
    import unsloth  # isort: skip  # it must be imported before transformers
except (ImportError, NotImplementedError):  # it is not installed, or there is no GPU
    unsloth = None
import argparse
import importlib.metadata
import tempfile

import torch
import transformers
from common import need_gpu
from gpu_training import CASES, episodes, forget, keep, made, named, ours, theirs

from trailmark.models.tiny import tiny_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cases", default="512,4096,12000")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", default="bench/results/gpu_unsloth.jsonl")
    args = parser.parse_args()
    need_gpu()
    if unsloth is None:
        raise SystemExit("gpu_unsloth.py compares with Unsloth, which cannot be imported here: pip install unsloth")
    cases = args.cases.split(",")
    versions = {n: importlib.metadata.version(n) for n in ("torch", "transformers", "unsloth", "trl")}
    mine = {}
    for case in cases:
        mine[case] = ours(episodes(*CASES[case]), args.repeats, checkpointing=False, compiled=True)
        forget()
    with tempfile.TemporaryDirectory() as folder:
        model, tokenizer = made("sdpa"), tiny_tokenizer(pad_is_eos=False)
        model.generation_config = transformers.GenerationConfig(pad_token_id=tokenizer.pad_token_id)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        del model
        forget()
        peer, _ = unsloth.FastLanguageModel.from_pretrained(
            folder,
            max_seq_length=16384,
            dtype=torch.bfloat16,
            load_in_4bit=False,
            full_finetuning=True,
            trust_remote_code=False,
        )
    for case in cases:
        found = theirs(episodes(*CASES[case]), args.repeats, peer)
        done = {k: v for k, v in found.items() if isinstance(v, dict)}
        size, best = min(done.items(), key=lambda x: x[1]["seconds"])
        a = mine[case]
        what = f"16 samples of {CASES[case][1]} after {CASES[case][0]}; {a['gib']:.1f} GiB, "
        what += f"Unsloth {best['gib']:.1f} GiB at {size} rows at once; "
        what += f"losses differ by {abs(best['loss'] - a['loss']):.1g}"
        keep({"name": f"gpu_unsloth/grpo {case}", "ours": 1 / a["seconds"], "peer": 1 / best["seconds"],
              "peer_name": "Unsloth", "unit": "gradients/s", "ratio": best["seconds"] / a["seconds"],
              "spread": [best["least"] / a["most"], best["most"] / a["least"]], "repeats": args.repeats,
              "commit": args.commit, "device": named(), "versions": versions, "what": what,
              "details": {"ours": a, "unsloth": found}}, args.out)  # fmt: skip


if __name__ == "__main__":
    main()
