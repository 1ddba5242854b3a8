"""Sampling on one GPU at Qwen2-0.5B's shape, bfloat16: our engine against transformers' `generate` at its best batch,
in one process.

    PYTHONPATH=src python bench/gpu_sampling.py [--commit HASH] [--repeats 3]

Prompts of 512 tokens, 128 new ones: 256 distinct prompts, 16 prompts x 16 samples, 64 distinct. Beside it what `fixed`
costs. First a check: greedy tokens in float32 are those of `generate`. Writes bench/results/gpu_sampling.jsonl, prints
a JSON line for each case.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from common import need_gpu
from gpu_training import DEVICE, SMALL, WORDS, forget, keep, made, named, wait

from trailmark.engines.base import Request, run
from trailmark.engines.local import LocalEngine
from trailmark.models.lm import LM
from trailmark.models.tiny import tiny_tokenizer
from trailmark.types import SamplingLaw

PROMPT, NEW = 512, 128
CASES = {"256 distinct": (256, 1), "16x16": (16, 16), "64 distinct": (64, 1)}
if SMALL:
    PROMPT, NEW, CASES = 32, 8, {"256 distinct": (8, 1), "16x16": (2, 4)}


def prompts(n: int, seed: int) -> list[tuple[int, ...]]:
    draw = np.random.default_rng(seed)
    return [tuple(int(t) for t in draw.integers(0, WORDS, PROMPT)) for _ in range(n)]


def timed(call: Any, repeats: int) -> list[float]:
    for seed in (-1, 0):  # the first call compiles and records; the second meets slots that hold old prompts
        call(seed + 1000)
    each = []
    for k in range(repeats):
        wait()
        began = time.perf_counter()
        call(k + 1)
        wait()
        each.append(time.perf_counter() - began)
    return each


def ours(model: Any, distinct: int, n: int, repeats: int, fixed: bool) -> dict[str, Any]:
    lm = LM(model, tiny_tokenizer(pad_is_eos=True), "qwen2-0.5b")
    engine = LocalEngine(lm, slots=distinct * n, max_len=PROMPT + NEW, fixed=fixed)
    began = time.perf_counter()

    def call(seed: int) -> None:
        asked = [
            Request(p, SamplingLaw(), n, NEW, key=str(k), seed=seed) for k, p in enumerate(prompts(distinct, seed))
        ]
        done = run(engine, asked)
        assert sum(len(c.tokens) for d in done for c in d) == distinct * n * NEW

    each = timed(call, repeats)
    return {"tokens_per_second": distinct * n * NEW / float(np.median(each)), "seconds": each,
            "first": time.perf_counter() - began - sum(each)}  # fmt: skip


TALKS, TURNS, FIRST, WRITES, ANSWER = (8, 3, 64, 8, 8) if SMALL else (64, 10, 512, 32, 64)


def conversations(model: Any, reuse: bool, repeats: int) -> dict[str, Any]:
    """Conversations side by side: the policy writes, a world answers, and the next prompt is all of it."""
    engine = LocalEngine(LM(model, tiny_tokenizer(pad_is_eos=True), "qwen2-0.5b"), TALKS,
                         FIRST + TURNS * (WRITES + ANSWER), fixed=False)  # fmt: skip
    engine.decoder.reuse = reuse and engine.decoder.reuse
    counted = {"computed": 0, "written": 0}

    def call(seed: int) -> None:
        draw = np.random.default_rng(seed)
        texts = draw.integers(0, WORDS, (TALKS, FIRST + TURNS * ANSWER)).tolist()
        before = engine.counts.computed

        async def talk(k: int) -> None:
            prompt, rest = texts[k][:FIRST], texts[k][FIRST:]
            for turn in range(TURNS):
                request = Request(tuple(prompt), SamplingLaw(), 1, WRITES, key=f"{k}/{turn}", seed=seed)
                (done,) = await engine.sample(request)
                prompt = [*prompt, *done.tokens, *rest[turn * ANSWER : (turn + 1) * ANSWER]]

        async def all_of_them() -> None:
            await asyncio.gather(*(talk(k) for k in range(TALKS)))

        asyncio.run(all_of_them())
        counted["computed"], counted["written"] = engine.counts.computed - before, TALKS * TURNS * WRITES

    each = timed(call, repeats)
    return {"tokens_per_second": counted["written"] / float(np.median(each)), "seconds": each,
            "computed_per_written": counted["computed"] / counted["written"]}  # fmt: skip


def theirs(model: Any, distinct: int, n: int, repeats: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for batch in sorted({distinct * n, max(64, distinct * n // 2)}, reverse=True):  # all at once was its best so far

        def call(seed: int, batch: int = batch) -> None:
            rows = [p for p in prompts(distinct, seed) for _ in range(n)]
            for first in range(0, len(rows), batch):
                ids = torch.tensor(rows[first : first + batch], device=DEVICE)
                with torch.no_grad():
                    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, min_new_tokens=NEW,
                                   do_sample=True, top_k=0, pad_token_id=0, use_cache=True)  # fmt: skip

        out[str(batch)] = [distinct * n * NEW / seconds for seconds in timed(call, repeats)]
    return out


def record(
    case: str, mine: dict[str, Any], fixed: dict[str, Any] | None, peer: dict[str, list[float]], about: dict[str, Any]
) -> dict[str, Any]:
    """The row of the page: tokens a second; the peer at its best batch."""
    rates = [CASES[case][0] * CASES[case][1] * NEW / s for s in mine["seconds"]]
    row = {"name": f"gpu_sampling/sampling {case}", "ours": float(np.median(rates)), "unit": "tokens/s", **about,
           "details": {"ours": mine, "ours fixed": fixed, "generate": peer}}  # fmt: skip
    what = f"{NEW} tokens after {PROMPT}"
    if peer:
        batch, best = max(peer.items(), key=lambda x: float(np.median(x[1])))
        row |= {"peer": float(np.median(best)), "peer_name": "transformers generate",
                "ratio": row["ours"] / float(np.median(best)),
                "spread": [min(rates) / max(best), max(rates) / min(best)]}  # fmt: skip
        what += f"; generate at batch {batch}"
    return {**row, "what": what + (f"; with fixed shapes {fixed['tokens_per_second']:,.0f} tokens/s" if fixed else "")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default="")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--no-generate", action="store_true")
    parser.add_argument("--fixed", action="store_true", help="also with fixed shapes")
    parser.add_argument("--no-conversations", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", default="bench/results/gpu_sampling.jsonl")
    args = parser.parse_args()
    need_gpu(args.small)
    about = {"commit": args.commit, "device": named(), "repeats": args.repeats,
             "versions": {"torch": torch.__version__, "transformers": transformers.__version__}}  # fmt: skip
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    for case in filter(None, args.cases.split(",")):
        distinct, n = CASES[case]
        mine = ours(made("sdpa"), distinct, n, args.repeats, fixed=False)
        fixed = ours(made("sdpa"), distinct, n, args.repeats, fixed=True) if args.fixed else None
        forget()
        peer = {} if args.no_generate else theirs(made("sdpa"), distinct, n, args.repeats)
        row = record(case, mine, fixed, peer, about)
        keep(row, args.out)
        forget()
    if args.no_conversations:
        return
    with_, without = (conversations(made("sdpa"), reuse, args.repeats) for reuse in (True, False))
    row = {"name": "gpu_sampling/conversations", "ours": with_["tokens_per_second"], "unit": "tokens/s", **about,
           "peer": without["tokens_per_second"], "peer_name": "the engine without reuse over turns",
           "ratio": with_["tokens_per_second"] / without["tokens_per_second"],
           "spread": [min(without["seconds"]) / max(with_["seconds"]), max(without["seconds"]) / min(with_["seconds"])],
           "details": {"with": with_, "without": without}}  # fmt: skip
    what = f"{TALKS} conversations of {TURNS} turns; prompt tokens computed per token written: "
    what += f"{with_['computed_per_written']:.2f} with reuse over turns, {without['computed_per_written']:.2f} without"
    keep({**row, "what": what}, args.out)


if __name__ == "__main__":
    main()
