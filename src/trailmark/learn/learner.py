"""One update that knows no method: split, forward, sum, divide by what was known before, backward, step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from trailmark.config import LearnerConfig, OptimConfig
from trailmark.errors import LearnError
from trailmark.learn.forward import Readout, view
from trailmark.learn.optim import Optimiser
from trailmark.learn.pack import Packed, Shape, micro_batches, saving
from trailmark.models.lm import LM
from trailmark.objectives.base import Objective
from trailmark.types import Sample


@dataclass(frozen=True, eq=False)
class Update:
    """What a method asks for: train `model` on `samples` towards `objective`, `passes` times, each pass in
    `minibatches` optimiser steps."""

    samples: Sequence[Sample]
    objective: Objective
    model: str = "policy"
    passes: int = 1
    minibatches: int = 1
    name: str = ""


class Learner:
    """Models by name, and an optimiser for each that is trained."""

    def __init__(
        self,
        models: dict[str, LM],
        config: LearnerConfig,
        trains: Mapping[str, OptimConfig] | None = None,
        total: int = 1,
    ):
        self.models, self.config = models, config
        wanted = {"policy": config.optim} if trains is None else trains
        self.optimisers = {name: Optimiser(models[name], optim, total, config.ema) for name, optim in wanted.items()}

    def pack(self, samples: Sequence[Sample]) -> list[Packed]:
        """The same samples are always packed the same way, so scoring and training see equal numbers."""
        lead = next(iter(self.models.values()))
        shape = choose_shape(self.config.layout, lead, samples)
        longest = max((len(s.tokens) for s in samples), default=0)
        if longest > lead.context:
            raise LearnError(f"a sample of {longest} tokens does not fit the model's context of {lead.context}")
        return micro_batches(samples, self.config.micro_tokens, shape, lead.pad_multiple)

    def fill(self, samples: Sequence[Sample], **readouts: Readout) -> list[Sample]:
        """Score: add one stream per readout, computed without gradient in the packing that training will use."""
        place = {id(s): i for i, s in enumerate(samples)}
        out: list[Sample | None] = [None] * len(samples)
        wanted = [dataclasses.replace(r, name=name) for name, r in readouts.items()]
        self._mode(False)
        for packed in self.pack(samples):
            with torch.no_grad():
                seen = view(self.models, packed, wanted, grad=False, amp=self.config.amp == "bf16")
            values = {r.name: seen.read[r.name].cpu().numpy() for r in wanted}
            for row, s in enumerate(packed.samples):
                mine = packed.row == row
                streams = {**s.streams, **{n: v[mine] for n, v in values.items()}}
                out[place[id(s)]] = dataclasses.replace(s, streams=streams)
        return [s for s in out if s is not None]

    def gradient(self, samples: Sequence[Sample], objective: Objective) -> dict[str, float]:
        """Add the gradient of the objective over the whole batch; return every term's mean."""
        mass: dict[str, float] = {}
        for s in samples:
            for name, m in s.mass.items():
                mass[name] = mass.get(name, 0.0) + m
        try:
            return self._accumulate(samples, objective, mass)
        except LearnError:
            for optimiser in self.optimisers.values():
                optimiser.adam.zero_grad(set_to_none=True)
            raise
        finally:
            self._mode(False)

    def _accumulate(
        self, samples: Sequence[Sample], objective: Objective, mass: Mapping[str, float]
    ) -> dict[str, float]:
        spent = {name: sum(float(s.streams[name].sum()) for s in samples if name in s.streams) for name in mass}
        named: list[tuple[str, float]] = []
        parts: list[torch.Tensor] = []  # read once, after the last backward pass: a GPU is not made to wait
        self._mode(True)
        for packed in self.pack(samples):
            seen = view(self.models, packed, objective.readouts(), grad=True, amp=self.config.amp == "bf16")
            losses = []
            for term in objective.terms(seen):
                whole = mass.get(term.weight, 0.0)
                if whole <= 0:
                    raise LearnError(
                        f"term '{term.name}' has nothing to train on: the mass of '{term.weight}' over the batch is {whole}"
                    )
                share = term.sum / (spent[term.weight] if term.mean else whole)
                named.append((term.name, term.coef))
                parts.append(share.detach().double())
                if term.coef:
                    losses.append(term.coef * share)
            loss = sum(losses)
            if isinstance(loss, torch.Tensor) and loss.requires_grad:
                loss.backward()
        totals: dict[str, float] = {"loss": 0.0}
        for (name, coef), value in zip(named, torch.stack(parts).tolist()):
            totals[name] = totals.get(name, 0.0) + value
            totals["loss"] += coef * value
            if not math.isfinite(value):
                raise LearnError(
                    f"term '{name}' of {objective.kind} is {value}: nothing was changed; look at the {len(samples)} samples of "
                    f"this batch (the first is of episode '{samples[0].episode}')"
                )
        return totals

    def update(self, update: Update) -> dict[str, float]:
        """Passes and minibatches of one update. Reported: the mean over its optimiser steps."""
        if not update.samples:
            return {}
        sums: dict[str, list[float]] = {}
        optimiser = self.optimisers[update.model]
        for _ in range(update.passes):
            for part in split(update.samples, update.minibatches):
                for name, value in {**self.gradient(part, update.objective), **optimiser.step()}.items():
                    sums.setdefault(name, []).append(value)
        prefix = f"{update.name}/" if update.name else ""
        return {prefix + name: sum(v) / len(v) for name, v in sums.items()}

    def _mode(self, training: bool) -> None:
        for name, lm in self.models.items():
            lm.train(training and name in self.optimisers)


def split(samples: Sequence[Sample], parts: int) -> list[list[Sample]]:
    """`parts` minibatches of nearly equal size; units stay whole, order is kept."""
    units: dict[str, list[Sample]] = {}
    for n, s in enumerate(samples):
        units.setdefault(s.unit or f"\0{n}", []).append(s)
    listed = list(units.values())
    parts = max(1, min(parts, len(listed)))
    return [
        [s for u in listed[k * len(listed) // parts : (k + 1) * len(listed) // parts] for s in u] for k in range(parts)
    ]


def choose_shape(wish: Shape, lm: LM, samples: Sequence[Sample]) -> Shape:
    """What was asked for, or the best that is exact: on a CPU a trie when it saves a fifth of the tokens, else padded
    rows (attention there costs the square of the packed length); on a GPU always packed."""
    order: dict[str, int] = {"rows": 0, "left": 0, "flat": 1, "tree": 2}
    if wish == "auto":
        if lm.device.type == "cuda":
            wish = "tree"
        else:
            wish = "tree" if saving(samples) > 0.2 else "rows"
    return wish if order[wish] <= order[lm.sharing] else lm.sharing  # type: ignore[return-value]
