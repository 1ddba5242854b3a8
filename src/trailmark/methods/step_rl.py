"""Reinforcement with rewards at the ends of reasoning steps: PPO, GRPO and ReMax.

A step has the reward that a reward model gives it (process), the last one that of the whole answer (outcome), or both
(`rewards`, `credit/steps.py`). Every other token has nothing but the KL penalty to the reference.

    ppo     token rewards with the KL penalty in them, generalised advantages, clipped surrogate; a critic with its own
            optimiser. An answer that was cut off is worth what the critic says of its end, a finished one nothing more
    grpo    step rewards against those of all answers to the same question; a token's credit is the sum of those at or
            behind it; clipped surrogate, and the k3 estimate of the KL in the loss, which pulls towards the reference.
            Steps without a reward are not compared: of outcomes alone, each answer has one reward
    remax   the whole reward against that of the greedy answer; no clipping, no critic

An answer without a step (the token that ends it is all there is) gives a reward model nothing to judge. It has the
outcome's reward; if outcomes have none, it is left out and counted (`answers_without_steps`). A 0 would be no
judgement, and could be more than the steps of others have. ReMax leaves out the whole question if the greedy answer is
such a one (counted in `failed_greedy`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from trailmark.config import ModelConfig
from trailmark.credit.gae import gae
from trailmark.credit.returns import discounted
from trailmark.credit.shaping import kl_shaped, place
from trailmark.credit.steps import against_greedy, group_steps, step_rewards
from trailmark.episodes import won
from trailmark.learn.learner import Learner, Update
from trailmark.learn.watch import sampler_gap
from trailmark.methods.base import ModelInMemory, reference_in_memory
from trailmark.methods.configs import CriticConfig
from trailmark.methods.online import OnlineMethod
from trailmark.methods.online_configs import StepRewards, StepRlRecipe
from trailmark.methods.value_model import critic_in_memory, load_critic, load_frozen
from trailmark.models.load import load_reference
from trailmark.models.readout import Readout
from trailmark.objectives.base import Objective
from trailmark.objectives.clipped import Clipped
from trailmark.objectives.value import Value
from trailmark.objectives.weighted_logp import WeightedLogp
from trailmark.rollout.play import play
from trailmark.runs.store import Run
from trailmark.samples import annotate_turns, build_samples
from trailmark.score.classes import check_classes, class_numbers, must_share_tokenizer, step_outputs
from trailmark.score.tokens import source_of
from trailmark.seats.model_names import stored_model
from trailmark.steps import mark_steps, step_types, without_end
from trailmark.types import Annotation, Episode, Failed, Sample

StepRewardsOf = Mapping[str, list[np.ndarray]]  # episode -> the reward of each step of each turn of the seat
TokenRewards = Mapping[str, list[np.ndarray]]  # the same for each token
Credited = tuple[list[Sample], Mapping[str, Objective]]  # samples with advantages, and the loss of each trained model


class StepRlMethod(OnlineMethod):
    """A step is `collect`, the rewards of the steps of each answer, and one of `ppo`, `grpo` and `remax`, which gives
    each token its credit and says which losses are trained."""

    Config = StepRlRecipe
    config: StepRlRecipe

    @classmethod
    def unread(cls, config: Any) -> tuple[str, ...]:
        """How one would evaluate, if nothing is evaluated."""
        return () if config.eval.every else ("eval.split", "eval.n", "eval.patience", "eval.first")

    def __init__(self, config: StepRlRecipe, run: Run):
        super().__init__(config, run)
        self.tokenizer = self.policy.tokenizer
        self.judge = open_rewards(config.rewards, config.model, self.tokenizer)
        models, trains = {"policy": self.policy}, {"policy": config.learner.optim}
        ref = load_reference(config.model)
        self.ref = "policy/base" if ref is None else "ref"
        models |= {} if ref is None else {"ref": ref}
        if config.algorithm == "ppo":
            critic = critic_of(config)
            models["critic"] = load_critic(config.model, critic, run.path / "critic-import")
            must_share_tokenizer(models["critic"], self.tokenizer, critic.name or config.model.name)
            trains["critic"] = critic.optim or config.learner.optim
        total = self.config.steps * config.passes * config.minibatches
        self.learner = Learner(models, config.learner, trains, total)

    @classmethod
    def models_in_memory(cls, config: Any) -> list[ModelInMemory]:
        """The models at the table, the reference, the reward model, and the critic (ppo)."""
        found, rewards = [*cls.players(config), *reference_in_memory(config.model)], config.rewards.model
        if rewards is not None:
            own = stored_model(config.model, rewards).model_copy(update={"lora": None})
            found.append(ModelInMemory("rewards", own, output=False))
        if config.algorithm == "ppo":
            found.append(critic_in_memory(config.model, critic_of(config), config.learner.optim))
        return found

    def stored(self, e: Episode) -> Episode:
        """Cut into steps, none of which holds the token that ends the turn."""
        split = self.config.rewards.split
        cut = whole_turns(e, self.seat) if split == "turn" else mark_steps(e, self.seat, self.tokenizer, split)
        return without_end(cut, self.seat, self.tokenizer)

    def updates(self, step: int) -> Iterator[Update]:
        c = self.config
        if not (good := self.collect(step)):
            return
        scores, notes = self.judge.read(good, self.seat)
        if self.judge.lm is not None and (empty := sum(not has_steps(e, self.seat) for e in good)):
            self._metrics["answers_without_steps"] = empty
        answers = [e for e in good if self.has_reward(e)]
        rewards = {e.id: self.rewards_of(e, scores) for e in answers}
        credit = {"ppo": self.ppo, "grpo": self.grpo, "remax": self.remax}[c.algorithm]
        samples, losses = credit(step, answers, rewards)
        notes += annotate_turns(samples, good, self.seat, "advantage", f"{c.algorithm} of rewards at the ends of steps")
        if "critic" in losses:
            notes += annotate_turns(samples, good, self.seat, "value", "critic")
        self.run.annotate(step, notes)
        if not samples:
            return
        self._metrics |= summary_of_steps(samples, rewards)
        again: dict[str, Any] = {"passes": c.passes, "minibatches": c.minibatches, "seed": (c.seed, step)}
        for model, loss in losses.items():
            yield Update(samples, loss, model, name="" if model == "policy" else model, **again)

    # -- the algorithms: credit, and the loss of each trained model ---------------------------------------------------

    def ppo(self, step: int, answers: Sequence[Episode], rewards: StepRewardsOf) -> Credited:
        c, cut = self.config, {e.id: e.turns[-1].cut_off for e in answers}
        value = Readout("", "head", model="critic", head="value")
        samples = self.samples_of(
            answers, self.token_rewards(answers, rewards), value=value, after=dataclasses.replace(value, at="after")
        )
        losses = {"policy": Clipped(low=c.clip, high=c.clip), "critic": Value(clip=c.value_clip, scale=0.5)}
        return [ppo_credit(s, cut[s.episode], c.kl, c.gamma, c.lam) for s in samples], losses

    def grpo(self, step: int, answers: Sequence[Episode], rewards: StepRewardsOf) -> Credited:
        c = self.config
        compared = {e.id: judged_steps(e, self.seat, c.rewards, self.tokenizer) for e in answers}
        samples = self.samples_of(answers, against_group(answers, rewards, self.seat, c.rewards.at_end, compared))
        loss = Clipped(low=c.clip, high=c.clip, beta=c.kl, kl="k3", ref=self.ref)
        return [grpo_credit(s) for s in samples], {"policy": loss}

    def remax(self, step: int, answers: Sequence[Episode], rewards: StepRewardsOf) -> Credited:
        c = self.config
        greedy = self.greedy(step, answers) if answers else {}
        self._metrics["failed_greedy"] = len({e.group for e in answers} - greedy.keys())
        answers = [e for e in answers if e.group in greedy]
        samples = self.samples_of(answers, self.token_rewards(answers, rewards))
        return [remax_credit(s, greedy[s.group], c.kl, c.gamma) for s in samples], {"policy": WeightedLogp()}

    def greedy(self, step: int, answers: Sequence[Episode]) -> dict[str, float]:
        """By group: what the policy earns for the same start when it always takes the likeliest token."""
        c = self.config
        first = {e.group: e.task for e in answers}
        seats = [
            dataclasses.replace(s, law=dataclasses.replace(s.law, temperature=0.0)) if s.name == self.seat else s
            for s in self.opened.seats
        ]
        protocol = self.protocol(c, self.source)
        how = {"seed": c.seed, "prefix": f"{step}:greedy:", "failures": c.failures}
        played = [self.stored(e) for e in play(self.source, list(first.values()), seats, protocol, **how)]
        scores, _ = self.judge.read(played, self.seat)
        totals = [sum(float(r.sum()) for r in self.rewards_of(e, scores)) for e in played]
        valid = [not isinstance(e.outcome, Failed) and self.has_reward(e) for e in played]
        return {g: r for g, r, ok in zip(first, totals, valid, strict=True) if ok}

    # -- from answers to samples --------------------------------------------------------------------------------------

    def has_reward(self, e: Episode) -> bool:
        """Whether an answer has a reward. One without a step gives the reward model nothing to judge: it has the
        outcome's reward alone or, if outcomes have none, none at all, which is not 0."""
        return self.judge.lm is None or self.config.rewards.right is not None or has_steps(e, self.seat)

    def rewards_of(self, e: Episode, scores: Mapping[tuple[str, int], np.ndarray]) -> list[np.ndarray]:
        return turn_rewards(e, self.seat, scores, self.config.rewards, self.tokenizer)

    def token_rewards(self, answers: Sequence[Episode], rewards: StepRewardsOf) -> TokenRewards:
        return {e.id: on_tokens(e, rewards[e.id], self.seat, self.config.rewards.at_end) for e in answers}

    def samples_of(self, answers: Sequence[Episode], rewards: TokenRewards, **more: Readout) -> list[Sample]:
        """Samples with the rewards of their tokens (`reward`), and the log-probs of policy and reference."""
        drawn = build_samples(answers, self.seat, {"reward": rewards})  # type: ignore[dict-item]
        fills = {"old": Readout(""), "ref": Readout("", model=self.ref), **more}
        samples = self.learner.fill(drawn, **fills) if drawn else []
        self._metrics |= sampler_gap(drawn, samples)
        return samples


