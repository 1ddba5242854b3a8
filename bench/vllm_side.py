"""vLLM in a process of its own, for bench/vllm_cpu.py: jobs come in as lines of JSON, times and tokens go out.

It runs in vLLM's environment and imports nothing of ours. `--stand-in` answers without vLLM, for rehearsals.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Texts = list[list[int]]


def open_vllm(model: str, dtype: str, block: int, most: int) -> tuple[str, Callable[[dict[str, Any]], Texts]]:
    import vllm

    sizes = {"max_model_len": 256, "max_num_seqs": most, "block_size": block}
    llm = vllm.LLM(model=model, dtype=dtype, generation_config="vllm", disable_log_stats=True, **sizes)  # type: ignore[arg-type]

    def write(job: dict[str, Any]) -> Texts:
        law = {"temperature": 0.0} if job["greedy"] else {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
        asked = vllm.SamplingParams(n=job["n"], max_tokens=job["tokens"], ignore_eos=True, detokenize=False, **law)
        made = llm.generate([{"prompt_token_ids": p} for p in job["prompts"]], asked, use_tqdm=False)
        return [list(text.token_ids) for of_prompt in made for text in of_prompt.outputs]

    return vllm.__version__, write


def stand_in(job: dict[str, Any]) -> Texts:
    return [[0] * job["tokens"]] * (len(job["prompts"]) * job["n"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--most", type=int, default=32)
    parser.add_argument("--stand-in", action="store_true")
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    made = ("", stand_in) if args.stand_in else open_vllm(args.model, args.dtype, args.block, args.most)
    version, write = made
    print(json.dumps({"version": version}), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        began, computed = time.perf_counter(), time.process_time()
        texts = write(job)
        took = {"seconds": time.perf_counter() - began, "computing": time.process_time() - computed}
        print(json.dumps({**took, "texts": texts}), file=answers, flush=True)


if __name__ == "__main__":
    main()
