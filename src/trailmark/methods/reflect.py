"""Reflect-RL: a frozen reflector thinks in words, a trained policy answers with one token.

The reflector learns from a teacher's reflections and is then never touched again; the policy learns from the teacher's actions
and after that from its own play. Stages of one run, in steps: `sft.reflector` steps on reflections, `sft.policy` steps on
actions, then reinforcement learning until `steps`. Either player may come from an earlier run (`load`).

    reflect_play.py   prompts, labels, truncation, who speaks when
    reflect_rl.py     curriculum, replay, critic, losses
    here              the recipe, and one run from lessons to the last evaluation

What differs from the reference: the reflector learns to stop; dropout is off in rollouts; labels are the oracle's, not the
mostly random behaviour's (`teacher.label`); choices are restricted to the listed labels (`head`); what is too long is cut in the
middle; the two other files say what differs in theirs.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

from trailmark.config import ModelConfig, SamplingConfig
from trailmark.data.lessons import Lesson, get_teacher
from trailmark.engines.local import LocalEngine, local_engine
from trailmark.errors import RecipeError, RunError, TaskError
from trailmark.learn.learner import Learner, Update
from trailmark.learn.loop import Evaluation
from trailmark.learn.watch import spread, summary
from trailmark.memory import need_rows
from trailmark.methods.base import Method
from trailmark.methods.configs import ReflectRecipe
from trailmark.methods.contract import Room, check_lessons, check_menus
from trailmark.methods.reflect_play import (
    ACTION,
    ANALYZE,
    Talk,
    coin,
    has_oracle,
    label_alphabet,
    label_words,
    menu_labels,
    oracle_player,
    random_player,
    shuffled_menu,
    two_players,
)
from trailmark.methods.reflect_rl import (
    Part,
    Replay,
    Stage,
    credit_notes,
    decisions,
    make_critic,
    make_stages,
    objective,
    stage_starts,
    starts_of,
)
from trailmark.methods.sft import batch_rows
from trailmark.models.lm import LM
from trailmark.models.load import load_model
from trailmark.objectives import Sft, Value
from trailmark.rollout.bos import prompt_ids
from trailmark.rollout.encode import encode
from trailmark.rollout.play import Desk, Protocol, Seat, label_ids, play, play_all, start_all, stop_ids
from trailmark.run_async import wait
from trailmark.runs.episode_json import from_json, to_json
from trailmark.runs.store import Run, read_segment, write_segment
from trailmark.samples import scored
from trailmark.seats.config import AnyKind, LocalSeat, filled
from trailmark.seats.locate import newest_checkpoint, stored_model
from trailmark.seats.table import Table, stored_seats
from trailmark.tasks import get_task, keep_judge
from trailmark.tasks.base import TaskSource, bind
from trailmark.tasks.labels import add_labels
from trailmark.types import Episode, Sample, SamplingLaw, Task

__all__ = ["ACTION", "ANALYZE", "ReflectMethod", "ReflectRecipe", "evaluate_advice", "random_player",
           "two_players"]  # fmt: skip


class ReflectMethod(Method):
    Config = ReflectRecipe

    def __init__(self, config: ReflectRecipe, run: Run):
        super().__init__(config, run)
        need_rows(max(config.sft.batch, config.rl.starts, config.teacher.starts), "sft.batch, rl.starts or teacher.starts")
        self.source = get_task(config.task.name, **config.task.options)
        keep_judge(self.source, run.path)
        teacher = get_teacher(config.teacher.name, config.teacher.path)
        words = [ANALYZE, ACTION, *teacher.words, *label_words(self.source)]
        models = {"policy": load_seat(config, self.source, "policy", words)}
        bind(self.source, models["policy"].tokenizer)
        trains = {"policy": config.learner.optim.model_copy(update={"lr": config.sft.lr})}
        if config.reflect:
            models["reflector"] = load_seat(config, self.source, "reflector", words)
            trains["reflector"] = trains["policy"]
        self.engines = {n: local_engine(lm, config.engine) for n, lm in models.items()}
        critic = config.rl.critic
        if critic.kind != "none":
            own = load_seat(config, self.source, "policy", words) if critic.kind == "separate" else None
            models["critic"] = make_critic(critic, models["policy"], own, config.model.seed)
            trains["critic"] = config.learner.optim.model_copy(update={"lr": critic.lr})
        self.learner = Learner(models, config.learner, trains, config.steps)
        self.talk = talk_of(config, self.source, models["policy"].tokenizer)
        self.curriculum = make_stages(config.curriculum, self.source)
        self.lessons: list[Lesson] = []
        if config.sft.policy or self.ends[0]:
            t = config.teacher
            each = config.curriculum.kind == "modes" and t.name != "file"  # a file has its own starts, of whatever mode
            shown = [Part(self.source, s) for s in self.curriculum] if each else [self.source]
            self.lessons = [x for part in shown for x in teacher.lessons(part, t.starts, t.perturb, config.seed)]
            if not self.lessons:
                raise RecipeError(
                    f"teacher '{t.name}' has no lessons for this recipe: look at teacher.path and perturb"
                )
            if config.sft.policy:
                check_labels(self.lessons, config, models["policy"].tokenizer)
        final_tasks(config, self.source, self.curriculum)  # starts that are not there are missed now, not after hours
        if config.eval.every:
            starts_of(self.curriculum, self.source, config.eval.split, config.eval.n, config.seed)
        self.check_room()
        if config.curriculum.index is not None and config.curriculum.index >= len(self.curriculum):
            raise RecipeError(f"curriculum.index is {config.curriculum.index}, and there are {len(self.curriculum)} stages")
        self.replay, self.stage, self.updated = Replay(config.rl.replay), 0, 0
        self._metrics: dict[str, float] = {}
        self.frozen = ""  # the reflector's weights when its lessons were over
        if config.reflect and not self.ends[0]:
            self.frozen = models["reflector"].fingerprint()

    def check_room(self) -> None:
        """Nothing of a lesson is cut, and every list of actions fits: else the recipe is refused, before its first step."""
        c, policy = self.config, self.learner.models["policy"]
        made = c.model.shape is not None and not c.load.policy
        room = Room(self.engines["policy"].max_len, c.engine.max_len, policy.context, made)
        taught = {"reflector": self.ends[0], "policy": c.sft.policy}
        if imitates := [name for name, steps in taught.items() if steps]:
            tokenizers = {name: self.learner.models[name].tokenizer for name in self.engines}
            check_lessons(self.lessons, self.talk, tokenizers, room, imitates)
        if self.source.markov or hasattr(self.source, "menus"):
            check_menus(self.source, c.eval.split, self.talk, policy.tokenizer, room)

    @property
    def ends(self) -> tuple[int, int]:
        """The last step of the reflector's imitation and of the policy's."""
        first = self.config.sft.reflector if self.config.reflect else 0
        return first, first + self.config.sft.policy

    def seats(self) -> list[Seat]:
        return [_seat(n, e, self.config) for n, e in self.engines.items()]

    def publish(self, version: int) -> None:
        for name, engine in self.engines.items():
            engine.publish(version, self.learner.models[name])

    def updates(self, step: int) -> Iterator[Update]:
        self._metrics = {}
        thinks, imitates = self.ends
        if step <= imitates:
            yield self.imitate(step)
            if step == thinks:  # the learner has made the update by now
                self.frozen = self.learner.models["reflector"].fingerprint()
        else:
            yield from self.reinforce(step, step - imitates)

    # -- imitation ------------------------------------------------------------------------------------------------

    def imitate(self, step: int) -> Update:
        c, (thinks, _) = self.config, self.ends
        which = "reflector" if step <= thinks else "policy"
        rows = batch_rows(len(self.lessons), c.sft.batch, step if step <= thinks else step - thinks, c.seed)
        samples = [self.sample(self.lessons[r], which, f"{step} {k}") for k, r in enumerate(rows)]
        return Update(samples, Sft(model=which), which, name=which, lr=c.sft.lr)

    def sample(self, lesson: Lesson, which: str, place: str) -> Sample:
        """One lesson as a sample of the reflector or of the policy, in the words that play would use; `place` names where it
        stands in the run."""
        tokenizer, limit = self.learner.models[which].tokenizer, self.engines[which].max_len
        if which == "reflector":
            prompt = prompt_ids(tokenizer, self.talk.reflector_prompt(tokenizer, lesson.state, limit))
            answer = [*encode(tokenizer, lesson.reflection), *stop_ids(tokenizer)[:1]]
        else:
            heard = lesson.reflection if coin(f"{self.config.seed} {place}", self.config.reflect_prob) else ""
            wanted, labels = imitated(lesson, self.config), lesson.labels or menu_labels(lesson.menu)
            menu, new = shuffled_menu(self.talk, lesson.menu, labels, f"labels {self.config.seed} {place}")
            thought = heard if self.config.reflect else None
            prompt = prompt_ids(tokenizer, self.talk.policy_prompt(tokenizer, lesson.state, thought, menu, limit))
            answer = label_ids(tokenizer, (new.get(wanted, wanted),))
        weight = np.r_[np.zeros(len(prompt)), np.ones(len(answer))]
        return Sample(np.array([*prompt, *answer]), {"weight": weight}, {"weight": float(len(answer))})

    # -- reinforcement --------------------------------------------------------------------------------------------

    def stage_of(self, local: int) -> tuple[int, int]:
        """The stage of RL step `local` (from 1), and after which RL step it began."""
        if self.config.curriculum.index is not None:
            return self.config.curriculum.index, 0
        begins = stage_starts([s.size for s in self.curriculum], self.config.steps - self.ends[1])
        k = max(i for i, first in enumerate(begins) if first < local)
        return k, begins[k]

    def reinforce(self, step: int, local: int) -> Iterator[Update]:
        c, (stage, first) = self.config, self.stage_of(local)
        if stage != self.stage:
            self.stage, self.replay.held = stage, []
        self.publish(step - 1)
        tasks = self.curriculum[stage].batch(self.source, c.rl.starts, c.seed, step, self.ends[1] + first)
        episodes = play(self.source, tasks, self.seats(), two_players(self.talk), seed=c.seed, prefix=f"{step}:")
        write_segment(self.run.episodes_dir, step, episodes)
        good, dropped = scored(episodes)
        if not good:
            raise TaskError(
                f"step {step}: none of {len(episodes)} episodes was scored; the first: {episodes[0].outcome}"
            )
        self._metrics = {**summary(good), **spread(good), **dropped, **({"stage": float(stage)} if len(self.curriculum) > 1 else {})}
        samples = decisions(good, self.learner, c.rl, fresh=True)
        self.run.annotate(step, credit_notes(samples, good, c.rl))
        passes = c.rl.epochs if c.rl.algorithm == "ppo" else 1
        yield Update(samples, objective(c.rl, fresh=True), passes=passes, name="rl", lr=c.rl.lr)
        yield from self.judge(samples)
        self.replay.add(good)
        if again := self.replay.draw(c.rl.replay_batch, (c.seed, step)):
            old = decisions(again, self.learner, c.rl, fresh=False)
            yield Update(old, objective(c.rl, fresh=False), passes=passes, name="replay", lr=c.rl.lr)
            yield from self.judge(samples)

    def judge(self, samples: Sequence[Sample]) -> Iterator[Update]:
        """After a policy update: where it is the critic's turn, regress it on the newest returns."""
        critic = self.config.rl.critic
        self.updated += 1
        if critic.kind != "none" and self.updated % critic.every == 0:
            yield Update(samples, Value(), "critic", passes=critic.passes, name="critic", lr=critic.lr)

    def metrics(self) -> Mapping[str, float]:
        return self._metrics

    # -- evaluation -----------------------------------------------------------------------------------------------

    def evaluations(self, step: int, last: bool) -> list[Evaluation]:
        """The numbers of the method's table: after imitation, and at the end (with whom nobody trained, if `final.references`)."""
        kind, imitates = "reflect-" if self.config.reflect else "plain-", self.ends[1]
        if not last:
            return [Evaluation(f"{kind}sft", partial(self.final, f"{kind}sft", step))] if step == imitates else []
        out = [Evaluation(f"{kind}rl", partial(self.final, f"{kind}rl", step))] if step > imitates else []
        if self.config.final.references:
            tasks, tokenizer = self.final_tasks(), self.learner.models["policy"].tokenizer
            play = lambda player: lambda: player(self.source, self.config.seed + 1, tokenizer, tasks)
            out.append(Evaluation("random", play(random_player), moves=False))
            if has_oracle(self.source):
                out.append(Evaluation("oracle", play(oracle_player), moves=False))
        return out

    def final_tasks(self) -> list[Task]:
        return final_tasks(self.config, self.source, self.curriculum)

    def final(self, name: str, step: int) -> list[Episode]:
        """Play the final starts."""
        if self.frozen and self.learner.models["reflector"].fingerprint() != self.frozen:
            raise RunError("the reflector's weights have changed since its lessons ended: it must stay frozen")
        self.publish(step)
        starts = start_all(self.final_tasks(), self.config.final.samples, self.config.seed + 1, f"{name}:")
        return wait(play_all(self.source, starts, self.seats(), deaf_to_chance(self.talk)))

    def evaluate(self, step: int) -> Mapping[str, float]:
        self.publish(step)
        c = self.config
        tasks = starts_of(self.curriculum, self.source, c.eval.split, c.eval.n, c.seed)
        protocol = deaf_to_chance(self.talk)
        episodes = play(self.source, tasks, self.seats(), protocol, seed=c.seed + 1, prefix="eval:")
        write_segment(self.run.path / "evaluation", step, episodes)
        good, dropped = scored(episodes)
        parts = {s.name: [e for e in good if e.task.meta.get("stage") == s.name] for s in self.curriculum if s.name}
        each = {f"{k}/{name}": v for name, part in parts.items() for k, v in summary(part).items() if k == "success"}
        return {**summary(good), **each, **dropped}

    def state(self) -> Mapping[str, Any]:
        return {"replay": [to_json(e) for e in self.replay.held], "frozen": self.frozen, "stage": self.stage,
                "updated": self.updated}  # fmt: skip

    def load(self, state: Mapping[str, Any]) -> None:
        self.replay.held = [from_json(line) for line in state["replay"]]
        self.frozen, self.stage, self.updated = state["frozen"], state["stage"], state["updated"]

    # -- about a run ----------------------------------------------------------------------------------------------

    @classmethod
    def seats_of(cls, config: ReflectRecipe) -> dict[str, AnyKind]:
        """The reflector is frozen in play, and lies in every checkpoint."""
        seats: dict[str, AnyKind] = {"policy": LocalSeat(trained=True, sampling=SamplingConfig(max_tokens=1))}
        if config.reflect:
            thinks = SamplingConfig(max_tokens=config.thought)
            seats["reflector"] = LocalSeat(model=seat_model(config, "reflector"), sampling=thinks)
        return filled(seats, None, config.engine)

    @classmethod
    def protocol(cls, config: ReflectRecipe, source: TaskSource) -> Protocol:
        """The labels are those of the tokenizer at the desk."""

        async def as_in_training(desk: Desk) -> None:
            await two_players(talk_of(config, source, desk.seats["policy"].engine.tokenizer))(desk)

        return as_in_training

    @classmethod
    def evaluation_protocol(cls, config: ReflectRecipe, source: TaskSource) -> Protocol:
        """Every decision hears the reflector."""

        async def hears_all(desk: Desk) -> None:
            await deaf_to_chance(talk_of(config, source, desk.seats["policy"].engine.tokenizer))(desk)

        return hears_all

    @classmethod
    def starts(cls, config: ReflectRecipe, source: TaskSource, split: str, n: int | None, seed: int) -> list[Task]:
        """`n` starts of each stage of the curriculum."""
        return starts_of(make_stages(config.curriculum, source), source, split, n, seed)


