"""How far float32 log-probs are from float64, and what they cost: log_softmax, gather - logsumexp, and
`models/sampling.py`'s `chosen`, which sums the exponentials of a few rows at a time.

    OMP_NUM_THREADS=1 python bench/log_softmax.py
"""

from __future__ import annotations

import time

import torch

from trailmark.models import sampling

ROWS = 256


def gathered(logits: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(1, token[:, None])[:, 0]


def subtracted(logits: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    return logits.gather(1, token[:, None])[:, 0] - logits.logsumexp(-1)


def main() -> None:
    sampling.WIDE = 0  # `chosen` sums in its own way at every size
    ways = {"log_softmax": gathered, "gather - logsumexp": subtracted, "chosen": sampling.chosen}
    print("| vocabulary | way | mean error | largest error | forward | backward |")
    print("|---:|---|---:|---:|---:|---:|")
    for vocab in (260, 4096, 16_384, 49_152, 151_936):
        draw = torch.Generator().manual_seed(0)
        logits = 3 * torch.randn(ROWS, vocab, generator=draw)
        token = torch.randint(0, vocab, (ROWS,), generator=draw)
        exact = gathered(logits.double(), token)
        for name, way in ways.items():
            times = []
            for _ in range(5):
                x = logits.clone().requires_grad_()
                clock = [time.process_time()]  # of this process alone, whatever else the machine does
                found = way(x, token)
                clock.append(time.process_time())
                found.sum().backward()
                clock.append(time.process_time())
                times.append((clock[1] - clock[0], clock[2] - clock[1]))
            gap = found.detach().double() - exact
            forward, backward = (1000 * min(t) for t in zip(*times))
            far = f"{gap.mean():+.1e} | {gap.abs().max():.1e}"
            print(f"| {vocab:,} | {name} | {far} | {forward:.1f} ms | {backward:.1f} ms |")


if __name__ == "__main__":
    main()
