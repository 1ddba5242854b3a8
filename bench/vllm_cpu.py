"""Our engine, `transformers.generate` and vLLM's CPU build: the same weights, prompts, law and number of tokens.

    make bench-vllm          # installs vLLM in an environment of its own, and runs all of it (an hour)
    python bench/vllm_cpu.py [--threads 1,2] [--dtypes float32,bfloat16] [--cases …] [--repeats 3] [--quick]

SmolLM2-135M-Instruct continues 128 tokens of the pages in docs/ by 64 tokens, at temperature 1. No token is excluded
and none ends a text, so all three write equally many. Every repeat has prompts of its own, and the three take turns.
vLLM has a process of its own, which stays open and takes its own time. All run on the same cores, as many as threads,
and seconds are those of the wall clock: the machine must have nothing else to do (`busy` of a row says whether it had).
Before anything is timed, the greedy tokens of the three must be the same in float32. vLLM keeps blocks of 32 tokens:
with its default of 128, samples of one prompt of 128 tokens share nothing. Ours returns log-probs, the others do not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import alone, commit, record, versions

from trailmark.config import EngineConfig, ModelConfig, ModelShape
from trailmark.engines.base import Request, run
from trailmark.models.lm import LM
from trailmark.models.load import load_model
from trailmark.models.smollm import smollm2_folder
from trailmark.seats.open import open_engine
from trailmark.types import SamplingLaw

ROOT = Path(__file__).parents[1]
CASES = {"32 distinct": (32, 1), "8 distinct": (8, 1), "4 x 8": (4, 8)}  # prompts, samples of each
PROMPT, WRITTEN, CHECKED = 128, 64, 4
REST = 0.3  # seconds between turns, in which waiting threads stop to spin
Prompts = list[tuple[int, ...]]
Job = dict[str, Any]
Side = Callable[[Job], dict[str, Any]]  # seconds of wall clock and of computing, and the tokens of every text


class Vllm:
    """vLLM's process. It is ended with the block."""

    def __init__(self, python: str, words: list[str], threads: int):
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        env |= {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
                "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # fmt: skip
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # `__exit__` closes it
        command = [python, str(Path(__file__).with_name("vllm_side.py")), *words]
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=self.log, text=True)  # fmt: skip
        self.version = self._answer()["version"]

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise SystemExit(f"vLLM has ended: {(self.log.read().strip().splitlines() or ['it said nothing'])[-1]}")
        return json.loads(line)

    def __call__(self, job: Job) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def __enter__(self) -> Vllm:
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.communicate()  # it ends when nothing more is asked
        self.log.close()


def timed(write: Callable[[Job], list[list[int]]]) -> Side:
    def side(job: Job) -> dict[str, Any]:
        began, computed = time.perf_counter(), time.process_time()
        texts = write(job)
        took = {"seconds": time.perf_counter() - began, "computing": time.process_time() - computed}
        return {**took, "texts": texts}

    return side


def our_side(lm: LM, dtype: str) -> Side:
    """An engine for each number of samples, as `trailmark eval` opens it with batch_invariant off."""
    engines: dict[int, Any] = {}

    def write(job: Job) -> list[list[int]]:
        slots = len(job["prompts"]) * job["n"]
        if slots not in engines:
            settings = EngineConfig.model_validate(
                {"max_num_seqs": slots, "max_len": 256, "batch_invariant": False, "dtype": dtype}
            )
            engines[slots] = open_engine(lm, settings)
        law = SamplingLaw(temperature=0.0 if job["greedy"] else 1.0)
        asked = [
            Request(tuple(p), law, job["n"], job["tokens"], seed=job["seed"], key=str(i))
            for i, p in enumerate(job["prompts"])
        ]
        return [list(c.tokens) for done in run(engines[slots], asked) for c in done]

    return timed(write)


def generate_side(folder: str, dtype: str) -> Side:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="sdpa", trust_remote_code=False
    ).eval()
    model.generation_config.eos_token_id = None

    def write(job: Job) -> list[list[int]]:
        ids = torch.tensor(job["prompts"])
        law = {"do_sample": False} if job["greedy"] else {"do_sample": True, "top_k": 0, "top_p": 1.0}
        with torch.inference_mode():
            made = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=job["tokens"],
                                  num_return_sequences=job["n"], pad_token_id=0, **law)  # fmt: skip
        return made[:, ids.shape[1] :].tolist()

    return timed(write)


def drawn(lm: LM, number: int, seed: int) -> Prompts:
    """Windows of the pages in docs/: text, because how likely tokens are may matter to the time of drawing."""
    if lm.name not in _read:
        text = "\n".join(page.read_text("utf-8") for page in sorted((ROOT / "docs").glob("*.md")))[:400_000]
        _read[lm.name] = lm.tokenizer.encode(text, add_special_tokens=False)
    ids = _read[lm.name]
    starts = np.random.default_rng(seed).choice(len(ids) - PROMPT, number, replace=False)
    return [tuple(ids[s : s + PROMPT]) for s in starts]


_read: dict[str, list[int]] = {}