# --- pieces that evaluation and replay share with the run ----------------------------------------------------------


def players_of(config: ReflectRecipe) -> tuple[Literal["policy", "reflector"], ...]:
    return ("policy", "reflector") if config.reflect else ("policy",)


def load_seat(config: ReflectRecipe, source: Any, seat: Literal["policy", "reflector"], words: Sequence[str]) -> LM:
    """The model of a player. With `labels: all`, worlds that list many actions get those labels that it lacks."""
    lm = load_model(seat_model(config, seat), words)
    if config.labels == "all" and hasattr(source, "bind"):
        add_labels(lm, seed=config.model.seed)
    return lm


def imitated(lesson: Lesson, config: ReflectRecipe) -> str:
    return lesson.oracle if config.teacher.label == "oracle" else lesson.action


def check_labels(lessons: Sequence[Lesson], config: ReflectRecipe, tokenizer: Any) -> None:
    """Labels that lessons are answered with must be single tokens: the imitated ones, or any of a menu that is permuted. Those
    drawn anew from the alphabet are."""
    if config.shuffle == "alphabet":
        return
    answers = {imitated(x, config) for x in lessons}
    if config.shuffle == "permute":
        answers |= {label for x in lessons for label in x.labels or menu_labels(x.menu)}
    for label in sorted(answers):
        if (size := len(encode(tokenizer, label))) != 1:
            raise RecipeError(
                f"the lessons answer with label '{label}', which is {size} tokens of this model: make them with `trailmark data … "
                "--tokenizer`, or set labels: all (new tokens) or shuffle: alphabet (labels drawn anew)"
            )


