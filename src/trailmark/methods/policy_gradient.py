"""Policy gradients on any task, with a choice of credit and objective: REINFORCE, RLOO, GRPO and relatives. This is the
plain method that the methods of the papers are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trailmark.credit import group_relative, leave_one_out, turn_returns
from trailmark.errors import TaskError
from trailmark.learn.learner import Learner, Update
from trailmark.learn.watch import sampler_gap, spread, summary
from trailmark.memory import need_rows
from trailmark.methods.base import Held, Method, reference_held
from trailmark.methods.configs import PolicyGradientRecipe
from trailmark.models.lm import LM
from trailmark.models.load import load_model, load_reference
from trailmark.models.readout import Readout
from trailmark.objectives import Objective, get_objective
from trailmark.rollout.overlap import NextBatch
from trailmark.rollout.play import play
from trailmark.runs.annotations import read_beside, write_beside
from trailmark.runs.store import Run, read_segment, write_segment
from trailmark.samples import annotate_turns, build_samples, scored
from trailmark.seats.config import LocalSeat, trained_seats
from trailmark.seats.table import Table
from trailmark.tasks import get_task, keep_judge
from trailmark.tasks.base import draw_tasks
from trailmark.types import Annotation, Episode, Sample, Scored, Task


class PolicyGradientMethod(Method):
    Config = PolicyGradientRecipe

    def __init__(self, config: PolicyGradientRecipe, run: Run):
        super().__init__(config, run)
        policy = self.open_world()
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

    def open_world(self) -> LM:
        """Open the task and the seats; the model that is trained."""
        config = self.config
        need_rows(config.starts * config.n, "starts * n")
        self.source = get_task(config.task.name, **config.task.options)
        self.check_asked(config, self.source)
        keep_judge(self.source, self.run.path)
        policy = load_model(config.model)
        seats = self.seats_of(config)
        (self.seat,) = trained_seats(seats)
        self.overlap = getattr(config, "overlap", False)  # recipes of derived methods may not have the key
        self.table = Table(seats, {self.seat: policy}, config.seed, apart=self.overlap)
        self.table.bind(self.source)
        self._metrics: dict[str, float] = {}
        self.next = NextBatch(policy.device)
        return policy

    def play(
        self, tasks: Sequence[Task], n: int, seed: int, prefix: str, version: int, notes: list[Annotation] | None = None
    ) -> list[Episode]:
        """Play episodes with the current policy. A judge's annotations go into `notes`."""
        self.next.wait()  # one engine plays one batch at a time
        self.table.publish(version)
        return self._played(tasks, n, seed, prefix, notes)

    def _played(
        self, tasks: Sequence[Task], n: int, seed: int, prefix: str, notes: list[Annotation] | None
    ) -> list[Episode]:
        protocol = self.protocol(self.config, self.source)
        return play(self.source, tasks, self.table.seats, protocol, n=n, seed=seed, prefix=prefix, notes=notes)

    def batch(self, step: int) -> tuple[list[Episode], list[Annotation]]:
        """The episodes of a step and a judge's notes. With `overlap` they were played during the step before, and the
        batch of the next step begins now, with the weights as they are."""
        c = self.config

        def played(number: int) -> tuple[list[Episode], list[Annotation]]:
            tasks = draw_tasks(self.source, "train", c.starts, c.seed * 1_000_003 + number)
            notes: list[Annotation] = []
            return self._played(tasks, c.n, c.seed, f"{number}:", notes), notes

        made = self.next.take(step)
        if made is None:
            self.table.publish(step - 1)
            made = played(step)
        if self.overlap and step < c.steps:
            self.table.publish(step - 1)
            self.next.start(step + 1, lambda: played(step + 1))
        return made

    def collect(self, step: int) -> list[Episode]:
        """Play the episodes of a step and store them. Returns those that can be learnt from, if any."""
        played, notes = self.batch(step)
        episodes = [self.marked(e) for e in played]
        self.run.annotate(step, notes)
        write_segment(self.run.episodes_dir, step, episodes)
        good, dropped = scored(episodes)
        self._metrics = {**summary(good), **spread(good), **dropped}
        if not good and not dropped["invalid"]:  # invalid ones are counted, and the step has nothing to learn from
            why = next((e.outcome for e in episodes if not isinstance(e.outcome, Scored)), None)
            raise TaskError(
                f"step {step}: every one of the {len(episodes)} episodes failed, so there is nothing to learn from; "
                f"the first: {why}"
            )
        return good

    def marked(self, e: Episode) -> Episode:
        """An episode as it is stored."""
        return e

    def updates(self, step: int) -> Iterator[Update]:
        c = self.config
        if not (good := self.collect(step)):
            return
        longest = self.table.seats[0].max_tokens
        credited = {"advantage": advantages(good, c.credit, c.gamma, self.seat)}
        samples = build_samples(good, self.seat, credited, c.mean, longest)
        self.run.annotate(step, annotate_turns(samples, good, self.seat, "advantage", credit_name(c.credit, c.gamma)))
        fills = {"old": Readout("")} if c.old == "learner" else {}
        if self.ref and getattr(self.objective, "kl", "") != "exact":
            fills["ref"] = Readout("", model=self.ref)
        if fills:
            drawn, samples = samples, self.learner.fill(samples, **fills)
            if c.old == "learner" and c.overlap:
                samples, found = truncated(drawn, samples, c.truncate)
                self._metrics |= found
            elif c.old == "learner":
                self._metrics |= sampler_gap(drawn, samples)
        yield Update(samples, self.objective, passes=c.passes, minibatches=c.minibatches)

    @classmethod
    def holds(cls, config: Any) -> list[Held]:
        """Every model at the table, and the reference if the objective reads one."""
        refers = getattr(get_objective(config.objective), "beta", 0)
        return [*cls.players(config), *(reference_held(config.model) if refers else [])]

    @classmethod
    def players(cls, config: Any) -> list[Held]:
        """Every model at the table. With `overlap` the engine plays with a copy of the weights."""
        found: list[Held] = []
        for name, seat in cls.seats_of(config).items():
            if isinstance(seat, LocalSeat) and seat.trained:
                copied = getattr(config, "overlap", False)
                found.append(Held(name, config.model, config.learner.optim, None if copied else seat.engine))
                if copied:
                    dtype = seat.engine.dtype or config.model.dtype if seat.engine else config.model.dtype
                    copy = config.model.model_copy(update={"lora": None, "dtype": dtype})
                    found.append(Held(f"{name} in play", copy, None, seat.engine))
            elif isinstance(seat, LocalSeat) and seat.model is not None:
                found.append(Held(name, seat.model, None, seat.engine))
        return found

    def metrics(self) -> Mapping[str, float]:
        return self._metrics

    def state(self) -> Mapping[str, Any]:
        """The batch that is played ahead comes from weights that no later checkpoint holds. The run keeps it."""
        if (waiting := self.next.wait()) is None:
            return {}
        step, (episodes, notes) = waiting
        path = write_segment(self.run.path / "ahead", step, episodes)
        write_beside(path, notes)
        return {"ahead": step}

    def load(self, state: Mapping[str, Any]) -> None:
        if (step := state.get("ahead")) is not None:
            path = self.run.path / "ahead" / f"{step:06d}.jsonl"
            self.next.ready(step, (read_segment(path), read_beside(path)))

    def evaluate(self, step: int) -> Mapping[str, float]:
        tasks = draw_tasks(self.source, self.config.eval.split, self.config.eval.n, self.config.seed)
        episodes = self.keep_plays(step, lambda: self.play(tasks, 1, self.config.seed + 1, "eval:", step))
        good, dropped = scored(episodes)
        return {**summary(good), **dropped}


