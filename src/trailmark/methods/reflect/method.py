"""Reflect-RL: a frozen reflector thinks in words, and a trained policy answers with one token.

The reflector learns from a teacher's reflections and is frozen after that. The policy learns from the teacher's
actions, and then from its own play. Each imitation stage is a run of its own. Play is the run itself, and `steps`
counts it:

    RUN/reflector    sft.reflector steps on reflections (0 if load.reflector gives one)
    RUN/policy       sft.policy steps on actions
    RUN              reinforcement learning: episodes, checkpoints with both players, evaluation

    play.py          prompts, labels, truncation, order of the players
    imitation.py     the players, their lessons, the stages of imitation
    this file        play: a replay memory of successes, a critic, the losses

The paper's equations, and where they are:

    R ~ R^(. | s), a ~ pi(. | s, R)             two players          `methods/reflect/play.py:two_players`
    -(1/N) sum_i sum_j log R^(R_ij | s_i, R_i,<j)  imitation, reflector `objectives/sft.py:Sft.terms`
    -(1/N) sum_i log pi(a_i | s_i, R_i)         imitation, policy    `objectives/sft.py:Sft.terms`
    G_t = sum_{k>=t} r_k                        return to go         `methods/reflect/method.py:returns_to_go`
    A = G - V, G - mean G, or G                 advantage            `methods/reflect/method.py:with_advantage`
    -(1/N) sum_n A_n log pi(a_n | prompt_n)     policy gradient, pg  `objectives/weighted_logp.py:WeightedLogp.terms`
    -(1/N) sum_n min(rho_n A_n, clip(rho_n, 1 - c, 1 + c) A_n)  ppo  `objectives/clipped.py:Clipped.terms`
    (V - G)^2                                   critic               `objectives/value.py:Value.terms`
    r_k, success                                reward               `tasks/taxi.py:TaxiWorld.step`
    where level i of a curriculum begins        curriculum           `methods/reflect/curriculum.py:level_starts`
    best action, at times a random one          data                 `methods/reflect/plays.py:_play`
    success rate                                evaluation           `methods/reflect/imitation.py:Players.evaluate`

There is no discount (G is the reference's cost to go with the opposite sign). N is the number of decisions in the
batch; for the reflector it is the number of trained tokens. Only answers are trained (`Players.sample`). A uses V if
there is a critic, and mean G of fresh plays with `baseline: batch`. rho = pi / pi_old; both are under the sampling law
that drew the label, so rho is exactly 1 in the first epoch. For replayed plays, pi_old is the probability at the time
of play.

What differs from the reference: the reflector learns to stop. Dropout is off in rollouts. Labels are the oracle's, not
those of the mostly random behaviour (`teacher.label`). Choices are restricted to the listed labels (`head`). States
that are too long lose their middle. The entropy of the label is a term of the loss with its own gradient and never part
of a return, so it changes no reported success. The critic reads the whole prompt (the reference's reads 20 tokens),
starts at V = 0 and regresses G, not G / 100. A curriculum always advances, also if there are fewer steps than records.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trailmark.config import ModelConfig
from trailmark.credit.turns import turn_returns
from trailmark.episodes import won
from trailmark.errors import RunError, TaskError
from trailmark.failures import must_be_answered
from trailmark.learn.learner import Learner, Update
from trailmark.learn.loop import Evaluation
from trailmark.learn.watch import spread, summary
from trailmark.memory import need_rows
from trailmark.methods.base import Method, ModelInMemory
from trailmark.methods.batches import Walk, how_long
from trailmark.methods.pipeline import training_stage
from trailmark.methods.reflect.config import ImitationRecipe, PlayersRecipe, ReflectRecipe, RlConfig
from trailmark.methods.reflect.critic import make_critic
from trailmark.methods.reflect.curriculum import level_starts
from trailmark.methods.reflect.imitation import (
    ImitationMethod,
    Players,
    always_reflecting,
    final_tasks,
    load_seat,
    seat_model,
    talk_of,
)
from trailmark.methods.reflect.play import two_players
from trailmark.models.readout import Readout
from trailmark.objectives.base import Objective
from trailmark.objectives.clipped import Clipped
from trailmark.objectives.value import Value
from trailmark.objectives.weighted_logp import WeightedLogp
from trailmark.rollout.play import play, play_starts, start_all
from trailmark.rollout.reference_players import oracle_player, random_player
from trailmark.runs.episode_json import from_json, to_json
from trailmark.runs.stages import Stage
from trailmark.runs.store import Run, read_segment, write_segment
from trailmark.samples import annotate_turns, build_samples, scored
from trailmark.seats.model_names import locate, newest_checkpoint
from trailmark.seats.open_seats import OpenSeats, stored_seats
from trailmark.seats.pinned_models import pin_models
from trailmark.tasks import get_task
from trailmark.tasks.base import TaskSource, has_oracle
from trailmark.types import Annotation, Episode, Sample


class ReflectMethod(Players):
    Config = ReflectRecipe
    staged = ("sft", "teacher")
    config: ReflectRecipe

    def __init__(self, config: ReflectRecipe, run: Run):
        need_rows(max(config.rl.prompts_per_step, config.sft.batch), "rl.prompts_per_step or sft.batch")
        super().__init__(taught(config, run.path), run)
        self.rows = self.walk(config, self.source)
        if self.rows is not None:
            config = config.model_copy(update={"steps": self.rows.steps(config.steps)})
        self.config = config
        rl, critic = config.rl, config.rl.critic
        passes = rl.epochs if rl.algorithm == "ppo" else 1
        updates = config.steps * (2 if rl.replay else 1)
        trains, ends = {"policy": config.learner.optim}, {"policy": updates * passes}
        if critic.kind != "none":
            own = (
                load_seat(taught(config, run.path), self.source, "policy", self.words)
                if critic.kind == "separate"
                else None
            )
            self.models["critic"] = make_critic(self.models["policy"], own, critic.head, config.model.seed)
            trains["critic"], ends["critic"] = critic.optim, updates // critic.every * critic.passes
        self.learner = Learner(self.models, config.learner, trains, ends)
        if config.reflect:
            self.learner.keeps = ("reflector",)
            self.frozen = self.models["reflector"].fingerprint()
        self.replay, self.level, self.updated = Replay(rl.replay), 0, 0
        self._metrics: dict[str, float] = {}

    @classmethod
    def walk(cls, config: ReflectRecipe, source: TaskSource) -> Walk | None:
        """A curriculum chooses the starts itself; epochs then count its steps."""
        if config.epochs is None and not (source.finite and config.curriculum.kind == "none"):
            return None
        return Walk(source, config.rl.prompts_per_step, config.seed, epochs=config.epochs)

    @classmethod
    def check(cls, config: ReflectRecipe) -> list[str]:
        taught = [f"{how_long(n, config.sft.epochs)} of the {seat}" for seat, n in imitated_steps(config).items()]
        played = f"{how_long(config.steps, config.epochs)} of play (`steps` counts play alone)"
        return [f"stages: {', '.join([*taught, played])}"]

    @classmethod
    def models_in_memory(cls, config: Any) -> list[ModelInMemory]:
        critic = config.rl.critic
        separate = ModelInMemory("critic", seat_model(config, "policy"), critic.optim, output=False)
        own = [separate] if critic.kind == "separate" else []
        return [*super().models_in_memory(config), *own]

    @classmethod
    def trainings(cls, config: ReflectRecipe) -> list[tuple[str, type[Method], Any]]:
        """The stages, and play. Each begins with the models of the recipe: what the stages before will make of them
        has the same shape."""
        none = config.sft.model_copy(update={"reflector": 0, "policy": 0})
        found: list[tuple[str, type[Method], Any]] = []
        for seat, steps in imitated_steps(config).items():
            alone = config.model_copy(update={"sft": none.model_copy(update={seat: steps})})
            inner = imitation(alone, Path(config.out), seat, steps)
            found.append((seat, ImitationMethod, inner))
        return [*found, *([("play", cls, config.model_copy(update={"sft": none}))] if config.steps else [])]

    # -- imitation ------------------------------------------------------------------------------------------------

    @classmethod
    def first_model(cls, config: ReflectRecipe, run: Run) -> ModelConfig:
        """The policy after imitation."""
        return seat_model(taught(config, run.path), "policy")

    @classmethod
    def stages(cls, config: ReflectRecipe, run: Run) -> list[Stage]:
        """Imitation: of the reflector, and of the policy, which hears it."""
        recipes = {seat: imitation(config, run.path, seat, n) for seat, n in imitated_steps(config).items()}
        return [training_stage(seat, recipe, run.path) for seat, recipe in recipes.items()]

    @classmethod
    def train(cls, config: ReflectRecipe, run: Run, resume: bool = False) -> dict[str, float]:
        if not resume:
            print("\n".join(cls.check(config)), file=sys.stderr)
        if (imitates := list(imitated_steps(config))) and not (run.path / "stages" / "used.json").exists():
            need_rows(max(config.rl.prompts_per_step, config.sft.batch), "rl.prompts_per_step or sft.batch")
            # Find mistakes in the settings of play before the first lesson is trained.
            Players(pin_models(config, run, write=False), run, imitates)
        return super().train(config, run, resume)

    # -- reinforcement --------------------------------------------------------------------------------------------

    def level_of(self, step: int) -> tuple[int, int]:
        """The level of a step (from 1), and the step after which the level began."""
        if self.config.curriculum.index is not None:
            return self.config.curriculum.index, 0
        begins = level_starts([level.size for level in self.levels], self.config.steps)
        k = max(i for i, first in enumerate(begins) if first < step)
        return k, begins[k]

    def updates(self, step: int) -> Iterator[Update]:
        """One update on what was just played, and one on some of the successes so far."""
        rl, good = self.config.rl, self.collect(step)
        samples = decisions(good, self.learner, rl, fresh=True)
        self.run.annotate(step, credit_notes(samples, good, rl))
        yield from self.learn(samples, fresh=True)
        self.replay.add(good)
        if again := self.replay.draw(rl.replay_batch, (self.config.seed, step)):
            yield from self.learn(decisions(again, self.learner, rl, fresh=False), fresh=False)

    def collect(self, step: int) -> list[Episode]:
        """Play the starts of a step and store the episodes. Returns those that were scored."""
        c, (level, first) = self.config, self.level_of(step)
        if level != self.level:
            self.level, self.replay.plays = level, []
        self.opened.publish(step - 1)
        if self.rows is not None and c.curriculum.kind == "none":
            tasks = self.rows.take(step)
        else:
            tasks = self.levels[level].batch(self.source, c.rl.prompts_per_step, c.seed, step, first)
        with self.collect_notes() as notes:
            how = {"seed": c.seed, "prefix": f"{step}:", "failures": c.failures}
            episodes = play(self.source, tasks, self.opened.seats, two_players(self.talk), **how)
        self.run.annotate(step, notes)
        write_segment(self.run.episodes_dir, step, episodes)
        good, dropped = scored(episodes)
        if not good:
            raise TaskError(
                f"step {step}: none of {len(episodes)} episodes was scored; the first: {episodes[0].outcome}"
            )
        at = {"stage": float(level)} if len(self.levels) > 1 else {}
        self._metrics = {**summary(good), **spread(good), **dropped, **at}
        return good

    def learn(self, samples: Sequence[Sample], fresh: bool) -> Iterator[Update]:
        """An update of the policy, and of the critic if it is due."""
        rl, critic = self.config.rl, self.config.rl.critic
        passes, name = rl.epochs if rl.algorithm == "ppo" else 1, "rl" if fresh else "replay"
        yield Update(samples, objective(rl, fresh), passes=passes, name=name)
        self.updated += 1
        if critic.kind != "none" and self.updated % critic.every == 0:
            yield Update(samples, Value(), "critic", passes=critic.passes, name="critic")  # (V - G)^2

    def metrics(self) -> Mapping[str, float]:
        return self._metrics

    def state(self) -> Mapping[str, Any]:
        return {"replay": [to_json(e) for e in self.replay.plays], "stage": self.level, "updated": self.updated}

    def load(self, state: Mapping[str, Any]) -> None:
        self.replay.plays = [from_json(line) for line in state["replay"]]
        self.level, self.updated = state["stage"], state["updated"]

    # -- evaluation -----------------------------------------------------------------------------------------------

    def evaluations(self, step: int, last: bool) -> list[Evaluation]:
        """The evaluations of the method's table: after imitation, and at the end (with untrained reference players if
        `final.references`)."""
        kind = "reflect-" if self.config.reflect else "plain-"
        if not last:
            due = step == 0 and imitated_steps(self.config)
            return [Evaluation(f"{kind}sft", partial(self.final, f"{kind}sft", 0))] if due else []
        out = [Evaluation(f"{kind}rl", partial(self.final, f"{kind}rl", step))] if step else []
        if self.config.final.references:
            tasks = final_tasks(self.config, self.source, self.levels)
            tokenizer, seed = self.models["policy"].tokenizer, self.config.seed + 1
            play = lambda player: lambda: self.answered(player(self.source, seed, tokenizer, tasks))
            out.append(Evaluation("random", play(random_player), moves=False))
            if has_oracle(self.source):
                out.append(Evaluation("oracle", play(oracle_player), moves=False))
        return out

    def final(self, name: str, step: int) -> list[Episode]:
        """Play the starts of the final evaluation."""
        if self.config.reflect and self.models["reflector"].fingerprint() != self.frozen:
            raise RunError("the reflector's weights have changed since imitation ended, but it must stay frozen")
        self.opened.publish(step)
        tasks = final_tasks(self.config, self.source, self.levels)
        starts = start_all(tasks, self.config.final.samples, self.config.seed + 1, f"{name}:")
        return self.answered(play_starts(self.source, starts, self.opened.seats, always_reflecting(self.talk)))

    def answered(self, played: list[Episode]) -> list[Episode]:
        must_be_answered(played, self.config.failures)
        return played


# --- the stages ----------------------------------------------------------------------------------------------------


def imitated_steps(config: ReflectRecipe) -> dict[str, int]:
    """The number of steps of each imitation stage, in order."""
    wanted = {"reflector": config.sft.reflector if config.reflect else 0, "policy": config.sft.policy}
    return {seat: n for seat, n in wanted.items() if n}


def taught(config: ReflectRecipe, run: Path) -> ReflectRecipe:
    """The recipe with the players that the imitation stages made."""
    made = {seat: locate(str(run / seat), seat).folder for seat in imitated_steps(config)}
    return config.model_copy(update={"load": config.load.model_copy(update=made)})


def imitation(config: ReflectRecipe, run: Path, seat: str, steps: int) -> ImitationRecipe:
    """The recipe of an imitation stage."""
    given: dict[str, Any] = {name: getattr(config, name) for name in PlayersRecipe.model_fields}
    taught = seat == "policy" and "reflector" in imitated_steps(config)
    before = {"reflector": str(run / "reflector")} if taught else {}
    given |= {
        "method": "reflect_imitation",
        "name": f"{config.name} {seat}",
        "out": str(run / seat),
        "seat": seat,
        "steps": steps,
        "batch": config.sft.batch,
        "epochs": config.sft.epochs,
        "learner": config.learner.model_copy(update={"optim": config.sft.optim}),
        "load": config.load.model_copy(update=before),
        "eval": config.eval.model_copy(update={"patience": None, **({"every": 0} if seat == "reflector" else {})}),
        "checkpoint": config.checkpoint.model_copy(update={"keep_best": 0}),
    }
    return ImitationRecipe(**given)


# --- from episodes to samples --------------------------------------------------------------------------------------


@dataclass
class Replay:
    """The last `size` successful plays. It is emptied when a new level begins."""

    size: int
    plays: list[Episode] = field(default_factory=list)

    def add(self, episodes: Sequence[Episode]) -> None:
        self.plays = [*self.plays, *filter(won, episodes)][-self.size :] if self.size else []

    def draw(self, n: int, seed: Sequence[int]) -> list[Episode]:
        """Draw `n` plays with replacement."""
        picks = np.random.default_rng(list(seed)).integers(0, len(self.plays), n) if self.plays else []
        return [self.plays[i] for i in picks]


def returns_to_go(episodes: Sequence[Episode]) -> dict[str, list[float]]:
    """G_t = sum_{k>=t} r_k at every decision of the policy."""
    return {e.id: list(turn_returns(e, "policy")) for e in episodes}


def decisions(episodes: Sequence[Episode], learner: Any, config: RlConfig, fresh: bool) -> list[Sample]:
    """One sample for each decision, with its advantage. `fresh` plays come from the current policy. Their old log-probs
    are computed in the packing that training uses, so that the first ratio is exactly 1."""
    samples = build_samples(episodes, "policy", {"returns": returns_to_go(episodes)})
    fills = {"old": Readout("")} if fresh and config.algorithm == "ppo" else {}
    if config.critic.kind != "none":
        fills["value"] = Readout("", "head", model="critic", head="value")
    samples = learner.fill(samples, **fills) if fills and samples else samples
    base = 0.0
    if config.baseline == "batch" and config.critic.kind == "none" and fresh:
        base = float(np.mean(np.concatenate([s.streams["returns"][s.streams["weight"] != 0] for s in samples])))
    return [with_advantage(s, base) for s in samples]


def with_advantage(s: Sample, base: float) -> Sample:
    """A = G - V, or G - `base`."""
    streams = dict(s.streams)
    value = streams.get("value", base)
    streams["advantage"] = (streams["returns"] - value) * (streams["weight"] != 0)
    streams["value_weight"] = streams["weight"]
    return dataclasses.replace(s, streams=streams, mass={**s.mass, "value_weight": s.mass["weight"]})


def credit_notes(samples: Sequence[Sample], episodes: Sequence[Episode], config: RlConfig) -> list[Annotation]:
    """Annotations with the advantages that fresh plays are trained with, and with the critic's values if there is
    one."""
    if config.critic.kind == "none":
        less = "" if config.baseline == "none" else ", less the mean of the batch"
        return annotate_turns(samples, episodes, "policy", "advantage", f"return to go{less}")
    notes = annotate_turns(samples, episodes, "policy", "advantage", "return to go, less the critic's value")
    return [*notes, *annotate_turns(samples, episodes, "policy", "value", f"{config.critic.kind} critic")]


def objective(config: RlConfig, fresh: bool) -> Objective:
    """The loss. Replayed plays have no entropy term, because the current policy did not write them."""
    entropy = config.entropy if fresh else 0.0
    if config.algorithm == "pg":  # -(1/N) sum_n A_n log pi(a_n | prompt_n)
        return WeightedLogp(entropy=entropy, gap=fresh)
    # -(1/N) sum_n min(rho_n A_n, clip(rho_n, 1 - c, 1 + c) A_n)
    return Clipped(low=config.clip, high=config.clip, entropy=entropy)


# --- the effect of reflections --------------------------------------------------------------------------------------


def evaluate_advice(run: Run, config: ReflectRecipe, seed: int) -> None:
    """Measure what the reflections are worth: play the trained pair of a run (its last checkpoint) without reflections,
    and with reflections of other states. The reflector is the saved one; no teacher is involved."""
    source = get_task(config.task.name, **config.task.options)
    opened = OpenSeats(stored_seats(ReflectMethod.seats_of(config), newest_checkpoint(run.path), config.model))
    opened.bind(source)
    seats = opened.seats
    talk = dataclasses.replace(talk_of(config, source, seats[0].engine.tokenizer), share=1.0)
    final = read_segment(run.path / "evaluation" / "reflect-rl.jsonl")
    reflections = sorted({t.text for e in final for t in e.turns if t.seat == "reflector"})

    def other(state: str, thought: str) -> str:
        number = int.from_bytes(hashlib.blake2b(state.encode(), digest_size=4).digest(), "little")
        return reflections[number % len(reflections)]

    for name, advice in (("on", None), ("shuffled", other), ("off", lambda state, thought: "")):
        starts = start_all(source.tasks("all"), 1, seed + 1, f"advice-{name}:")
        run.keep_evaluation(f"advice-{name}", play_starts(source, starts, seats, two_players(talk, advice)))
