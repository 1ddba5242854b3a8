"""Our engine on a GPU at the shape of SmolLM2-135M: against transformers' `generate`, and what decisions and updates
cost.

    python bench/gpu_engine.py

Random weights, made on the device. First a check: greedy tokens in float32 are those of `generate`. Then, in bfloat16,
tokens a second against `generate` at the same batch; label decisions a second on prompts of 768 tokens; tokens a second
of an SFT update (float32 weights, bfloat16 autocast). One JSON object per line, appended to
bench/results/gpu_engine.jsonl.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from common import alone, compare

from trailmark.config import LearnerConfig, OptimConfig
from trailmark.engines.base import Request, run
from trailmark.engines.local import LocalEngine
from trailmark.learn.learner import Learner, Update
from trailmark.models.lm import LM
from trailmark.models.tiny import build, tiny_config, tiny_tokenizer
from trailmark.objectives.sft import Sft
from trailmark.types import Sample, SamplingLaw

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDE = DEVICE == "cuda"


def model(dtype: torch.dtype) -> LM:
    shape = (
        dict(vocab=49152, layers=30, width=576, heads=9, kv_heads=3, ffn=1536) if WIDE else dict(vocab=512, layers=2)
    )
    lm = LM(
        build(tiny_config("llama", context=4096, **shape), 0, dtype, DEVICE),
        tiny_tokenizer(pad_is_eos=True),
        "smollm2-shape",
    )
    lm.base.config.tie_word_embeddings = True
    return lm


def prompts(n: int, length: int, seed: int) -> list[tuple[int, ...]]:
    draw = np.random.default_rng(seed)
    return [tuple(int(t) for t in draw.integers(0, 250, length)) for _ in range(n)]


def generate(lm: LM, rows: list[tuple[int, ...]], new: int, greedy: bool) -> list[list[int]]:
    ids = torch.tensor(rows, device=DEVICE)
    with torch.no_grad():
        out = lm.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new,
                                do_sample=not greedy, pad_token_id=0)  # fmt: skip
    return out[:, ids.shape[1] :].tolist()


def timed(call) -> float:
    if WIDE:
        torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    if WIDE:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    lm = model(torch.float32)
    asked = prompts(8, 96, 0)
    done = run(LocalEngine(lm, 8, 256), [Request(p, SamplingLaw(temperature=0.0), 1, 48) for p in asked])
    lm.base.set_attn_implementation("sdpa")
    want = generate(lm, asked, 48, True)
    lm.base.set_attn_implementation("trailmark")
    same = [list(d[0].tokens) == w for d, w in zip(done, want)]
    alone(
        "gpu_engine/greedy equals generate, float32",
        sum(same),
        "of 8 prompts",
        "48 tokens after 96; a tie of two logits may part them",
    )
    for batch in (32, 256) if WIDE else (4,):
        fast = model(torch.bfloat16)
        plain = model(torch.bfloat16)
        plain.base.set_attn_implementation("sdpa")
        engine, new = LocalEngine(fast, batch, 256), 64 if WIDE else 8
        rows = prompts(batch, 128 if WIDE else 16, 1)
        requests = [Request(p, SamplingLaw(), 1, new, key=str(k)) for k, p in enumerate(rows)]
        compare(f"gpu_engine/tokens, batch {batch}", lambda e=engine,
            r=requests: sum(len(c[0].tokens) for c in run(e, r)),
                lambda p=plain, r=rows, n=new: sum(map(len, generate(p, r, n, False))), "transformers generate",
                "tokens/s", 3,
                f"{new} tokens after {len(rows[0])}, bfloat16")  # fmt: skip
    engine = LocalEngine(fast, 256 if WIDE else 4, 1024)
    law = SamplingLaw(allowed=tuple(range(62)))
    for k in range(3):
        rows = prompts(256 if WIDE else 8, 768 if WIDE else 64, 2 + k)
        seconds = timed(lambda r=rows: run(engine, [Request(p, law, 1, 1, key=str(i)) for i, p in enumerate(r)]))
    alone(
        "gpu_engine/decisions",
        len(rows) / seconds,
        "decisions/s",
        f"prompts of {len(rows[0])} tokens, 62 labels",
    )
    learner = Learner({"policy": lm}, LearnerConfig(optim=OptimConfig(lr=1e-5), micro_tokens=65536 if WIDE else 512,
                                                    amp="bf16" if WIDE else "none"))  # fmt: skip
    for layout in ("flat", "rows"):
        learner.config = learner.config.model_copy(update={"layout": layout})
        for k in range(3):
            rows = prompts(128 if WIDE else 4, 768 if WIDE else 64, 9 + k)
            weight = np.r_[np.zeros(len(rows[0]) - 1), 1.0]
            samples = [Sample(np.array(r), {"weight": weight}, {"weight": 1.0}) for r in rows]
            seconds = timed(lambda s=samples: learner.update(Update(s, Sft())))
        alone(f"gpu_engine/update, {layout}", sum(map(len, rows)) / seconds, "tokens/s",
               f"{len(rows)} rows of {len(rows[0])}, loss on the last token")  # fmt: skip


if __name__ == "__main__":
    main()
