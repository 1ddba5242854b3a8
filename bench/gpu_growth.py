"""How cost grows on one GPU: what sharing prefixes saves over group size, prompt length, turns and model size, for
gradients, likelihoods and completions; and label decisions a second over the number of actions.

    PYTHONPATH=src python bench/gpu_growth.py [--commit HASH] [--only "group size,turns"]

Each point is ours against its flat counterpart (the same code without sharing) in one process: GRPO gradients as a tree
against rows behind one another; likelihoods of k texts after one context against each with its context; k completions
of one state against k prompts. Writes bench/results/gpu_growth.jsonl, a row for every curve; `python bench/table.py`
draws them. `--small` rehearses it on a CPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from common import need_gpu
from gpu_training import DEVICE, SMALL, WORDS, episodes, forget, keep, named, samples_of, wait

from trailmark.config import LearnerConfig
from trailmark.engines.base import Request, run
from trailmark.engines.local import LocalEngine
from trailmark.learn.learner import Learner
from trailmark.models.forward import fill, pack
from trailmark.models.lm import LM
from trailmark.models.readout import Readout
from trailmark.models.tiny import tiny_tokenizer
from trailmark.objectives.clipped import Clipped
from trailmark.types import Sample, SamplingLaw

SIZES = {  # layers, width, heads, key heads, feed-forward
    "0.1B": (12, 640, 10, 2, 1792), "0.5B": (24, 896, 14, 2, 4864), "1.5B": (28, 1536, 12, 2, 8960),
}  # fmt: skip
if SMALL:
    SIZES = {"0.1B": (1, 32, 4, 2, 64), "0.5B": (2, 64, 4, 2, 128)}
REPEATS = 3


def model(size: str = "0.5B") -> LM:
    layers, width, heads, keys, ffn = SIZES[size]
    vocab = 512 if SMALL else 151936
    config = transformers.Qwen2Config(
        vocab_size=vocab, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=keys,
        intermediate_size=ffn, max_position_embeddings=32768, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(DEVICE):
        made = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa", trust_remote_code=False
        )
    return LM(made, tiny_tokenizer(pad_is_eos=True), size)


def seconds(call: Callable[[], Any]) -> float:
    call()
    each = []
    for _ in range(REPEATS):
        wait()
        began = time.perf_counter()
        call()
        wait()
        each.append(time.perf_counter() - began)
    return float(np.median(each))


def gradients(lm: LM, samples: list[Sample]) -> dict[str, float]:
    found = {}
    for layout in ("tree", "flat"):
        learner = Learner({"policy": lm}, LearnerConfig().model_copy(update={"layout": layout}))
        filled = learner.fill(samples, old=Readout(""))
        found[layout] = seconds(lambda learner=learner, filled=filled: learner.gradient(filled, Clipped()))
        forget()
    return found


def groups(prompt: int, written: int, n: int) -> list[Sample]:
    return list(samples_of(episodes(prompt, written, n))[0])


def turns(number: int, first: int, each: int, n: int) -> list[Sample]:
    """`n` conversations of `number` turns that part ways as they go on, a tree of several levels."""
    draw = np.random.default_rng(0)
    open_: list[list[int]] = [draw.integers(0, WORDS, first).tolist()]
    for _ in range(number):
        ways = max(2, round(n ** (1 / number))) if len(open_) < n else 1
        open_ = [[*row, *draw.integers(0, WORDS, each).tolist()] for row in open_ for _ in range(ways)][:n]
    samples = []
    for k, row in enumerate(open_):
        weight = np.r_[np.zeros(first), np.ones(len(row) - first)]
        samples.append(
            Sample(np.array(row), {"weight": weight, "advantage": weight * (k % 5 - 2)}, {"weight": weight.sum()})
        )
    return samples


def over_group_size() -> list[dict[str, Any]]:
    lm, points = model(), (2, 4) if SMALL else (2, 4, 8, 16, 32)
    return [{"x": n, **gradients(lm, groups(64 if SMALL else 2048, 16 if SMALL else 256, n))} for n in points]


def over_prompt() -> list[dict[str, Any]]:
    lm, points = model(), (32, 64) if SMALL else (512, 2048, 8192)
    return [{"x": p, **gradients(lm, groups(p, 16 if SMALL else 256, 16))} for p in points]


def over_turns() -> list[dict[str, Any]]:
    lm, points = model(), (1, 2) if SMALL else (2, 4, 8)
    return [{"x": t, **gradients(lm, turns(t, 32 if SMALL else 1024, 8 if SMALL else 256, 16))} for t in points]


def over_size() -> list[dict[str, Any]]:
    out = []
    for size in SIZES:
        out.append({"x": size, **gradients(model(size), groups(64 if SMALL else 2048, 16 if SMALL else 256, 16))})
        forget()
    return out


def likelihoods() -> list[dict[str, Any]]:
    """Log-probs of k texts after one context, as `score/` reads them."""
    lm, out = model(), []
    context, text = (64, 8) if SMALL else (2048, 64)
    for k in (1, 4) if SMALL else (1, 4, 16, 64):
        samples = groups(context, text, k)
        point: dict[str, Any] = {"x": k}
        for shape in ("tree", "flat"):
            packs = pack({"policy": lm}, samples, shape)
            point[shape] = seconds(
                lambda packs=packs, samples=samples: fill({"policy": lm}, samples, packs, [Readout("logp")])
            )
        out.append(point)
    return out


def completions() -> list[dict[str, Any]]:
    """k completions of each of 16 states, against as many prompts that share nothing."""
    lm, out = model(), []
    states, prompt, new = (2, 32, 4) if SMALL else (16, 1024, 64)
    draw = np.random.default_rng(0)
    for k in (1, 2) if SMALL else (1, 4, 16):
        rows = draw.integers(0, WORDS, (states * k, prompt)).tolist()
        point: dict[str, Any] = {"x": k}
        engine = LocalEngine(lm, states * k, prompt + new, fixed=False)
        engine.decoder.reuse = False  # each time from nothing
        shared = [Request(tuple(r), SamplingLaw(), k, new, key=str(n)) for n, r in enumerate(rows[:states])]
        apart = [Request(tuple(r), SamplingLaw(), 1, new, key=str(n)) for n, r in enumerate(rows)]
        for name, asked in (("tree", shared), ("flat", apart)):
            point[name] = seconds(lambda engine=engine, asked=asked: run(engine, asked))
        out.append(point)
        forget()
    return out


def labels() -> list[dict[str, Any]]:
    """Decisions among labels of one token each, in one pass a decision."""
    lm, out = model(), []
    asked, prompt = (8, 32) if SMALL else (256, 512)
    rows = np.random.default_rng(0).integers(0, WORDS, (asked, prompt)).tolist()
    engine = LocalEngine(lm, asked, prompt + 8, fixed=False)
    engine.decoder.reuse = False
    for actions in (8, 32) if SMALL else (8, 32, 128, 252):
        law = SamplingLaw(allowed=tuple(range(10, 10 + actions)))

        def call(law: SamplingLaw = law) -> None:
            run(engine, [Request(tuple(r), law, 1, 1, key=str(k)) for k, r in enumerate(rows)])

        out.append({"x": actions, "decisions_per_second": asked / seconds(call)})
    return out


CURVES = {
    "group size": over_group_size, "prompt length": over_prompt, "turns": over_turns, "model size": over_size,
    "likelihoods": likelihoods, "completions": completions, "labels": labels,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default="")
    parser.add_argument("--only", default=",".join(CURVES))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", default="bench/results/gpu_growth.jsonl")
    args = parser.parse_args()
    need_gpu(args.small)
    about = {"commit": args.commit, "device": named(), "repeats": REPEATS,
             "versions": {"torch": torch.__version__, "transformers": transformers.__version__}}  # fmt: skip
    for name in args.only.split(","):
        points = CURVES[name]()
        forget()
        last = points[-1]
        row: dict[str, Any] = {"name": f"gpu_growth/{name}", **about, "points": points}
        if name == "labels":
            row |= {"ours": last["decisions_per_second"], "unit": "decisions/s"}
            row["what"] = ", ".join(f"{p['decisions_per_second']:,.0f} of {p['x']}" for p in points)
        else:
            ratios = [p["flat"] / p["tree"] for p in points]
            row |= {"ours": 1 / last["tree"], "peer": 1 / last["flat"], "peer_name": "the same without sharing",
                    "ratio": ratios[-1], "unit": "passes/s", "spread": [min(ratios), max(ratios)]}  # fmt: skip
            row["what"] = "times as fast as without sharing: " + ", ".join(
                f"{r:.2f} at {p['x']}" for r, p in zip(ratios, points)
            )
        keep(row, args.out)


if __name__ == "__main__":
    main()