def seat_model(config: ReflectRecipe, seat: Literal["policy", "reflector"]) -> ModelConfig:
    """The model section of a player: made (each with a seed of its own), or from an earlier run."""
    folder = getattr(config.load, seat)
    if folder is not None:
        return stored_model(config.model, folder)
    return config.model.model_copy(update={"seed": config.model.seed + (seat == "reflector")})


def talk_of(config: ReflectRecipe, source: Any, tokenizer: Any) -> Talk:
    """How the players of a run talk."""
    draws = config.head == "alphabet" or config.shuffle == "alphabet"
    known = label_alphabet(source, tokenizer) if draws else ()
    return Talk(config.reflect, config.head, config.shuffle, config.reflect_prob, known, None, config.thought,
                config.instruction)  # fmt: skip


def deaf_to_chance(talk: Talk) -> Protocol:
    """As in training, but every decision hears the reflector."""
    return two_players(dataclasses.replace(talk, share=1.0))


def final_tasks(config: ReflectRecipe, source: Any, stages: Sequence[Stage]) -> list[Task]:
    final = config.final
    if final.split is not None:
        return starts_of(stages, source, final.split, final.n, config.seed)
    try:
        return starts_of(stages, source, "all", final.n, 0)
    except TaskError:
        return starts_of(stages, source, config.eval.split, final.n or config.eval.n, config.seed)


