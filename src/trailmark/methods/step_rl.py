"""Reinforcement with rewards at the ends of reasoning steps: PPO, GRPO and ReMax.

A step earns what a reward model says of it (process), the last one what the whole answer is worth (outcome), or both
(`rewards`, `credit/steps.py`). Every other token earns nothing but the price of leaving the reference.

    ppo     token rewards with the price in them, generalised advantages, clipped surrogate; a critic with an optimiser
            of its own. An answer that was cut off is worth what the critic says of its end, a finished one nothing more
    grpo    step rewards against those of all answers to the same question; a token's credit is the sum of those at or
            behind it; clipped surrogate, and the k3 estimate of the KL in the loss, which pulls towards the reference.
            Steps that nothing is paid for are not compared: of outcomes alone, each answer has one reward
    remax   the whole reward against that of the greedy answer; no clipping, no critic

An answer without a step (the token that ends it is all there is) gives a reward model nothing to judge. It earns the
outcome's reward; if no outcome is paid, it is left out and counted (`answers_without_steps`). A 0 would be no
judgement, and could be more than the steps of others earn. ReMax leaves out the whole question if the greedy answer is
such a one (counted in `failed_greedy`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from trailmark.config import ModelConfig
from trailmark.credit import against_greedy, discounted, gae, group_steps, kl_shaped, place, step_rewards
from trailmark.episodes import won
from trailmark.learn.learner import Learner, Update
from trailmark.learn.watch import sampler_gap
from trailmark.methods.base import Held, reference_held
from trailmark.methods.configs import StepRewards, StepRlRecipe
from trailmark.methods.policy_gradient import PolicyGradientMethod
from trailmark.methods.value_model import critic_held, load_critic, load_frozen
from trailmark.models.load import load_reference
from trailmark.models.readout import Readout
from trailmark.objectives import Clipped, Value, WeightedLogp
from trailmark.rollout.play import play
from trailmark.runs.store import Run
from trailmark.samples import annotate_turns, build_samples
from trailmark.score.classes import check_classes, class_numbers, must_share_tokenizer, step_outputs
from trailmark.score.tokens import source_of
from trailmark.seats.locate import stored_model
from trailmark.steps import mark_steps, step_types, without_end
from trailmark.types import Annotation, Episode, Failed, Sample

Paid = Mapping[str, list[np.ndarray]]  # episode -> what each token of each turn of the seat earns


class StepRlMethod(PolicyGradientMethod):
    Config, self_play = StepRlRecipe, False
    config: StepRlRecipe

    @classmethod
    def unread(cls, config: Any) -> tuple[str, ...]:
        """How one would evaluate, if nothing is evaluated."""
        return () if config.eval.every else ("eval.split", "eval.n", "eval.patience", "eval.first")

    def __init__(self, config: StepRlRecipe, run: Run):
        super(PolicyGradientMethod, self).__init__(config, run)
        policy = self.open_world()
        config = self.config
        self.models = {"policy": policy}
        self.judge = open_rewards(config.rewards, config.model, policy.tokenizer)
        ref = load_reference(config.model)
        self.ref = "policy/base" if ref is None else "ref"
        self.models |= {} if ref is None else {"ref": ref}
        total = config.steps * config.passes * config.minibatches
        trains = {"policy": config.learner.optim}
        if config.algorithm == "ppo":
            critic = config.critic.model_copy(update={"name": config.critic.name or config.rewards.model})
            self.models["critic"] = load_critic(config.model, critic, run.path / "critic-import")
            must_share_tokenizer(self.models["critic"], policy.tokenizer, critic.name or config.model.name)
            trains["critic"] = config.critic.optim or config.learner.optim
        self.learner = Learner(self.models, config.learner, trains, total)

    @classmethod
    def holds(cls, config: Any) -> list[Held]:
        """The models at the table, the reference, the reward model, and the critic (ppo)."""
        found, rewards = [*cls.players(config), *reference_held(config.model)], config.rewards.model
        if rewards is not None:
            own = stored_model(config.model, rewards).model_copy(update={"lora": None})
            found.append(Held("rewards", own, output=False))
        if config.algorithm == "ppo":
            critic = config.critic.model_copy(update={"name": config.critic.name or rewards})
            found.append(critic_held(config.model, critic, config.learner.optim))
        return found

    def marked(self, e: Episode) -> Episode:
        """Cut into steps, none of which holds the token that ends the turn."""
        tokenizer, split = self.models["policy"].tokenizer, self.config.rewards.split
        cut = whole_turns(e, self.seat) if split == "turn" else mark_steps(e, self.seat, tokenizer, split)
        return without_end(cut, self.seat, tokenizer)

    def batch(self, step: int) -> tuple[list[Episode], list[Annotation]]:
        """The episodes of a step, played with the policy as it is."""
        c, notes = self.config, list[Annotation]()
        return self.play(self.rows.take(step), c.n, c.seed, f"{step}:", step - 1, notes), notes

    def updates(self, step: int) -> Iterator[Update]:
        c = self.config
        if not (good := self.collect(step)):
            return
        scores, notes = self.judge.read(good, self.seat)
        if self.judge.lm is not None and (empty := sum(not has_steps(e, self.seat) for e in good)):
            self._metrics["answers_without_steps"] = empty
        good = [e for e in good if self.is_paid(e)]
        earned = {e.id: self.earned(e, scores) for e in good}
        greedy = self.greedy(step, good) if c.algorithm == "remax" and good else {}
        if c.algorithm == "remax":
            self._metrics["failed_greedy"] = len({e.group for e in good} - greedy.keys())
            good = [e for e in good if e.group in greedy]
        if not good:
            self.run.annotate(step, notes)
            return
        if c.algorithm == "grpo":
            paid = against_group(good, earned, self.seat, c.rewards.at_end, {e.id: self.compared(e) for e in good})
        else:
            paid = {e.id: on_tokens(e, earned[e.id], self.seat, c.rewards.at_end) for e in good}
        samples = build_samples(good, self.seat, {"paid": paid})  # type: ignore[dict-item]
        fills = {"old": Readout(""), "ref": Readout("", model=self.ref)}
        if c.algorithm == "ppo":
            fills["value"] = Readout("", "head", model="critic", head="value")
            fills["after"] = Readout("", "head", model="critic", head="value", at="after")
        drawn, samples = samples, self.learner.fill(samples, **fills)
        known = {e.id: e for e in good}
        samples = [self.credited(s, known[s.episode], greedy) for s in samples]
        notes += annotate_turns(samples, good, self.seat, "advantage", f"{c.algorithm} of rewards at the ends of steps")
        if c.algorithm == "ppo":
            notes += annotate_turns(samples, good, self.seat, "value", "critic")
        self.run.annotate(step, notes)
        self._metrics |= sampler_gap(drawn, samples) | told(samples, earned)
        again: dict[str, Any] = {"passes": c.passes, "minibatches": c.minibatches, "seed": (c.seed, step)}
        if c.algorithm == "remax":
            yield Update(samples, WeightedLogp(), **again)
            return
        beta = c.kl if c.algorithm == "grpo" else 0.0
        yield Update(samples, Clipped(low=c.clip, high=c.clip, beta=beta, kl="k3", ref=self.ref), **again)
        if c.algorithm == "ppo":
            yield Update(samples, Value(clip=c.value_clip, scale=0.5), "critic", name="critic", **again)

    def is_paid(self, e: Episode) -> bool:
        """Whether something is paid for an answer. One without a step gives the reward model nothing to judge: it has
        the outcome's reward alone or, if that is not paid, none at all, which is not 0."""
        return self.judge.lm is None or self.config.rewards.right is not None or has_steps(e, self.seat)

    def earned(self, e: Episode, scores: Mapping[tuple[str, int], np.ndarray]) -> list[np.ndarray]:
        return turn_rewards(e, self.seat, scores, self.config.rewards, self.models["policy"].tokenizer)

    def compared(self, e: Episode) -> list[np.ndarray]:
        return paid_steps(e, self.seat, self.config.rewards, self.models["policy"].tokenizer)

    def credited(self, s: Sample, e: Episode, greedy: Mapping[str, float]) -> Sample:
        """A sample with its advantages, and what a critic regresses on."""
        c, streams = self.config, dict(s.streams)
        on = streams["weight"] != 0
        if c.algorithm == "grpo":
            streams["advantage"] = spread(discounted(streams["paid"][on], 1.0), on)
        elif c.algorithm == "remax":
            whole = float(streams["paid"].sum())
            streams["advantage"] = against_greedy(
                whole, greedy[e.group], streams["old"], streams["ref"], on, c.gamma, c.kl
            )
        else:
            rewards = kl_shaped(streams["paid"], streams["old"], streams["ref"], on, c.kl)[on]
            cut = e.turns[-1].cut_off
            end = float(streams["after"][on][-1]) if cut else 0.0
            a, target = gae(rewards, streams["value"][on], c.gamma, c.lam, end)
            streams["advantage"], streams["returns"] = spread(a, on), spread(target, on)
            streams["old_value"], streams["value_weight"] = streams["value"], streams["weight"]
            return dataclasses.replace(s, streams=streams, mass={**s.mass, "value_weight": s.mass["weight"]})
        return dataclasses.replace(s, streams=streams)

    def greedy(self, step: int, good: Sequence[Episode]) -> dict[str, float]:
        """By group: what the policy earns for the same start when it always takes the likeliest token."""
        c = self.config
        first = {e.group: e.task for e in good}
        seats = [
            dataclasses.replace(s, law=dataclasses.replace(s.law, temperature=0.0)) if s.name == self.seat else s
            for s in self.table.seats
        ]
        protocol = self.protocol(c, self.source)
        how = {"seed": c.seed, "prefix": f"{step}:greedy:", "failures": c.failures}
        played = play(self.source, list(first.values()), seats, protocol, **how)
        marked = [self.marked(e) for e in played]
        scores, _ = self.judge.read(marked, self.seat)
        earned = [sum(float(r.sum()) for r in self.earned(e, scores)) for e in marked]
        paid = [not isinstance(e.outcome, Failed) and self.is_paid(e) for e in marked]
        return {g: r for g, r, ok in zip(first, earned, paid, strict=True) if ok}


