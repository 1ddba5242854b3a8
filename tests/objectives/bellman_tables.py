"""Tables instead of models: logits and values per state, so that an objective's optimum is known."""

import numpy as np
import torch

from trailmark.models.forward import exact_kl
from trailmark.models.layout import lay_out
from trailmark.models.readout import View
from trailmark.objectives.base import Term
from trailmark.types import Sample


def every_path(problem):
    """(actions, states, return) of every whole play."""
    done, open_ = [], [(0, [], [], 0.0)]
    while open_:
        s, path, states, total = open_.pop()
        for a in range(problem.next.shape[1]):
            now = ([*path, a], [*states, s], total + problem.reward[s, a])
            if problem.next[s, a] < 0:
                done.append(now)
            else:
                open_.append((int(problem.next[s, a]), *now))
    return done


class Tables:
    """A policy, a value and a reference over the states of a problem, and its plays as data: all equally often, or with
    the probabilities `mu`. `size`: tokens of a step."""

    def __init__(self, problem, ref, size=1, mu=None, v0=0.0):
        self.paths = every_path(problem)
        mu = np.full(len(self.paths), 1 / len(self.paths)) if mu is None else np.asarray(mu)
        self.paths, mu = [p for p, m in zip(self.paths, mu) if m], mu[mu > 0]
        samples = []
        for (acts, states, total), m in zip(self.paths, mu):
            n = len(acts)
            on, begins, first = np.r_[0, np.ones(n)], np.zeros(n + 1), np.zeros(n + 1)
            begins[1::size], first[1] = 1.0, 1.0
            streams = {
                "action": m * on / n, "weight": m * begins / begins.sum(), "first": m * first,
                "reward": total * on, "won": first * (total > 0), "state": np.r_[0, states], "chosen": np.r_[0, acts],
                "ref": np.r_[0.0, np.log(ref[states, acts])],
            }  # fmt: skip
            samples.append(Sample(np.r_[9, acts], streams))
        self.packed = lay_out(samples, "rows")
        self.data = {k: torch.as_tensor(x) for k, x in self.packed.streams.items()}
        self.row = torch.as_tensor(self.packed.row)
        self.ref = torch.tensor(np.log(ref))
        self.logits = torch.tensor(np.log(ref), requires_grad=True)
        self.v = torch.full((len(ref),), v0, dtype=torch.float64, requires_grad=True)

    @property
    def pi(self):
        return self.logits.softmax(-1).detach().numpy()

    @property
    def value(self):
        return self.v.detach().numpy()

    def view(self, objective, learned=None):
        at, logp = self.data["state"], self.logits.log_softmax(-1)
        read = {"logp": logp[at, self.data["chosen"]], "value": self.v[at]}
        pair = (self.logits, self.ref) if objective.kl == "reverse" else (self.ref, self.logits)
        read["exact_kl"] = exact_kl(*pair)[at]
        return View(self.packed, self.data, read, self.row, learned or {})

    def loss(self, objective, learned=None):
        """All masses are 1, so sums are means."""
        found = [t for t in objective.terms(self.view(objective, learned)) if isinstance(t, Term)]
        return sum(t.coef * t.sum for t in found if t.coef), {t.name: float(t.sum.detach()) for t in found}

    def fit(self, objective, steps=350, lr=0.1):
        """Adam with a cosine schedule on both tables."""
        adam = torch.optim.Adam([self.logits, self.v], lr=lr, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
        learned = objective.begin()
        for _ in range(steps):
            loss, report = self.loss(objective, learned)
            adam.zero_grad()
            loss.backward()
            adam.step()
            schedule.step()
            learned = objective.learn(learned, report)
        return learned, report
