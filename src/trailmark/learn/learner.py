"""One update, for any method: split the batch, run the models, sum the losses, divide by counts known in advance,
backpropagate, step."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from trailmark.config import LearnerConfig, OptimConfig
from trailmark.errors import LearnError
from trailmark.learn.budget import LEAST, places
from trailmark.learn.optim import Optimiser
from trailmark.models.forward import fill, pack, put_back, view
from trailmark.models.hardware import check_bf16
from trailmark.models.layout import Packed
from trailmark.models.lm import LM
from trailmark.models.readout import Readout
from trailmark.objectives.base import Note, Objective
from trailmark.types import Sample

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Update:
    """What a method asks for: train `model` on `samples` with `objective`, `passes` times, with `minibatches` optimiser
    steps in each pass. Each pass shuffles the samples before it cuts them."""

    samples: Sequence[Sample]
    objective: Objective
    model: str | tuple[str, ...] = "policy"
    passes: int = 1
    minibatches: int = 1
    name: str = ""
    seed: tuple[int, ...] = ()  # of the order in which each pass is cut into minibatches; empty: as they are
    reads_old: bool = False  # one step only: "old" is the log-prob that this step reads; `Learner.scored` has it then


class Learner:
    """Models by name, and an optimiser for each trained model."""

    def __init__(
        self,
        models: dict[str, LM],
        config: LearnerConfig,
        trains: Mapping[str, OptimConfig] | None = None,
        total: int | Mapping[str, int] = 1,
    ):
        """`total` is the number of optimiser steps of the schedule; a mapping gives it for each model."""
        self.models, self.config = models, config
        if config.amp == "bf16":
            check_bf16(next(iter(models.values())).device, "learner.amp", "none")
        self.scored: list[Sample] = []  # the samples of the last update that `reads_old`
        self.keeps: tuple[str, ...] = ()  # models that are not trained but stored in checkpoints
        self.learned: dict[
            str, dict[str, float]
        ] = {}  # numbers that objectives learn, by the name of the update
        wanted = {"policy": config.optim} if trains is None else trains
        ends = total if isinstance(total, Mapping) else dict.fromkeys(wanted, total)
        away = "optimiser" in config.offload
        self.optimisers = {n: Optimiser(models[n], o, ends[n], config.ema, away) for n, o in wanted.items()}
        # tokens of a micro-batch where the recipe leaves that to us; kept in checkpoints
        self.places: int | None = None
        trained = {id(models[name]) for name in wanted}
        self._frozen = [m for m in models.values() if id(m) not in trained] if "frozen" in config.offload else []
        self._device = next(iter(models.values())).device
        for lm in self._frozen:
            lm.model.to("cpu")

    def pack(self, samples: Sequence[Sample]) -> list[Packed]:
        """The same samples are always packed the same way, so scoring and training see equal numbers."""
        if self.places is None and self.config.micro_tokens is None:
            self.places = places(self.models, self.optimisers, self.config.amp == "bf16")
        budget = self.config.micro_tokens or self.places or LEAST
        return pack(self.models, samples, self.config.layout, budget)

    def _fit(self, work: Callable[[], T]) -> T:
        """Call `work`. If a micro-batch does not fit the GPU, repeat with half as many tokens."""
        while True:
            try:
                return work()
            except torch.OutOfMemoryError as problem:
                self._clear()
                tried = self.config.micro_tokens or self.places or LEAST
                if self.config.micro_tokens is not None or tried <= LEAST:
                    raise LearnError(
                        f"a micro-batch of {tried:,} tokens does not fit the memory of {self._device}: lower "
                        "learner.micro_tokens, or set model.gradient_checkpointing, model.lora or learner.offload"
                    ) from problem
                self.places = tried // 2
            torch.cuda.empty_cache()
            print(f"micro-batches of {tried:,} tokens do not fit {self._device}: {self.places:,} from now on",
                  file=sys.stderr)  # fmt: skip

    def _clear(self) -> None:
        for optimiser in self.optimisers.values():
            optimiser.adam.zero_grad(set_to_none=True)

    @contextlib.contextmanager
    def _here(self) -> Iterator[None]:
        """Move offloaded frozen models to the device for the duration of the block."""
        try:
            for lm in self._frozen:
                lm.model.to(self._device)
            yield
        finally:
            for lm in self._frozen:
                lm.model.to("cpu")

    def fill(self, samples: Sequence[Sample], **readouts: Readout) -> list[Sample]:
        """Score: add one stream per readout. It is computed without gradient, in the packing that training will use."""
        wanted = [dataclasses.replace(r, name=name) for name, r in readouts.items()]
        self._mode(False)
        amp = self.config.amp == "bf16"
        with self._here():
            return self._fit(lambda: fill(self.models, samples, self.pack(samples), wanted, amp))

    def gradient(
        self,
        samples: Sequence[Sample],
        objective: Objective,
        train: Sequence[str] | None = None,
        learned: Mapping[str, float] | None = None,
        reads_old: bool = False,
    ) -> dict[str, float]:
        """Compute the gradient of the objective over the whole batch, for the models named in `train` (default: all
        models that are read). Returns the mean of every term. `learned` are the objective's own numbers (default: its
        initial ones). `reads_old`: "old" is the log-prob that is read here, so it need not be scored before."""
        train = list(self.models) if train is None else train
        learned = objective.begin() if learned is None else learned
        samples = objective.prepare(samples, self.fill)
        self._clear()
        mass: dict[str, float] = {}
        for s in samples:
            for name, m in s.mass.items():
                mass[name] = mass.get(name, 0.0) + m
        try:
            with self._here():
                return self._fit(lambda: self._accumulate(samples, objective, mass, train, learned, reads_old))
        except LearnError:
            self._clear()
            raise
        finally:
            self._mode(False)

    def _accumulate(
        self,
        samples: Sequence[Sample],
        objective: Objective,
        mass: Mapping[str, float],
        train: Sequence[str],
        learned: Mapping[str, float],
        reads_old: bool,
    ) -> dict[str, float]:
        spent = {name: sum(float(s.streams[name].sum()) for s in samples if name in s.streams) for name in mass}
        named: list[tuple[str, float]] = []
        notes: dict[str, list[torch.Tensor]] = {}
        parts: list[torch.Tensor] = []  # read once, after the last backward pass, so that a GPU does not wait
        old: list[torch.Tensor] = []
        self._mode(True)
        packs = self.pack(samples)
        for packed in packs:
            seen = view(self.models, packed, objective.readouts(), train, self.config.amp == "bf16", learned)
            if reads_old:
                seen.streams["old"] = seen.read["logp"].detach()
                old.append(seen.streams["old"])
            losses = []
            for term in objective.terms(seen):
                if isinstance(term, Note):
                    notes.setdefault(term.name, []).append(term.values.detach())
                    continue
                whole = mass.get(term.weight, 0.0)
                if whole <= 0 and term.optional:
                    continue
                if whole <= 0:
                    raise LearnError(
                        f"term '{term.name}' has nothing to train on: the mass of '{term.weight}' over the batch is "
                        f"{whole}"
                    )
                share = term.sum / (spent[term.weight] if term.mean else whole)
                named.append((term.name, term.coef))
                parts.append(share.detach().double())
                if term.coef:
                    losses.append(term.coef * share)
            loss = sum(losses)
            if isinstance(loss, torch.Tensor) and loss.requires_grad:
                loss.backward()
        if reads_old:
            self.scored = put_back(samples, packs, [{"old": o.cpu().numpy()} for o in old])
        totals: dict[str, float] = {"loss": 0.0}
        for (name, coef), value in zip(named, torch.stack(parts).tolist()):
            totals[name] = totals.get(name, 0.0) + value
            totals["loss"] += coef * value
            if not math.isfinite(value) and coef:
                holes = sorted(
                    {n for s in samples for n, x in s.streams.items() if x.dtype.kind == "f" and np.isnan(x).any()}
                )
                hint = f" (not numbers: {', '.join(holes)}; score them first)" if holes else ""
                raise LearnError(
                    f"term '{name}' of {objective.kind} is {value}{hint}: nothing was changed; look at the "
                    f"{len(samples)} samples of this batch (the first is of episode '{samples[0].episode}')"
                )
        return {n: v for n, v in (totals | _spread(notes)).items() if math.isfinite(v)}

    def update(self, update: Update) -> dict[str, float]:
        """All passes and minibatches of one update. Returns means over its optimiser steps."""
        if not update.samples:
            return {}
        sums: dict[str, list[float]] = {}
        names = (update.model,) if isinstance(update.model, str) else update.model
        if unknown := [n for n in names if n not in self.optimisers]:
            raise LearnError(f"model '{unknown[0]}' has no optimiser: trained are {', '.join(self.optimisers)}")
        read = {
            id(self.models[r.model]) for r in update.objective.readouts() if not r.detach and r.model in self.models
        }
        if unread := [n for n in names if id(self.models[n]) not in read]:
            raise LearnError(f"{update.objective.kind} reads nothing of model '{unread[0]}' that could train it")
        key = update.name or update.objective.kind
        learned = update.objective.begin() | self.learned.get(key, {})
        for k in range(update.passes):
            for part in split(update.samples, update.minibatches, (*update.seed, k) if update.seed else ()):
                report = self.gradient(part, update.objective, names, learned, update.reads_old)
                for n in names:
                    step, whose = self.optimisers[n].step(), "" if isinstance(update.model, str) else f"{n}/"
                    report |= {whose + name: value for name, value in step.items()}
                learned = update.objective.learn(learned, report)
                if learned:
                    self.learned[key] = learned
                for name, value in report.items():
                    sums.setdefault(name, []).append(value)
        prefix = f"{update.name}/" if update.name else ""
        means = {name: sum(v) / len(v) for name, v in sums.items()}
        own = {name: value for name, value in learned.items() if not name.startswith("_")}
        return {prefix + name: value for name, value in (means | own).items()}

    def _mode(self, training: bool) -> None:
        trained = {id(self.models[name]) for name in self.optimisers}  # a model may have two names
        for lm in self.models.values():
            lm.train(training and id(lm) in trained)


def _spread(notes: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, float]:
    """The smallest, median and largest value; empty if there are none."""
    out: dict[str, float] = {}
    for name, parts in notes.items():
        values = torch.cat(list(parts)).double().cpu()
        if len(values):
            out |= {f"{name}_{k}": float(f(values)) for k, f in _SPREAD.items()}
    return out


_SPREAD = {"min": torch.min, "median": torch.median, "max": torch.max}


def split(samples: Sequence[Sample], parts: int, seed: Sequence[int] = ()) -> list[list[Sample]]:
    """Split into `parts` minibatches of nearly equal size. Units stay whole. With a seed they are shuffled first; one
    minibatch needs no order."""
    units: dict[str, list[Sample]] = {}
    for n, s in enumerate(samples):
        units.setdefault(s.unit or f"\0{n}", []).append(s)
    listed = list(units.values())
    parts = max(1, min(parts, len(listed)))
    if seed and parts > 1:
        listed = [listed[k] for k in np.random.default_rng(list(seed)).permutation(len(listed))]
    return [
        [s for u in listed[k * len(listed) // parts : (k + 1) * len(listed) // parts] for s in u] for k in range(parts)
    ]
