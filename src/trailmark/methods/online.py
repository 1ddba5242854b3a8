"""Online reinforcement learning on any task, with the credit and the objective of your choice: REINFORCE, RLOO, GRPO and
relatives. The plain method that the five papers' methods are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from trailmark.credit import discounted, group_relative, leave_one_out
from trailmark.engines.local import local_engine
from trailmark.errors import TaskError
from trailmark.learn.learner import Learner, Update
from trailmark.learn.loop import Plain, train
from trailmark.learn.watch import sampler_gap, spread
from trailmark.memory import need_rows
from trailmark.methods.configs import OnlineRecipe as Config
from trailmark.models.load import load_model, load_reference
from trailmark.models.readout import Readout
from trailmark.objectives import Objective, get_objective
from trailmark.rollout.play import Seat, play
from trailmark.runs.store import Run, write_segment
from trailmark.samples import build_samples, scored
from trailmark.tasks import get_task
from trailmark.tasks.base import draw_tasks
from trailmark.types import Episode, SamplingLaw, Scored


def bound_task(source: Any, tokenizer: Any) -> None:
    """A world that names actions by labels of one token, or counts tokens, asks for the policy's tokenizer by `bind`."""
    if hasattr(source, "bind"):
        source.bind(tokenizer)


class OnlineMethod(Plain):
    def __init__(self, config: Config, run: Run):
        self.config, self.run = config, run
        need_rows(config.starts * config.n, "starts * n")
        self.source = get_task(config.task.name, **config.task.options)
        policy = load_model(config.model)
        bound_task(self.source, policy.tokenizer)
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
        self.engine = local_engine(policy, config.engine)
        self._metrics: dict[str, float] = {}

    def seat(self) -> Seat:
        s = self.config.sampling
        law = SamplingLaw(s.temperature, s.top_p, s.top_k, min_tokens=s.min_tokens)
        return Seat("policy", self.engine, law, s.max_tokens, tuple(s.stop), "trained")

    def updates(self, step: int) -> Iterator[Update]:
        c = self.config
        self.engine.publish(step - 1, self.learner.models["policy"])
        tasks = draw_tasks(self.source, "train", c.starts, c.seed * 1_000_003 + step)
        episodes = play(self.source, tasks, [self.seat()], n=c.n, seed=c.seed, prefix=f"{step}:")
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
        samples = build_samples(
            good, "policy", {"advantage": advantages(good, c.credit, c.gamma)}, c.mean, c.sampling.max_tokens
        )
        fills = {"old": Readout("")} if c.old == "learner" else {}
        if self.ref and getattr(self.objective, "kl", "") != "exact":
            fills["ref"] = Readout("", model=self.ref)
        if fills:
            drawn, samples = samples, self.learner.fill(samples, **fills)
            self._metrics |= sampler_gap(drawn, samples) if c.old == "learner" else {}
        yield Update(samples, self.objective, passes=c.passes, minibatches=c.minibatches)

    def metrics(self) -> Mapping[str, float]:
        return self._metrics

    def evaluate(self, step: int) -> Mapping[str, float]:
        tasks = draw_tasks(self.source, self.config.eval.split, self.config.eval.n, self.config.seed)
        self.engine.publish(step, self.learner.models["policy"])
        episodes = play(self.source, tasks, [self.seat()], seed=self.config.seed + 1, prefix="eval:")
        write_segment(self.run.path / "evaluation", step, episodes)
        good, dropped = scored(episodes)
        return {**summary(good), **dropped}


def advantages(episodes: Sequence[Episode], credit: str, gamma: float) -> dict[str, list[float]]:
    """One number per turn of the policy: discounted return to go, or the episode's reward against its group."""
    if credit == "returns":
        return {e.id: list(discounted([t.reward for t in e.turns if t.seat == "policy"], gamma)) for e in episodes}
    rewards = [e.outcome.reward if isinstance(e.outcome, Scored) else np.nan for e in episodes]
    groups = [e.group for e in episodes]
    each = group_relative(rewards, groups) if credit == "group" else leave_one_out(rewards, groups)
    return {e.id: [float(a)] * sum(t.seat == "policy" for t in e.turns) for e, a in zip(episodes, each)}


def summary(episodes: Sequence[Episode]) -> dict[str, float]:
    if not episodes:
        return {}
    outcomes = [e.outcome for e in episodes if isinstance(e.outcome, Scored)]
    wins = [o.success for o in outcomes if o.success is not None]
    out: dict[str, float] = {
        "reward": float(np.mean([o.reward for o in outcomes])),
        "turns": float(np.mean([len(e.turns) for e in episodes])),
        "written_tokens": sum(len(t.tokens) for e in episodes for t in e.turns),
    }
    return {**out, "success": float(np.mean(wins))} if wins else out


def run(config: Config, run: Run, resume: bool = False) -> dict[str, float]:
    return train(OnlineMethod(config, run), config, run, resume)