def critic_of(config: StepRlRecipe) -> CriticConfig:
    """The critic's section. Without a name it begins as the reward model, or else as the policy."""
    return config.critic.model_copy(update={"name": config.critic.name or config.rewards.model})


def ppo_credit(s: Sample, cut: bool, kl: float, gamma: float, lam: float) -> Sample:
    """r'_t = r_t - kl (log p - log ref), and generalised advantages of r' with the critic's V. `cut`: the answer was
    cut off, so it is worth what the critic says of its end."""
    on, st = s.streams["weight"] != 0, s.streams
    rewards = kl_shaped(st["reward"], st["old"], st["ref"], on, kl)[on]
    end = float(st["after"][on][-1]) if cut else 0.0
    advantage, target = gae(rewards, st["value"][on], gamma, lam, end)
    new = {"advantage": spread(advantage, on), "returns": spread(target, on), "old_value": st["value"]}
    mass = {**s.mass, "value_weight": s.mass["weight"]}
    return dataclasses.replace(s, streams={**st, **new, "value_weight": st["weight"]}, mass=mass)


def grpo_credit(s: Sample) -> Sample:
    """A_t: the sum of the rewards at or behind token t, each against all steps of the group (`against_group`)."""
    on = s.streams["weight"] != 0
    return _with_advantage(s, spread(discounted(s.streams["reward"][on], 1.0), on))


