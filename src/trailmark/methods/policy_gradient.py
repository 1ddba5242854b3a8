"""Policy gradients on any task, with a choice of credit and objective: REINFORCE, RLOO, GRPO and relatives. This is the
plain method that the methods of the papers are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from trailmark.credit.groups import group_relative, leave_one_out, leave_one_out_turns
from trailmark.credit.shaping import whiten
from trailmark.credit.turns import outcome_of, turn_returns
from trailmark.episodes import equal, group_rewards, least_range
from trailmark.learn.learner import Learner, Update
from trailmark.learn.watch import sampler_gap
from trailmark.methods.base import ModelInMemory, reference_in_memory
from trailmark.methods.eval_function import EvalFunction
from trailmark.methods.online import OnlineMethod
from trailmark.methods.online_configs import PolicyGradientRecipe, get_objective
from trailmark.models.load import load_reference
from trailmark.models.readout import Readout
from trailmark.objectives.base import Objective
from trailmark.rollout.pool import Ahead
from trailmark.runs.annotations import read_beside
from trailmark.runs.checkpoints import listed
from trailmark.runs.store import Run, read_segment, write_beside, write_segment
from trailmark.samples import annotate_turns, build_samples
from trailmark.seats.config import LocalSeat
from trailmark.types import Annotation, Episode, Sample, Scored

MOST_RATIO = 2.0  # the largest importance weight of a token of an older policy (overlap)


class PolicyGradientMethod(OnlineMethod):
    """A step is `collect`, `credit` and an update of the objective."""

    Config, self_play = PolicyGradientRecipe, True

    def __init__(self, config: PolicyGradientRecipe, run: Run):
        # Opened first: a mistake in the user's function is found before a model is loaded.
        self.eval_function = EvalFunction(config.eval_fn, config.model, run.path) if config.eval_fn else None
        super().__init__(config, run, apart=config.overlap)
        self.next = Ahead(self.policy.device, config.overlap)
        self.objective: Objective = get_objective(config.objective)
        models = {"policy": self.policy}
        self.ref = ""
        if reads_reference(config):
            ref = load_reference(config.model)
            self.ref = "policy/base" if ref is None else "ref"
            models |= {} if ref is None else {"ref": ref}
            if getattr(self.objective, "beta", 0):
                self.objective = self.objective.model_copy(update={"ref": self.ref})
        total = self.config.steps * config.passes * config.minibatches
        self.learner = Learner(models, config.learner, total=total)
        self.reads_old = reads_old(config, self.objective)

    def updates(self, step: int) -> Iterator[Update]:
        c = self.config
        if good := self.collect(step):
            samples, seed = self.credit(step, good), (c.seed, step)
            yield Update(samples, self.objective, "policy", c.passes, c.minibatches, "", seed, self.reads_old)
            if self.reads_old:
                self._metrics |= sampler_gap(samples, self.learner.scored)

    # -- collect ------------------------------------------------------------------------------------------------------

    def collect(self, step: int) -> list[Episode]:
        """The episodes to learn from. With `refill`, groups that teach nothing leave the denominator too."""
        good = super().collect(step)
        if not self.config.refill:
            return good
        kept = varied(good)
        self._metrics["dropped_groups"] = len({e.group for e in good}) - len(kept)
        return [e for e in good if e.group in kept]

    def batch(self, step: int) -> tuple[list[Episode], list[Annotation]]:
        """The episodes of a step and a judge's notes. With `overlap` they were played during the step before, and the
        batch of the next step begins now, with the weights as they are."""
        publish = lambda: self.opened.publish(step - 1)
        return self.next.batch(step, self.config.steps, self.played_batch, publish)

    def played_batch(self, step: int) -> tuple[list[Episode], list[Annotation]]:
        """Play the starts of a step, and further ones in place of groups that teach nothing (`refill`)."""
        c, notes, episodes = self.config, list[Annotation](), list[Episode]()
        tasks = self.rows.take(step)
        wanted, used = len(tasks), {t.id for t in tasks}
        for k in range(c.refill + 1):
            if k and (missing := wanted - len(varied(episodes))) <= 0:
                break
            tasks = self.rows.more(step, k, missing, used) if k else tasks
            used |= {t.id for t in tasks}
            episodes += self.play_now(tasks, c.n, c.seed, f"{step}:" if k == 0 else f"{step}.{k}:", notes)
        return episodes, notes

    def play(self, *args: Any, **more: Any) -> list[Episode]:
        self.next.wait()  # one engine plays one batch at a time
        return super().play(*args, **more)

    # -- credit -------------------------------------------------------------------------------------------------------

    def credit(self, step: int, good: Sequence[Episode]) -> list[Sample]:
        """The samples of a step with their advantages, which are stored as annotations."""
        c = self.config
        by_seat = {seat: self.samples_of(seat, good) for seat in self.trained}
        samples = drawn = [s for some in by_seat.values() for s in some]
        fills = {"old": Readout("")} if c.old_logp == "learner" and not self.reads_old else {}
        if self.ref and (c.kl_reward or getattr(self.objective, "kl", "") != "exact"):
            fills["ref"] = Readout("", model=self.ref)
        if fills:
            samples = self.learner.fill(samples, **fills)
        if c.kl_reward:
            samples, self._metrics["kl_ref"] = penalised(samples, c.kl_reward)
        if c.credit == "batch":
            samples = whitened(samples)
        source = credit_name(c.credit, c.gamma, c.kl_reward)
        rest, notes = iter(samples), list[Annotation]()
        for seat, some in by_seat.items():
            notes += annotate_turns(list(islice(rest, len(some))), good, seat, "advantage", source)
        self.run.annotate(step, notes)
        if c.old_logp == "learner" and c.overlap:
            samples, found = truncated(drawn, samples, MOST_RATIO)
            self._metrics |= found
        elif "old" in fills:
            self._metrics |= sampler_gap(drawn, samples)
        return samples

    def samples_of(self, seat: str, good: Sequence[Episode]) -> list[Sample]:
        """The samples of one trained seat, with the advantages of its side."""
        c, mine = self.config, [e for e in good if isinstance(outcome_of(e, seat), Scored)]
        credited = {"advantage": advantages(mine, c.credit, c.gamma, seat)}
        return build_samples(mine, seat, credited, c.mean, self.opened.seat(seat).max_tokens)

    # -- evaluation, memory, checkpoints ------------------------------------------------------------------------------

    def own_notes(self, episodes: list[Episode]) -> list[Annotation]:
        return [] if self.eval_function is None else self.eval_function.notes(self.source, episodes)

    def evaluate(self, step: int) -> Mapping[str, float]:
        found = super().evaluate(step)
        return found if self.eval_function is None else {**found, **self.eval_function.metrics(self.noted)}

    @classmethod
    def models_in_memory(cls, config: Any) -> list[ModelInMemory]:
        """Every model at the table, the reference if the objective reads one, and the one that reads gold texts."""
        refers = reference_in_memory(config.model) if reads_reference(config) else []
        return [*cls.players(config), *refers, *reader_in_memory(config)]

    @classmethod
    def player(cls, config: Any, name: str, seat: LocalSeat) -> list[ModelInMemory]:
        """With `overlap` the engine plays with a copy of the weights."""
        if not config.overlap:
            return super().player(config, name, seat)
        dtype = seat.engine.dtype or config.model.dtype if seat.engine else config.model.dtype
        copy = config.model.model_copy(update={"lora": None, "dtype": dtype})
        trained = ModelInMemory(name, config.model, config.learner.optim)
        return [trained, ModelInMemory(f"{name} in play", copy, None, seat.engine)]

    def state(self) -> Mapping[str, Any]:
        """The batch that is played ahead comes from weights that no later checkpoint holds. The run keeps it."""
        if (waiting := self.next.wait()) is None:
            return {}
        step, (episodes, notes) = waiting
        kept = {int(p.name) + 1 for p in listed(self.run.checkpoints_dir)}
        for old in (self.run.path / "ahead").glob("[0-9]*.jsonl"):
            if int(old.name.split(".")[0]) not in kept:  # its checkpoint was pruned
                old.unlink()
        path = write_segment(self.run.path / "ahead", step, episodes)
        write_beside(path, notes)
        return {"ahead": step}

    def load(self, state: Mapping[str, Any]) -> None:
        if (step := state.get("ahead")) is not None:
            path = self.run.path / "ahead" / f"{step:06d}.jsonl"
            self.next.ready(step, (read_segment(path), read_beside(path)))


def reads_old(config: PolicyGradientRecipe, objective: Objective) -> bool:
    """Whether the log-probs before the update need no pass of their own: the only step of a batch reads them anyway."""
    once = config.old_logp == "learner" and config.passes == config.minibatches == 1
    needed_before = config.overlap or config.kl_reward or (config.model.lora and config.model.lora.dropout)
    return once and not needed_before and Readout("logp") in objective.readouts()


def reads_reference(config: PolicyGradientRecipe) -> bool:
    """Whether the loss or the reward has a KL to the model that training starts from."""
    return bool(getattr(get_objective(config.objective), "beta", 0) or config.kl_reward)


def reader_in_memory(config: Any) -> list[ModelInMemory]:
    """The frozen models that give the reward, as far as they are in this process."""
    models = config.task.reward.held() if config.task.reward else []
    return [ModelInMemory("reward", model, stays=True) for model in models]


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


def varied(episodes: Sequence[Episode]) -> set[str]:
    """The groups whose scored episodes do not all earn the same. "The same" is relative to the rewards of the batch."""
    rewards = group_rewards(episodes)
    every = [r for group in rewards.values() for r in group]
    return {name for name, group in rewards.items() if not equal(group, every)}


def penalised(samples: Sequence[Sample], weight: float) -> tuple[list[Sample], float]:
    """The KL penalty in the reward: token t costs weight * (log p - log ref), and every token before it in its sample
    led to it. So advantage_t falls by the sum over t and all later trained tokens. Also returns the mean KL a token."""
    out, seen = [], []
    for s in samples:
        trained = s.streams["weight"] != 0
        each = np.where(trained, np.where(trained, s.streams["old"] - s.streams["ref"], 0.0), 0.0)
        to_go = np.cumsum(each[::-1])[::-1]
        out.append(replace(s, streams={**s.streams, "advantage": s.streams["advantage"] - weight * to_go * trained}))
        seen.append(each[trained])
    return out, float(np.concatenate(seen).mean()) if seen else 0.0


def whitened(samples: Sequence[Sample]) -> list[Sample]:
    """Advantages with mean 0 and deviation 1 over all trained tokens of the batch."""
    ends = np.cumsum([len(s.tokens) for s in samples])[:-1]
    trained = np.concatenate([s.streams["weight"] != 0 for s in samples])
    each = np.split(whiten(np.concatenate([s.streams["advantage"] for s in samples]), trained), ends)
    return [replace(s, streams={**s.streams, "advantage": a}) for s, a in zip(samples, each)]


def credit_name(credit: str, gamma: float, kl: float = 0.0) -> str:
    """How the advantage was computed, as annotations record it."""
    discount = "" if gamma == 1 else f", discounted by {gamma:g}"
    names = {"group": "against its group", "group_mean": "above the mean of its group",
             "leave_one_out": "against the others of its group", "batch": "against the batch",
             "turn_leave_one_out": f"return to go{discount}, against the others of its group at that turn"}  # fmt: skip
    return names.get(credit, f"return to go{discount}") + (f", KL in the reward ({kl:g})" if kl else "")


def advantages(episodes: Sequence[Episode], credit: str, gamma: float, seat: str = "policy") -> dict[str, list[float]]:
    """One advantage per turn of a trained seat: the discounted return to go, or its side's reward relative to those of
    its group."""
    if credit == "returns":
        return {e.id: list(turn_returns(e, seat, gamma)) for e in episodes}
    if credit == "turn_leave_one_out":
        returns = [turn_returns(e, seat, gamma) for e in episodes]
        return {e.id: list(a) for e, a in zip(episodes, leave_one_out_turns(returns, [e.group for e in episodes]))}
    outcomes = [outcome_of(e, seat) for e in episodes]
    rewards = [o.reward if isinstance(o, Scored) else np.nan for o in outcomes]
    groups = [e.group for e in episodes]
    if credit == "batch":
        each = np.array(rewards)  # against the batch once all its tokens are known (`whitened`)
    elif credit == "leave_one_out":
        each = leave_one_out(rewards, groups, guard=least_range(rewards))
    else:
        each = group_relative(rewards, groups, "std" if credit == "group" else "none", guard=least_range(rewards))
    return {e.id: [float(a)] * sum(t.seat == seat and bool(t.tokens) for t in e.turns) for e, a in zip(episodes, each)}