def _seat(name: str, engine: LocalEngine, config: ReflectRecipe, law: SamplingLaw = SamplingLaw()) -> Seat:
    trained = name == "policy"
    return Seat(name, engine, law, 1 if trained else config.thought, kind="trained" if trained else "frozen")


def evaluate_advice(run: Run, config: ReflectRecipe, seed: int) -> None:
    """The trained pair of a run, loaded from its last checkpoint, with its reflections withheld and with those of other
    states: what are the words worth? No teacher is behind it: the reflector is the one that was saved."""
    source = get_task(config.task.name, **config.task.options)
    table = Table(stored_seats(ReflectMethod.seats_of(config), newest_checkpoint(run.path), config.model))
    table.bind(source)
    seats = table.seats
    talk = dataclasses.replace(talk_of(config, source, seats[0].engine.tokenizer), share=1.0)
    final = read_segment(run.path / "evaluation" / "reflect-rl.jsonl")
    said = sorted({t.text for e in final for t in e.turns if t.seat == "reflector"})

    def other(state: str, thought: str) -> str:
        return said[int.from_bytes(hashlib.blake2b(state.encode(), digest_size=4).digest(), "little") % len(said)]

    for name, advice in (("on", None), ("shuffled", other), ("off", lambda state, thought: "")):
        starts = start_all(source.tasks("all"), 1, seed + 1, f"advice-{name}:")
        run.keep_evaluation(f"advice-{name}", wait(play_all(source, starts, seats, two_players(talk, advice))))
