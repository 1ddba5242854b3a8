"""How far float32 log-probs are from float64, and what they cost: log_softmax, gather - logsumexp, and
`models/sampling.py`'s `chosen`, which sums the exponentials of a few rows at a time. Entropies by log_softmax, too.

    OMP_NUM_THREADS=1 python bench/log_softmax.py
    python bench/log_softmax.py cuda
"""

from __future__ import annotations

import sys
import time

import torch

ROWS = 256
DEVICE = "cuda" if "cuda" in sys.argv else "cpu"


def gathered(logits: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(1, token[:, None])[:, 0]


def subtracted(logits: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    return logits.gather(1, token[:, None])[:, 0] - logits.logsumexp(-1)


def entropy(logits: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    logp = logits.log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


def clock() -> float:
    """On a CPU the time of this process alone, whatever else the machine does."""
    if DEVICE == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    ways = {"log_softmax": gathered, "gather - logsumexp": subtracted, "entropy": entropy}
    if DEVICE == "cpu":
        from trailmark.models import sampling

        sampling.WIDE = 0  # `chosen` sums in its own way at every size
        ways["chosen"] = sampling.chosen
    print("| vocabulary | way | mean error | largest error | forward | backward |")
    print("|---:|---|---:|---:|---:|---:|")
    for vocab in (260, 4096, 16_384, 49_152, 151_936):
        draw = torch.Generator().manual_seed(0)
        logits = 3 * torch.randn(ROWS, vocab, generator=draw)
        token = torch.randint(0, vocab, (ROWS,), generator=draw)
        logits, token = logits.to(DEVICE), token.to(DEVICE)
        for name, way in ways.items():
            exact, times = (entropy if way is entropy else gathered)(logits.double(), token), []
            for _ in range(5):
                x = logits.clone().requires_grad_()
                at = [clock()]
                found = way(x, token)
                at.append(clock())
                found.sum().backward()
                at.append(clock())
                times.append((at[1] - at[0], at[2] - at[1]))
            gap = found.detach().double() - exact
            forward, backward = (1000 * min(t) for t in zip(*times))
            far = f"{gap.mean():+.1e} | {gap.abs().max():.1e}"
            print(f"| {vocab:,} | {name} | {far} | {forward:.2f} ms | {backward:.2f} ms |")


if __name__ == "__main__":
    main()