def remax_credit(s: Sample, greedy: float, kl: float, gamma: float) -> Sample:
    """A_t = gamma^(tokens still to come) (R - R of the greedy answer) - kl (log p - log ref)."""
    st, whole = s.streams, float(s.streams["reward"].sum())
    return _with_advantage(s, against_greedy(whole, greedy, st["old"], st["ref"], st["weight"] != 0, gamma, kl))


def _with_advantage(s: Sample, advantage: np.ndarray) -> Sample:
    return dataclasses.replace(s, streams={**s.streams, "advantage": advantage})


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


# --- rewards of steps -----------------------------------------------------------------------------------------------


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
    """The reward of each step of each turn of the seat. A turn that has no steps counts as one, which the reward model
    does not judge."""
    s, mine = settings, [i for i, t in enumerate(e.turns) if t.seat == seat and t.tokens]
    out = []
    for i in mine:
        spans = spans_of(e, i)
        scored = scores.get((e.id, i), np.zeros(len(spans)))
        types = step_types(e, i, tokenizer) if s.skip else [""] * len(spans)
        on = np.array([kind not in s.skip for kind in types])
        values = np.zeros(len(spans))
        values[on] = step_rewards(scored[on], s.running)  # a skipped step is in no sum, minimum or product
        last = None if s.right is None or i != mine[-1] else (s.right if won(e) else s.wrong)
        out.append(step_rewards(values, "none", s.alpha, last, s.clip))
    return out


