"""Policy gradients on any task, with a choice of credit and objective: REINFORCE, RLOO, GRPO and relatives. This is the
plain method that the methods of the papers are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from trailmark.credit import group_relative, leave_one_out, outcome_of, turn_returns, whiten
from trailmark.episodes import equal, group_rewards, least_range
from trailmark.errors import TaskError
from trailmark.learn.learner import Learner, Update
from trailmark.learn.watch import sampler_gap, spread, summary
from trailmark.memory import need_rows
from trailmark.methods.base import Held, Method, reference_held
from trailmark.methods.batches import Walk
from trailmark.methods.configs import PolicyGradientRecipe
from trailmark.methods.eval_function import EvalFunction
from trailmark.models.lm import LM
from trailmark.models.load import load_model, load_reference
from trailmark.models.readout import Readout
from trailmark.objectives import Objective, get_objective
from trailmark.rollout.play import play
from trailmark.rollout.pool import Ahead
from trailmark.runs.annotations import read_beside
from trailmark.runs.checkpoints import listed
from trailmark.runs.store import Run, read_segment, write_beside, write_segment
from trailmark.samples import annotate_turns, build_samples, scored
from trailmark.seats.config import LocalSeat, trained_seats
from trailmark.seats.table import Table
from trailmark.tasks import keep_judge
from trailmark.tasks.base import TaskSource, draw_tasks
from trailmark.tasks.prompts import Prompts
from trailmark.types import Annotation, Episode, Sample, Scored, Task

MOST_RATIO = 2.0  # the largest importance weight of a token of an older policy (overlap)


class PolicyGradientMethod(Method):
    Config, self_play = PolicyGradientRecipe, True

    def __init__(self, config: PolicyGradientRecipe, run: Run):
        super().__init__(config, run)
        policy = self.open_world()
        config = self.config
        self.objective: Objective = get_objective(config.objective)
        models = {"policy": policy}
        self.ref = ""
        if getattr(self.objective, "beta", 0) or config.kl_reward:
            ref = load_reference(config.model)
            self.ref = "policy/base" if ref is None else "ref"
            models |= {} if ref is None else {"ref": ref}
            if getattr(self.objective, "beta", 0):
                self.objective = self.objective.model_copy(update={"ref": self.ref})
        updates = config.steps * config.passes * config.minibatches
        self.learner = Learner(models, config.learner, total=updates)

    def open_world(self) -> LM:
        """Open the task and the seats; the model that is trained."""
        config = self.config
        need_rows(config.prompts_per_step * config.n, "prompts_per_step * n")
        self.source = self.open_source(config)
        self.check_asked(config, self.source)
        self.rows = self.walk(config, self.source)
        self.config = config = config.model_copy(update={"steps": self.rows.steps(config.steps)})
        keep_judge(self.source, self.run.path)
        given = getattr(config, "eval_fn", None)  # recipes of derived methods may not have this key
        self.eval_function = EvalFunction(given, config.model, self.run.path) if given else None
        policy = load_model(config.model)
        seats = self.seats_of(config)
        self.seat, *_ = self.trained = trained_seats(seats)
        # Recipes of derived methods may not have these keys.
        self.overlap, self.refill = getattr(config, "overlap", False), getattr(config, "refill", 0)
        self.table = Table(seats, dict.fromkeys(self.trained, policy), config.seed, apart=self.overlap)
        self.table.bind(self.source)
        if isinstance(self.source, Prompts) and not listed(self.run.path / "checkpoints"):  # before a run, not amid it
            rows = self.shown_rows(config, self.source)
            self.source.must_render(policy.tokenizer, rows)
            self.source.must_fit(policy.tokenizer, self.table.engines[self.seat].max_len, rows)
            if self.source.judge is not None:
                self.source.judge.must_read(rows, self.table.seats[0].max_tokens)
        self._metrics: dict[str, float] = {}
        self.next = Ahead(policy.device, self.overlap)
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
        c, seats = self.config, self.table.seats
        protocol = self.protocol(c, self.source)
        return play(self.source, tasks, seats, protocol, n, seed, prefix, notes=notes, failures=c.failures)

    def batch(self, step: int) -> tuple[list[Episode], list[Annotation]]:
        """The episodes of a step and a judge's notes. With `overlap` they were played during the step before, and the
        batch of the next step begins now, with the weights as they are."""
        c = self.config

        def played(number: int) -> tuple[list[Episode], list[Annotation]]:
            notes: list[Annotation] = []
            episodes: list[Episode] = []
            tasks = self.rows.take(number)
            wanted, used = len(tasks), {t.id for t in tasks}
            for k in range(self.refill + 1):  # further starts in place of groups that teach nothing
                if k and (missing := wanted - len(varied(episodes))) <= 0:
                    break
                tasks = self.rows.more(number, k, missing, used) if k else tasks
                used |= {t.id for t in tasks}
                prefix = f"{number}:" if k == 0 else f"{number}.{k}:"
                episodes += self._played(tasks, c.n, c.seed, prefix, notes)
            return episodes, notes

        return self.next.batch(step, c.steps, played, lambda: self.table.publish(step - 1))

    def collect(self, step: int) -> list[Episode]:
        """Play the episodes of a step and store them. Returns those that can be learnt from, if any."""
        played, notes = self.batch(step)
        episodes = [self.marked(e) for e in played]
        self.run.annotate(step, notes)
        write_segment(self.run.episodes_dir, step, episodes)
        good, dropped = scored(episodes)
        self._metrics = {**summary(good), **spread(good), **dropped, **self.judged(notes)}
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
        good = self.collect(step)
        if self.refill:  # they leave the denominator too
            kept = varied(good)
            self._metrics["dropped_groups"] = len({e.group for e in good}) - len(kept)
            good = [e for e in good if e.group in kept]
        if not good:
            return
        parts = {seat: self.samples_of(seat, good) for seat in self.trained}
        samples = drawn = [s for part in parts.values() for s in part]
        fills = {"old": Readout("")} if c.old_logp == "learner" else {}
        if self.ref and (c.kl_reward or getattr(self.objective, "kl", "") != "exact"):
            fills["ref"] = Readout("", model=self.ref)
        if fills:
            samples = self.learner.fill(samples, **fills)
        if c.kl_reward:
            samples, self._metrics["kl_ref"] = penalised(samples, c.kl_reward)
        if c.credit == "batch":
            samples = whitened(samples)
        said = credit_name(c.credit, c.gamma, c.kl_reward)
        rest, notes = iter(samples), list[Annotation]()
        for seat, part in parts.items():
            notes += annotate_turns(list(islice(rest, len(part))), good, seat, "advantage", said)
        self.run.annotate(step, notes)
        if fills:
            if c.old_logp == "learner" and c.overlap:
                samples, found = truncated(drawn, samples, MOST_RATIO)
                self._metrics |= found
            elif c.old_logp == "learner":
                self._metrics |= sampler_gap(drawn, samples)
        yield Update(samples, self.objective, passes=c.passes, minibatches=c.minibatches, seed=(c.seed, step))

    def samples_of(self, seat: str, good: Sequence[Episode]) -> list[Sample]:
        """The samples of one trained seat, with the advantages of its side."""
        c, mine = self.config, [e for e in good if isinstance(outcome_of(e, seat), Scored)]
        credited = {"advantage": advantages(mine, c.credit, c.gamma, seat)}
        return build_samples(mine, seat, credited, c.mean, self.table.seat(seat).max_tokens)

    @classmethod
    def shown_rows(cls, config: Any, source: TaskSource) -> list[Task]:
        """The rows that a run will play, in training and in evaluations."""
        e = config.eval
        return [*source.tasks("train"), *(draw_tasks(source, e.split, e.n, config.seed) if e.every else ())]

    @classmethod
    def walk(cls, config: Any, source: TaskSource) -> Walk:
        return Walk(source, config.prompts_per_step, config.seed, epochs=getattr(config, "epochs", None))

    @classmethod
    def holds(cls, config: Any) -> list[Held]:
        """Every model at the table, the reference if the objective reads one, and the one that reads gold texts."""
        refers = getattr(get_objective(config.objective), "beta", 0) or config.kl_reward
        return [*cls.players(config), *(reference_held(config.model) if refers else []), *reader_held(config)]

    @classmethod
    def players(cls, config: Any) -> list[Held]:
        """Every model at the table. With `overlap` the engine plays with a copy of the weights."""
        found: list[Held] = []
        seats = cls.seats_of(config)
        first, *others = trained_seats(seats)  # one model, and one engine
        for name, seat in seats.items():
            if name == first and isinstance(seat, LocalSeat):
                copied = getattr(config, "overlap", False)
                found.append(Held(name, config.model, config.learner.optim, None if copied else seat.engine))
                if copied:
                    dtype = seat.engine.dtype or config.model.dtype if seat.engine else config.model.dtype
                    copy = config.model.model_copy(update={"lora": None, "dtype": dtype})
                    found.append(Held(f"{name} in play", copy, None, seat.engine))
            elif name not in others and isinstance(seat, LocalSeat) and seat.model is not None:
                found.append(Held(name, seat.model, None, seat.engine))
        return found

    def metrics(self) -> Mapping[str, float]:
        return self._metrics

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

    def evaluate(self, step: int) -> Mapping[str, float]:
        tasks = draw_tasks(self.source, self.config.eval.split, self.config.eval.n, self.config.seed)
        play = lambda: self.play(tasks, 1, self.config.seed + 1, "eval:", step)
        own, judge = self.eval_function, self.source.judge
        compared = lambda found: [] if judge is None else judge.compare(found)
        measure = lambda found: [*compared(found), *(() if own is None else own.notes(self.source, found))]
        episodes = self.keep_plays(step, play, measure)
        good, dropped = scored(episodes)
        means = {} if own is None else own.metrics(self.noted)
        return {**summary(good), **dropped, **self.judged(self.noted), **means}


def reader_held(config: Any) -> list[Held]:
    """The frozen models that give the reward, as far as they are in this process."""
    models = config.task.reward.held() if config.task.reward else []
    return [Held("reward", model, stays=True) for model in models]


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
             "leave_one_out": "against the others of its group", "batch": "against the batch"}  # fmt: skip
    return names.get(credit, f"return to go{discount}") + (f", KL in the reward ({kl:g})" if kl else "")


def advantages(episodes: Sequence[Episode], credit: str, gamma: float, seat: str = "policy") -> dict[str, list[float]]:
    """One advantage per turn of a trained seat: the discounted return to go, or its side's reward relative to those of
    its group."""
    if credit == "returns":
        return {e.id: list(turn_returns(e, seat, gamma)) for e in episodes}
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
