"""OREO: offline reinforcement learning from scored trajectories.

A policy pi and a value V are trained until they satisfy the soft Bellman equation on the stored trajectories:

    V(s_t) = R - beta sum_{i>=t} log pi(a_i|s_i) / ref(a_i|s_i)       for every state s_t of every trajectory

The paper's equations, and where they are (l_i is the log-ratio above, sg a stop-gradient):

    V*(s) - V*(s') = r - beta log pi*/ref         soft Bellman     summed from t on: the line above
    L_V  = mean_t (V(s_t) - R + beta sum_{i>=t} l_i)^2           `methods/oreo/soft_bellman.py:SoftBellman._value`
    L_pi = mean_t (V(s_t) - R + beta l_t + sg[beta sum_{i>t} l_i])^2  `methods/oreo/soft_bellman.py:SoftBellman._policy`
           its variants: step, response, one step, no stop-gradient  `methods/oreo/soft_bellman.py:SoftBellman._policy`
    L_reg = alpha KL(pi || ref)                                  `methods/oreo/soft_bellman.py:SoftBellman._regulariser`
    mean_t over a trajectory, then the batch; states, actions, R `methods/oreo/data.py:trajectory_samples`
    the steps of a response                                      `steps.py:mark_steps`
    alpha learnt so that the KL meets a target                   `methods/oreo/soft_bellman.py:SoftBellman.learn`
    data: plays of each start, or as many right as wrong         `methods/oreo/data.py:collect_balanced`
    collect, train, and again                                    `methods/oreo/rounds.py:OreoRoundsMethod`
    beam search, and the best of K actions, by V                 `rollout/search.py:_Search.beam`
    the best of N whole answers by V                             `rollout/search_episodes.py:best_by_value`
    V* and pi* in closed form, on small problems                 `tasks/solved.py:solve_soft`

Each step takes a batch of trajectories. The value moves towards the right-hand side, and the policy moves so that the
two sides meet (`methods/oreo/soft_bellman.py` has the variants). Both losses are computed from the models before the
step. The reference `ref` is the policy before training, or another model. The baselines that learn from the same file
are in method `preference`.

What differs from the reference implementation: a trajectory that is too long is left out, not cut and credited. Prompts
are never trained on, on whichever side the padding is. Rewards are used as they are in the file unless the recipe
rescales them (the reference's default is 2r - 1). Both models, both optimisers and the KL coefficient are in every
checkpoint. Medians of log weights are over the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from trailmark.learn.learner import Learner, Update
from trailmark.learn.loop import Evaluation
from trailmark.methods.base import ModelInMemory
from trailmark.methods.offline import OfflineMethod, Trajectories
from trailmark.methods.oreo import data as oreo_data
from trailmark.methods.oreo.config import OreoRecipe
from trailmark.methods.oreo.soft_bellman import SoftBellman
from trailmark.methods.value_model import critic_in_memory, load_critic
from trailmark.models.readout import Readout
from trailmark.rollout.search import parse_plan
from trailmark.rollout.search_episodes import search_episodes
from trailmark.score.values import HeadValues
from trailmark.steps import mark_steps
from trailmark.tasks.base import draw_tasks
from trailmark.types import Episode, Sample


class OreoMethod(OfflineMethod):
    Config = OreoRecipe

    @classmethod
    def evaluates(cls, config: Any) -> bool:
        return super().evaluates(config) or bool(config.final.search)

    def make_rows(self, config: Any, episodes: Trajectories, tokenizer: Any) -> tuple[Sequence[Any], dict[str, int]]:
        """Trajectories. They are split into steps if only steps have a value."""
        if states(config) == "step":
            return episodes.then(lambda e: mark_steps(e, config.seat, tokenizer, config.split)), {}
        return episodes, {}

    def make_reference(self) -> str:
        """If only the value is trained, the policy never changes and is its own reference."""
        return "policy" if self.config.ref is None and self.config.critic_only else super().make_reference()

    def make_learner(self) -> Learner:
        c = self.config
        self.models["critic"] = load_critic(c.model, c.critic, self.run.path / "critic-import")
        self.frozen = math.ceil(c.freeze * c.steps)
        trains = {"critic": c.critic.optim or c.learner.optim}
        if not c.critic_only:
            trains["policy"] = c.learner.optim
        return Learner(self.models, c.learner, trains, {"critic": c.steps, "policy": c.steps - self.frozen})

    def make_objective(self) -> SoftBellman:
        c = self.config
        return SoftBellman(
            part="both",
            level=c.level,
            beta=c.beta or 0.03,
            ref=self.ref,
            actions="action",
            lagged=c.target == "ema" and not c.critic_only,
            alpha=c.kl.alpha,
            kl=c.kl.kind,
            kl_target=c.kl.target,
            kl_lr=c.kl.lr,
            kl_start=c.kl.start,
            clip_log=c.clip_log,
            importance=c.importance != "none",
            hinge=c.hinge,
        )

    def updates(self, step: int) -> Iterator[Update]:
        c = self.config
        samples = self.unscored_samples(step)
        if c.target == "ema" and "policy" in self.learner.optimisers:
            with self.learner.optimisers["policy"].averaged():
                samples = self.learner.fill(samples, policy_logp=Readout("", law=False, where="action"))
        if c.critic_only or step <= self.frozen:
            objective = self.objective.model_copy(update={"alpha": 0.0, "kl_target": None})
            yield Update(samples, objective, ("critic",))
        else:
            yield Update(samples, self.objective, ("critic", "policy"))

    def unscored_samples(self, step: int) -> list[Sample]:
        c, chosen = self.config, self.batches.take(step)
        mean: Literal["token", "sequence"] = "token" if c.importance == "batch" else "sequence"
        return oreo_data.trajectory_samples(chosen, c.seat, states(c), mean, c.reward.mul, c.reward.add)

    @classmethod
    def models_in_memory(cls, config: Any) -> list[ModelInMemory]:
        """The policy and its reference, and the value, which is a model of its own."""
        found = super().models_in_memory(config)
        if config.critic_only:
            found = [replace(h, optim=None) for h in found if h.name != "ref" or config.ref is not None]
        return [*found, critic_in_memory(config.model, config.critic, config.learner.optim)]

    def evaluations(self, step: int, last: bool) -> Sequence[Evaluation]:
        """At the end: also searches with the learnt value."""
        searches = self.config.final.search if last else ()
        return [
            *super().evaluations(step, last),
            *(Evaluation(text.replace(":", "-"), partial(self.searched, text, step)) for text in searches),
        ]

    def searched(self, text: str, step: int) -> list[Episode]:
        c = self.config
        assert self.source is not None and self.opened is not None
        self.opened.publish(step)
        seat = self.opened.seat(c.seat, c.sampling.model_copy(update={"temperature": c.final.temperature}))
        plan = parse_plan(text, step_ends=tuple(self.source.step_ends))
        values = HeadValues(self.models["critic"], fixed=c.engine.batch_invariant, amp=c.learner.amp == "bf16")
        tasks = draw_tasks(self.source, c.eval.split, c.eval.n, c.seed)
        return search_episodes(self.source, seat, plan, values, tasks, c.seed + 1, failures=c.failures)[0]


def states(c: OreoRecipe) -> Literal["token", "step"]:
    return c.states or ("step" if c.level == "step" else "token")