def judged_steps(e: Episode, seat: str, settings: StepRewards, tokenizer: Any = None) -> list[np.ndarray]:
    """Which steps of each turn of the seat have a reward, be it 0: those that the reward model judges, and the last one
    for the outcome. A turn without steps has none that it judges: the 0 of such a turn is no judgement, and could be
    the best of its group."""
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


def on_tokens(e: Episode, rewards: Sequence[np.ndarray], seat: str, at_end: bool) -> list[np.ndarray]:
    """The rewards of steps on the tokens of each turn: at the last token of each step, and of the last one, with
    `at_end`, at the token that ends the turn."""
    mine = [i for i, t in enumerate(e.turns) if t.seat == seat and t.tokens]
    out = []
    for i, values in zip(mine, rewards, strict=True):
        spans, size = list(spans_of(e, i)), len(e.turns[i].tokens)
        if at_end:
            spans[-1] = (spans[-1][0], size)
        out.append(place(values, spans, size))
    return out


def against_group(
    answers: Sequence[Episode], rewards: StepRewardsOf, seat: str, at_end: bool, judged: Mapping[str, list[np.ndarray]]
) -> dict[str, list[np.ndarray]]:
    """The rewards of steps, each against all steps of its group that have a reward (`judged`), on their tokens. The
    others have 0."""
    on = [np.concatenate(judged[e.id]) for e in answers]
    flat = [np.concatenate(rewards[e.id]) for e in answers]
    normed = group_steps([r[m] for r, m in zip(flat, on)], [e.group for e in answers])
    out = {}
    for e, m, values in zip(answers, on, normed):
        cuts = np.cumsum([len(r) for r in rewards[e.id]])[:-1]
        out[e.id] = on_tokens(e, np.split(spread(values, m), cuts), seat, at_end)
    return out


def summary_of_steps(samples: Sequence[Sample], rewards: StepRewardsOf) -> dict[str, float]:
    """The rewards of steps, how many there were, and how far the policy is from the reference."""
    steps = np.concatenate([r for turns in rewards.values() for r in turns])
    gaps = [(s.streams["old"] - s.streams["ref"])[s.streams["weight"] != 0] for s in samples]
    return {
        "step_reward": float(steps.mean()),
        "steps_written": len(steps) / len(rewards),
        "answer_reward": float(np.mean([sum(float(r.sum()) for r in turns) for turns in rewards.values()])),
        "kl_reference": float(np.concatenate(gaps).mean()),
    }