def has_steps(e: Episode, seat: str) -> bool:
    return any(t.steps for t in e.turns if t.seat == seat)


def whole_turns(e: Episode, seat: str) -> Episode:
    """Each turn of the seat as one step."""
    turns = (
        dataclasses.replace(t, steps=((0, len(t.tokens)),)) if t.seat == seat and t.tokens and not t.steps else t
        for t in e.turns
    )
    return dataclasses.replace(e, turns=tuple(turns))


def spread(values: np.ndarray, on: np.ndarray) -> np.ndarray:
    """Numbers of the written tokens among all tokens."""
    out = np.zeros(len(on))
    out[on] = values
    return out


# --- what steps earn -----------------------------------------------------------------------------------------------


class StepJudge:
    """Reads the score of every step off a reward model. Without one there are no scores."""

    def __init__(self, lm: Any, settings: StepRewards):
        self.lm, self.settings = lm, settings
        if lm is not None:
            check_classes(lm, "step", settings.classes)

    def read(
        self, episodes: Sequence[Episode], seat: str
    ) -> tuple[dict[tuple[str, int], np.ndarray], list[Annotation]]:
        """(episode, turn) -> a number for each of its steps, and the same as annotations."""
        if self.lm is None:
            return {}, []
        s = self.settings
        outs = step_outputs(self.lm, episodes, "step", seat)
        found = {key: np.asarray(class_numbers(out, s.classes, s.raw), float) for key, out in outs.items()}
        source = source_of(self.lm)
        return found, [Annotation(e, "step_score", "step", tuple(v.tolist()), i, source) for (e, i), v in found.items()]


