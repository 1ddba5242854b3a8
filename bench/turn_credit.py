"""How far the expected gradient of several kinds of turn credit is from the gradient of the expected reward, where the
policy decides when to stop. Every play of a small process is enumerated, so the numbers are exact.

    python bench/turn_credit.py

A turn is `stop`, a short text (one token) or a long one (two tokens); there are at most three turns. "off" is the
length of the difference divided by the length of the true gradient; before that, the expected gradient is scaled so
that the difference is smallest, because a learning rate can make up for a scale.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from trailmark.credit.groups import leave_one_out, leave_one_out_turns
from trailmark.credit.returns import discounted, max_abs_normalise

STOP, SHORT, LONG = 1, 2, 3
VOCAB, TURNS, SEEN = 4, 3, 0  # SEEN is what the world shows before each turn
Turns = tuple[tuple[int, ...], ...]
Credit = Callable[[Sequence[np.ndarray]], list[np.ndarray]]


def plays() -> list[Turns]:
    """Every play: its turns."""
    texts = [(SHORT,), *((LONG, t) for t in (STOP, SHORT, LONG))]
    found: list[Turns] = []
    for n in range(TURNS):
        found += [(*before, (STOP,)) for before in itertools.product(texts, repeat=n)]
    return found + list(itertools.product(texts, repeat=TURNS))


def rewards(turns: Turns) -> np.ndarray:
    """What each turn earns: a short text first and a long one later are good, and talking costs."""
    r = [0.7 * (t == (SHORT,)) * (k == 0) + 0.4 * (t == (LONG, SHORT)) * (k > 0) - 0.15 for k, t in enumerate(turns)]
    r[-1] += 0.5 * (turns[-1] == (STOP,)) * (len(turns) == 3)
    return np.array(r)


def states(turns: Turns) -> list[tuple[tuple[int, ...], int]]:
    """The prefix in which each token was chosen, and the token."""
    seen, out = (), []
    for t in turns:
        seen = (*seen, SEEN)
        for token in t:
            out.append((seen, token))
            seen = (*seen, token)
    return out


class Policy:
    """A table of logits for each prefix. The last token of a play needs no end token: the process ends turns."""

    def __init__(self) -> None:
        prefixes = sorted({s for play in plays() for s, _ in states(play)})
        self.row = {s: i for i, s in enumerate(prefixes)}
        at = torch.arange(len(prefixes) * VOCAB, dtype=torch.float64).reshape(-1, VOCAB)
        self.logits = torch.sin(7 * at + 1)
        self.logits[:, SEEN] = -torch.inf
        self.logits.requires_grad_()

    def logp(self, turns: Turns) -> list[torch.Tensor]:
        """The log-probs of the tokens of each turn."""
        table, tokens = self.logits.log_softmax(-1), iter(states(turns))
        return [torch.stack([table[self.row[s], a] for s, a in itertools.islice(tokens, len(t))]) for t in turns]


def off(found: torch.Tensor, true: torch.Tensor) -> float:
    """How far a gradient is off, at its best scale."""
    cosine = float((found * true).sum() / (found.norm() * true.norm()))
    return math.sqrt(max(0.0, 1 - cosine**2)) if cosine > 0 else 1.0


def alive(returns: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The k-th turn against the k-th turns of those that have one."""
    longest = max(map(len, returns))
    mean = [np.mean([g[k] for g in returns if len(g) > k]) for k in range(longest)]
    return [g - mean[: len(g)] for g in returns]


def whole(returns: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Whole returns, leave one out."""
    return [np.full(len(g), a) for g, a in zip(returns, leave_one_out([g[0] for g in returns], [0] * len(returns)))]


KINDS: dict[str, tuple[Credit, str]] = {
    "epo: max-abs, mean over tokens and turns": (lambda gs: [max_abs_normalise(g) for g in gs], "turn"),
    "returns, mean over tokens and turns": (list, "turn"),
    "against those that reach the turn, constant": (alive, "constant"),
    "whole returns, leave one out, constant": (whole, "constant"),
    "turn_leave_one_out, constant": (lambda gs: leave_one_out_turns(gs, [0] * len(gs)), "constant"),
}


def true_gradient(policy: Policy) -> torch.Tensor:
    value = sum(torch.cat(policy.logp(p)).sum().exp() * rewards(p).sum() for p in plays())
    (g,) = torch.autograd.grad(value, policy.logits)
    return g


def expected_gradient(policy: Policy, credit: Credit, mean: str) -> torch.Tensor:
    """The expected gradient of a batch of two plays of one start."""
    every = plays()
    returns = [discounted(rewards(p), 1.0) for p in every]
    chance = np.array([torch.cat(policy.logp(p)).sum().exp().item() for p in every])
    weight = [np.zeros(len(p)) for p in every]
    for i, j in itertools.product(range(len(every)), repeat=2):
        for k, a in zip((i, j), credit([returns[i], returns[j]])):
            weight[k] += 0.5 * chance[i] * chance[j] * a
    gain = torch.zeros((), dtype=torch.float64)
    for p, w in zip(every, weight):
        for logp, each in zip(policy.logp(p), w):
            gain = gain + each * (logp.mean() / len(p) if mean == "turn" else logp.sum())
    (g,) = torch.autograd.grad(gain, policy.logits)
    return g


def main() -> None:
    policy = Policy()
    true = true_gradient(policy)
    print("| credit | off |\n|---|---:|")
    for name, (credit, mean) in KINDS.items():
        print(f"| {name} | {100 * off(expected_gradient(policy, credit, mean), true):.2f} % |")


if __name__ == "__main__":
    main()