def truncated(
    drawn: Sequence[Sample], scored: Sequence[Sample], most: float
) -> tuple[list[Sample], dict[str, float]]:
    """Advantages weighted by min(most, p / q) per token: p under the learner now, q when the token was drawn, with the
    weights of one step earlier. The weight corrects for the difference, and its limit bounds the variance."""
    out, seen = [], []
    for a, b in zip(drawn, scored, strict=True):
        trained = (a.streams["weight"] != 0) & np.isfinite(a.streams["old"])
        ratio = np.where(trained, np.exp(np.where(trained, b.streams["old"] - a.streams["old"], 0.0)), 1.0)
        out.append(replace(b, streams={**b.streams, "advantage": b.streams["advantage"] * np.minimum(ratio, most)}))
        seen.append(ratio[trained])
    each = np.concatenate(seen) if seen else np.zeros(0)
    if not len(each):
        return out, {}
    return out, {"stale_ratio": float(each.mean()), "stale_ratio_max": float(each.max()),
                 "stale_cut": float((each > most).mean())}  # fmt: skip


def credit_name(credit: str, gamma: float) -> str:
    """How the advantage was computed, as annotations record it."""
    discount = "" if gamma == 1 else f", discounted by {gamma:g}"
    return {"group": "against its group", "leave_one_out": "against the others of its group"}.get(
        credit, f"return to go{discount}"
    )


def advantages(episodes: Sequence[Episode], credit: str, gamma: float, seat: str = "policy") -> dict[str, list[float]]:
    """One advantage per turn of the trained seat: the discounted return to go, or the episode's reward relative to its
    group."""
    if credit == "returns":
        return {e.id: list(turn_returns(e, seat, gamma)) for e in episodes}
    rewards = [e.outcome.reward if isinstance(e.outcome, Scored) else np.nan for e in episodes]
    groups = [e.group for e in episodes]
    each = group_relative(rewards, groups) if credit == "group" else leave_one_out(rewards, groups)
    return {e.id: [float(a)] * sum(t.seat == seat and bool(t.tokens) for t in e.turns) for e, a in zip(episodes, each)}
