"""How far float32 log-probs are from float64: log_softmax against gather - logsumexp.

    python bench/log_softmax.py
"""

from __future__ import annotations

import time

import torch

ROWS = 256


def gathered(logits: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(1, token)


def subtracted(logits: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    return logits.gather(1, token) - logits.logsumexp(-1, keepdim=True)


def main() -> None:
    print("| vocabulary | way | mean error | largest error | forward + backward |")
    print("|---:|---|---:|---:|---:|")
    for vocab in (260, 49_152, 151_936):
        draw = torch.Generator().manual_seed(0)
        logits = 3 * torch.randn(ROWS, vocab, generator=draw)
        token = torch.randint(0, vocab, (ROWS, 1), generator=draw)
        exact = gathered(logits.double(), token)
        for way in (gathered, subtracted):
            times = []
            for _ in range(3):
                x = logits.clone().requires_grad_()
                began = time.perf_counter()
                found = way(x, token)
                found.sum().backward()
                times.append(time.perf_counter() - began)
            gap = found.detach().double() - exact
            name = "log_softmax" if way is gathered else "gather - logsumexp"
            print(f"| {vocab:,} | {name} | {gap.mean():+.1e} | {gap.abs().max():.1e} | {1000 * min(times):.0f} ms |")


if __name__ == "__main__":
    main()
