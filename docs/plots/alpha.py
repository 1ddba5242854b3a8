"""Draw docs/plots/alpha.png: what the weight alpha of OREO's KL does to the temperature, and to an action nobody
played.

One decision with three actions; a policy, a value and a reference are tables, and both are trained by the objective
that the method uses (`methods/oreo/soft_bellman.py`). Prints the numbers that the picture shows.

    python docs/plots/alpha.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch

from trailmark.methods.oreo.soft_bellman import SoftBellman
from trailmark.models.forward import exact_kl
from trailmark.models.layout import lay_out
from trailmark.models.readout import View
from trailmark.objectives.base import Term
from trailmark.types import Sample

REF = np.array([0.2, 0.3, 0.5])


def train(ref, reward, mu, beta, alpha, v0=0.0, steps=400, lr=0.05):
    """The policy and the value at the end; `mu` is how often each action is in the data."""
    rows = []
    for a, share in enumerate(mu):
        if share:
            on = np.array([0.0, share])
            told = {
                "weight": on,
                "action": on,
                "reward": np.array([0.0, reward[a]]),
                "ref": np.array([0.0, np.log(ref[a])]),
            }
            rows.append(Sample(np.array([9, a]), told))
    packed = lay_out(rows, "rows")
    data = {k: torch.as_tensor(x) for k, x in packed.streams.items()}
    chosen = torch.as_tensor(np.concatenate([s.tokens for s in rows]) % 9)
    base = torch.tensor(np.log(ref))
    logits, v = base.clone().requires_grad_(), torch.tensor(v0, dtype=torch.float64, requires_grad=True)
    objective = SoftBellman(part="both", beta=beta, alpha=alpha, actions="action")
    adam = torch.optim.Adam([logits, v], lr=lr, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    for _ in range(steps):
        here = torch.zeros(len(chosen), dtype=torch.long)
        read = {
            "logp": logits.log_softmax(-1)[chosen],
            "value": v + 0 * here,
            "exact_kl": exact_kl(logits, base) + 0 * here,
        }
        view = View(packed, data, read, torch.as_tensor(packed.row), {})
        loss = sum(t.coef * t.sum for t in objective.terms(view) if isinstance(t, Term) and t.coef)
        adam.zero_grad()
        loss.backward()
        adam.step()
        schedule.step()
    return logits.softmax(-1).detach().numpy(), v.item()


def temperature(beta, alpha):
    """With tiny rewards: log pi / ref = r / temperature + constant."""
    reward = 1e-3 * np.array([1.0, 0.0, 0.5])
    pi, _ = train(REF, reward, REF, beta, alpha, steps=300, lr=0.005)
    return np.polyfit(np.log(pi) - np.log(REF), reward, 1)[0]


def main() -> None:
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), constrained_layout=True)
    alphas = np.array([1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3])
    smooth = np.geomspace(1e-4, 0.3, 100)
    for beta, colour in ((0.03, "C0"), (0.1, "C1"), (0.3, "C2")):
        measured = [temperature(beta, a) for a in alphas]
        left.plot(smooth, beta + smooth / (2 * beta), color=colour, lw=1)
        left.plot(alphas, measured, "o", color=colour, label=f"beta {beta}")
        print(f"beta {beta}: measured", " ".join(f"{a:g}:{t:.3f}" for a, t in zip(alphas, measured)))
    left.set(
        xscale="log", yscale="log", xlabel="alpha", ylabel="temperature", title="measured, and beta + alpha / (2 beta)"
    )
    left.legend()

    reward, beta = np.array([1.0, 0.0, 0.5]), 0.03
    found = [train(REF, reward, REF, beta, a, steps=2500) for a in alphas]
    for a in range(3):
        middle.plot(alphas, [pi[a] for pi, _ in found], "o-", label=f"reward {reward[a]:g}, ref {REF[a]:g}")
    middle.plot(alphas, [v for _, v in found], "k--", label="V")
    middle.set(xscale="log", xlabel="alpha", ylabel="probability; V", title="rewards 1, 0, 0.5 at beta 0.03")
    middle.legend()
    for a, (pi, v) in zip(alphas, found):
        print(f"beta 0.03, alpha {a:g}: pi", " ".join(f"{x:.3f}" for x in pi), f"V {v:.3f}")

    ref = np.full(3, 1 / 3)
    few = np.array([1e-6, 1e-5, 1e-4, 1e-3, 1e-2])
    for v0 in (0.0, 1.5):
        ends = [train(ref, [0.0, 1.0, 0.0], [0.5, 0.5, 0.0], 0.3, a, v0) for a in (0.0, *few)]
        right.plot(few, [v for _, v in ends[1:]], "o-", label=f"V starts at {v0:g}")
        print(f"unseen action, V starts at {v0:g}:", " ".join(f"{a:g}:{v:.3f}" for a, (_, v) in zip((0.0, *few), ends)))
        right.axhline(ends[0][1], ls=":", color=right.lines[-1].get_color(), lw=1)
    right.set(xscale="log", xlabel="alpha", ylabel="V at the end", title="one action never played (dotted: alpha 0)")
    right.legend()
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