def open_rewards(settings: StepRewards, model: ModelConfig, tokenizer: Any) -> StepJudge:
    if settings.model is None:
        return StepJudge(None, settings)
    return StepJudge(load_frozen(model, settings.model, tokenizer), settings)


def turn_rewards(
    e: Episode, seat: str, scores: Mapping[tuple[str, int], np.ndarray], settings: StepRewards, tokenizer: Any = None
) -> list[np.ndarray]:
    """What each step of each turn of the seat earns. A turn that has no steps counts as one, which the reward model
    says nothing of."""
    s, mine = settings, [i for i, t in enumerate(e.turns) if t.seat == seat and t.tokens]
    out = []
    for i in mine:
        spans = spans_of(e, i)
        said = scores.get((e.id, i), np.zeros(len(spans)))
        types = step_types(e, i, tokenizer) if s.skip else [""] * len(spans)
        on = np.array([kind not in s.skip for kind in types])
        values = np.zeros(len(spans))
        values[on] = step_rewards(said[on], s.running)  # a step that earns nothing is in no sum, minimum or product
        last = None if s.right is None or i != mine[-1] else (s.right if won(e) else s.wrong)
        out.append(step_rewards(values, "none", s.alpha, last, s.clip))
    return out


def paid_steps(e: Episode, seat: str, settings: StepRewards, tokenizer: Any = None) -> list[np.ndarray]:
    """Which steps of each turn of the seat something is paid for, be it 0: those that the reward model judges, and the
    last one for the outcome. A turn without steps has none that it judges: the 0 of such a turn is no judgement, and
    could be the best of its group."""
    s, mine = settings, [i for i, t in enumerate(e.turns) if t.seat == seat and t.tokens]
    out = []
    for i in mine:
        types = step_types(e, i, tokenizer) if s.skip else [""] * len(spans_of(e, i))
        judged = s.model is not None and s.alpha > 0 and bool(e.turns[i].steps)
        on = np.array([judged and kind not in s.skip for kind in types])
        on[-1] |= s.right is not None and i == mine[-1]
        out.append(on)
    return out