def alike(sides: dict[str, Side], prompts: Prompts) -> int:
    """How many prompts all sides continue with the same tokens, if the most likely one is always taken."""
    job = {"prompts": prompts, "n": 1, "tokens": WRITTEN // 2, "greedy": True, "seed": 0}
    found = [side(job)["texts"] for side in sides.values()]
    return sum(all(texts[k] == found[0][k] for texts in found) for k in range(len(prompts)))


def turns(sides: dict[str, Side], job: Job, first: int) -> dict[str, dict[str, Any]]:
    """One repeat: the same job for each side, another one first each time."""
    names = list(sides)
    took = {}
    for name in names[first % len(names) :] + names[: first % len(names)]:
        time.sleep(REST)
        took[name] = sides[name](job)
        lengths = {len(text) for text in took[name].pop("texts")}
        assert lengths == {job["tokens"]}, f"{name} wrote texts of {lengths} tokens, not of {job['tokens']}"
    return took


def compare(sides: dict[str, Side], lm: LM, case: str, sizes: tuple[int, int], how: str, repeats: int, more: Job,
            threads: int) -> None:  # fmt: skip
    prompts, n = sizes
    job = lambda seed, tokens: {
        "prompts": drawn(lm, prompts, seed), "n": n, "tokens": tokens, "greedy": False, "seed": seed
    }  # fmt: skip
    turns(sides, job(0, 4), 0)  # the first call of anything warms up
    took = [turns(sides, job(k + 1, WRITTEN), k) for k in range(repeats)]
    seconds = {name: [t[name]["seconds"] for t in took] for name in sides}
    busy = min(side["computing"] / side["seconds"] / threads for t in took for side in t.values())
    tokens = prompts * n * WRITTEN
    mine = statistics.median(tokens / s for s in seconds["ours"])
    details = {**more, "seconds": seconds, "busy": round(busy, 2)}
    for peer in [name for name in sides if name != "ours"]:
        ratios = [theirs / ours for ours, theirs in zip(seconds["ours"], seconds[peer])]
        theirs = statistics.median(tokens / s for s in seconds[peer])
        record(f"vllm_cpu/{case}, {how}, against {peer}", mine, theirs, peer, statistics.median(ratios), "tokens/s",
               repeats, [min(ratios), max(ratios)], f"{WRITTEN} tokens after {PROMPT}", details)  # fmt: skip


@contextlib.contextmanager
def on_cores(number: int) -> Iterator[None]:
    """This process, and those that it starts, compute with `number` threads on the last cores that they may use."""
    threads, allowed = torch.get_num_threads(), None
    torch.set_num_threads(number)
    if hasattr(os, "sched_setaffinity"):
        allowed = os.sched_getaffinity(0)
        if len(allowed) < number:
            raise SystemExit(f"{number} threads need {number} cores, and this process may use {len(allowed)}")
        os.sched_setaffinity(0, sorted(allowed)[-number:])
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if allowed is not None:
            os.sched_setaffinity(0, allowed)


def opened(quick: bool, place: str) -> tuple[str, LM]:
    """The model as a folder, and in float32 as ours."""
    if quick:
        shape = ModelShape.model_validate({"family": "llama", "layers": 2, "width": 128, "heads": 2, "context": 256})
        made = load_model(ModelConfig(shape=shape, device="cpu"))
        made.base.save_pretrained(place)
        made.tokenizer.save_pretrained(place)
    folder = place if quick else str(smollm2_folder())
    return folder, load_model(ModelConfig(name=folder, device="cpu")).freeze()


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own = os.environ.get("TRAILMARK_VLLM") or str(ROOT / ".venv-vllm" / "bin" / "python")
    parser.add_argument("--vllm", default=own, help="the Python of vLLM's environment")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--block", type=int, default=32, help="tokens of a block of vLLM's cache")
    parser.add_argument("--quick", action="store_true", help="a tiny model and small cases, to see that it runs")
    return parser.parse_args(words)


def main() -> None:
    args = arguments()
    there = Path(args.vllm).is_file()
    if not there and not args.quick:
        raise SystemExit(f"vllm_cpu.py compares with vLLM, and there is none at {args.vllm}: make bench-vllm installs "
                         "it, --quick rehearses without it")  # fmt: skip
    if not there:
        print(f"There is no vLLM at {args.vllm}: a stand-in answers, and `make bench-vllm` installs vLLM.", flush=True)
    cases = {"2 distinct": (2, 1), "2 x 2": (2, 2)} if args.quick else {c: CASES[c] for c in args.cases.split(",")}
    repeats = 1 if args.quick else args.repeats
    commit()
    with tempfile.TemporaryDirectory() as place:
        folder, lm = opened(args.quick, place)
        for threads in [1] if args.quick else [int(t) for t in args.threads.split(",")]:
            for dtype in args.dtypes.split(","):
                words = ["--model", folder, "--dtype", dtype, "--block", str(args.block)]
                python, words = (args.vllm, words) if there else (sys.executable, ["--stand-in"])
                how = f"{dtype}, {threads} thread{'s' * (threads > 1)}"
                with on_cores(threads), Vllm(python, words, threads) as vllm:
                    sides = {"ours": our_side(lm, dtype), "generate": generate_side(folder, dtype), "vLLM": vllm}
                    same = alike(dict(list(sides.items())[: 3 if there else 2]), drawn(lm, CHECKED, 0))
                    if dtype == "float32" and same < CHECKED:
                        raise SystemExit(f"{how}: the greedy tokens of ours, generate and vLLM are the same for only "
                                         f"{same} of {CHECKED} prompts: they do not do the same work")  # fmt: skip
                    alone(f"vllm_cpu/greedy tokens, {how}", same, f"of {CHECKED} prompts", "all three write the same")
                    used = {"versions": {**versions(), "vllm": vllm.version}}
                    for case, sizes in cases.items():
                        compare(sides, lm, case, sizes, how, repeats, used, threads)


if __name__ == "__main__":
    main()
