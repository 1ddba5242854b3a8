"""Policy gradients on any task, with the credit and the objective of your choice: REINFORCE, RLOO, GRPO and
relatives. The plain method that the five papers' methods are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from trailmark.credit import group_relative, leave_one_out, turn_returns
from trailmark.errors import TaskError
from trailmark.learn.learner import Learner, Update
from trailmark.learn.watch import sampler_gap, spread, summary
from trailmark.memory import need_rows
from trailmark.methods.base import Held, Method, reference_held
from trailmark.methods.configs import PolicyGradientRecipe
from trailmark.models.load import load_model, load_reference
from trailmark.models.readout import Readout
from trailmark.objectives import Objective, get_objective
from trailmark.rollout.play import play
from trailmark.runs.store import Run, write_segment
from trailmark.samples import annotate_turns, build_samples, scored
from trailmark.seats.config import LocalSeat, trained_seats
from trailmark.seats.table import Table
from trailmark.tasks import get_task, keep_judge
from trailmark.tasks.base import draw_tasks
from trailmark.types import Annotation, Episode, Scored, Task


class PolicyGradientMethod(Method):
    Config = PolicyGradientRecipe

    def __init__(self, config: PolicyGradientRecipe, run: Run):
        super().__init__(config, run)
        need_rows(config.starts * config.n, "starts * n")
        self.source = get_task(config.task.name, **config.task.options)
        keep_judge(self.source, run.path)
        policy = load_model(config.model)
        seats = self.seats_of(config)
        (self.seat,) = trained_seats(seats)
        self.table = Table(seats, {self.seat: policy}, config.seed)
        self.table.bind(self.source)
        self.objective: Objective = get_objective(config.objective)
        models = {"policy": policy}
        self.ref = ""
        if getattr(self.objective, "beta", 0):
            ref = load_reference(config.model)
            self.ref = "policy/base" if ref is None else "ref"
            models |= {} if ref is None else {"ref": ref}
            self.objective = self.objective.model_copy(update={"ref": self.ref})
        updates = config.steps * config.passes * config.minibatches
        self.learner = Learner(models, config.learner, total=updates)
        self._metrics: dict[str, float] = {}

    def play(
        self, tasks: Sequence[Task], n: int, seed: int, prefix: str, version: int, notes: list[Annotation] | None = None
    ) -> list[Episode]:
        """Episodes with the policy as it is now; `notes` gets what a judge says about them."""
        self.table.publish(version)
        protocol = self.protocol(self.config, self.source)
        return play(self.source, tasks, self.table.seats, protocol, n=n, seed=seed, prefix=prefix, notes=notes)

    def updates(self, step: int) -> Iterator[Update]:
        c = self.config
        tasks = draw_tasks(self.source, "train", c.starts, c.seed * 1_000_003 + step)
        notes: list[Annotation] = []
        episodes = self.play(tasks, c.n, c.seed, f"{step}:", step - 1, notes)
        self.run.annotate(step, notes)
        write_segment(self.run.episodes_dir, step, episodes)
        good, dropped = scored(episodes)
        self._metrics = {**summary(good), **spread(good), **dropped}
        if not good and dropped["invalid"]:
            return  # nothing to learn from in this step; the counts say so
        if not good:
            why = next((e.outcome for e in episodes if not isinstance(e.outcome, Scored)), None)
            raise TaskError(
                f"step {step}: every one of the {len(episodes)} episodes failed, so there is nothing to learn from; "
                f"the first: {why}"
            )
        longest = self.table.seats[0].max_tokens
        credited = {"advantage": advantages(good, c.credit, c.gamma, self.seat)}
        samples = build_samples(good, self.seat, credited, c.mean, longest)
        self.run.annotate(step, annotate_turns(samples, good, self.seat, "advantage", credit_name(c.credit, c.gamma)))
        fills = {"old": Readout("")} if c.old == "learner" else {}
        if self.ref and getattr(self.objective, "kl", "") != "exact":
            fills["ref"] = Readout("", model=self.ref)
        if fills:
            drawn, samples = samples, self.learner.fill(samples, **fills)
            self._metrics |= sampler_gap(drawn, samples) if c.old == "learner" else {}
        yield Update(samples, self.objective, passes=c.passes, minibatches=c.minibatches)

    @classmethod
    def holds(cls, config: Any) -> list[Held]:
        """Every model at the table, and the reference if the objective reads one."""
        found: list[Held] = []
        for name, seat in cls.seats_of(config).items():
            if isinstance(seat, LocalSeat) and seat.trained:
                found.append(Held(name, config.model, config.learner.optim, seat.engine))
            elif isinstance(seat, LocalSeat) and seat.model is not None:
                found.append(Held(name, seat.model, None, seat.engine))
        refers = getattr(get_objective(config.objective), "beta", 0)
        return [*found, *(reference_held(config.model) if refers else [])]

    def metrics(self) -> Mapping[str, float]:
        return self._metrics

    def evaluate(self, step: int) -> Mapping[str, float]:
        tasks = draw_tasks(self.source, self.config.eval.split, self.config.eval.n, self.config.seed)
        episodes = self.play(tasks, 1, self.config.seed + 1, "eval:", step)
        write_segment(self.run.path / "evaluation", step, episodes)
        good, dropped = scored(episodes)
        return {**summary(good), **dropped}


def credit_name(credit: str, gamma: float) -> str:
    """What annotations of the advantage say about where it came from."""
    discount = "" if gamma == 1 else f", discounted by {gamma:g}"
    return {"group": "against its group", "leave_one_out": "against the others of its group"}.get(
        credit, f"return to go{discount}"
    )


def advantages(episodes: Sequence[Episode], credit: str, gamma: float, seat: str = "policy") -> dict[str, list[float]]:
    """One number per turn of the trained seat: discounted return to go, or the episode's reward against its group."""
    if credit == "returns":
        return {e.id: list(turn_returns(e, seat, gamma)) for e in episodes}
    rewards = [e.outcome.reward if isinstance(e.outcome, Scored) else np.nan for e in episodes]
    groups = [e.group for e in episodes]
    each = group_relative(rewards, groups) if credit == "group" else leave_one_out(rewards, groups)
    return {e.id: [float(a)] * sum(t.seat == seat and bool(t.tokens) for t in e.turns) for e, a in zip(episodes, each)}