def spans_of(e: Episode, turn: int) -> Sequence[tuple[int, int]]:
    t = e.turns[turn]
    return t.steps or ((0, len(t.tokens)),)


def on_tokens(e: Episode, earned: Sequence[np.ndarray], seat: str, at_end: bool) -> list[np.ndarray]:
    """The rewards of steps on the tokens of each turn: at the last token of each step, and of the last one, with
    `at_end`, at the token that ends the turn."""
    mine = [i for i, t in enumerate(e.turns) if t.seat == seat and t.tokens]
    out = []
    for i, values in zip(mine, earned, strict=True):
        spans, size = list(spans_of(e, i)), len(e.turns[i].tokens)
        if at_end:
            spans[-1] = (spans[-1][0], size)
        out.append(place(values, spans, size))
    return out


def against_group(
    episodes: Sequence[Episode], earned: Paid, seat: str, at_end: bool, compared: Mapping[str, list[np.ndarray]]
) -> dict[str, list[np.ndarray]]:
    """The rewards of steps, each against all steps of the group that something is paid for (`compared`), on their
    tokens. The others have 0."""
    on = [np.concatenate(compared[e.id]) for e in episodes]
    flat = [np.concatenate(earned[e.id]) for e in episodes]
    normed = group_steps([r[m] for r, m in zip(flat, on)], [e.group for e in episodes])
    out = {}
    for e, m, values in zip(episodes, on, normed):
        cuts = np.cumsum([len(r) for r in earned[e.id]])[:-1]
        out[e.id] = on_tokens(e, np.split(spread(values, m), cuts), seat, at_end)
    return out


def told(samples: Sequence[Sample], earned: Paid) -> dict[str, float]:
    """What steps earned, how many there were, and how far the policy is from the reference."""
    steps = np.concatenate([r for rewards in earned.values() for r in rewards])
    gaps = [(s.streams["old"] - s.streams["ref"])[s.streams["weight"] != 0] for s in samples]
    return {
        "step_reward": float(steps.mean()),
        "steps_written": len(steps) / len(earned),
        "answer_reward": float(np.mean([sum(float(r.sum()) for r in rewards) for rewards in earned.values()])),
        "kl_reference": float(np.concatenate(gaps).mean()),
    }
