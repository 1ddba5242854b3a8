"""Reflect-RL: a frozen reflector thinks in words, a trained policy answers with one token.

The reflector learns from a teacher's reflections and is then never touched again; the policy learns from the teacher's actions
and after that from its own play. Stages of one run, in steps: `sft.reflector` steps on reflections, `sft.policy` steps on
actions, then reinforcement learning until `steps`.

Prompts, with the world's text as `state` and the list of actions as `menu`:

    reflector   state + " # Analyze:\\n"                                      -> reflection, until its end of text
    policy      state + " # Analyze:\\n" + reflection + menu + " # Action:\\n"  -> one label
    without     state + menu + " # Action:\\n"                                -> one label

What differs from the reference: the reflector learns to stop; dropout is off in rollouts; labels are the oracle's, not the
mostly random behaviour's (`teacher.label`); choices are restricted to the listed labels (`restrict`); the mean is over decisions.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from trailmark.config import Config as Section
from trailmark.config import EngineConfig, RunConfig
from trailmark.credit import discounted
from trailmark.engines.local import LocalEngine
from trailmark.engines.scripted import ScriptedEngine
from trailmark.errors import RecipeError, RunError
from trailmark.learn.checkpoint import listed
from trailmark.learn.learner import Learner, Update
from trailmark.learn.loop import Plain, train
from trailmark.lines import from_json, to_json
from trailmark.methods.online import TaskConfig, summary
from trailmark.methods.sft import batch_rows
from trailmark.methods.teachers import Lesson, get_teacher
from trailmark.models.load import load_model
from trailmark.objectives import Sft, WeightedLogp
from trailmark.rollout.play import Desk, Protocol, Seat, play, play_all, start_all, stop_ids
from trailmark.samples import build_samples, scored
from trailmark.store import Run, atomic_write, read_segment, write_segment
from trailmark.tasks import get_task
from trailmark.tasks.base import draw_tasks
from trailmark.types import Episode, Sample, SamplingLaw, Scored

ANALYZE, ACTION = " # Analyze:\n", " # Action:\n"


class TeacherConfig(Section):
    name: str = Field("bfs", description="who writes reflections and actions: 'bfs' knows the taxi's shortest way")
    starts: PositiveInt = Field(40, description="starts that the teacher shows")
    perturb: float = Field(
        0.5, ge=0, le=1, description="share of random moves on the way, so that it also shows recovery"
    )
    label: Literal["oracle", "behaviour"] = Field("oracle", description="which action is imitated")


class SftConfig(Section):
    reflector: NonNegativeInt = Field(200, description="steps on reflections")
    policy: NonNegativeInt = Field(100, description="steps on actions")
    batch: PositiveInt = Field(32, description="lessons in one step")
    lr: float = Field(2e-3, gt=0, description="learning rate")


class RlConfig(Section):
    starts: PositiveInt = Field(32, description="episodes of one step")
    lr: float = Field(5e-4, gt=0, description="learning rate")
    entropy: float = Field(0.0, ge=0, description="weight of the entropy of the label")
    baseline: Literal["none", "batch"] = Field(
        "none", description="what is taken off the return: nothing, or the mean of the batch"
    )
    replay: NonNegativeInt = Field(50, description="successes remembered; 0: no replay")
    replay_batch: PositiveInt = Field(16, description="of them in one step")


class Config(RunConfig):
    task: TaskConfig = Field(TaskConfig(), description="the world")
    reflect: bool = Field(True, description="with the reflector; false: the policy alone")
    teacher: TeacherConfig = Field(TeacherConfig(), description="who shows how")
    sft: SftConfig = Field(SftConfig(), description="imitation")
    rl: RlConfig = Field(RlConfig(), description="reinforcement")
    restrict: bool = Field(True, description="only listed labels can be chosen")
    reflect_prob: float = Field(
        1.0, ge=0, le=1, description="share of decisions in training that hear the reflector; the others hear nothing"
    )
    thought: PositiveInt = Field(32, description="most tokens of a reflection")
    engine: EngineConfig = Field(EngineConfig(), description="who writes the tokens")

    @model_validator(mode="after")
    def _stages(self) -> Config:
        if self.steps < self.sft.policy + (self.sft.reflector if self.reflect else 0):
            raise ValueError("steps must cover the imitation stages sft.reflector and sft.policy")
        return self


def coin(name: str, share: float) -> bool:
    """Heads with probability `share`, the same for the same name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little") < share * 2**32


def two_players(
    reflect: bool, restrict: bool = True, advice: Callable[[str, str], str] | None = None, share: float = 1.0
) -> Protocol:
    """Who speaks when: the reflector, then the policy, then the world. `advice(state, reflection)` puts other words in the
    reflection's place, to measure what the words are worth."""

    async def protocol(desk: Desk) -> None:
        while not desk.over:
            seen = desk.observation
            text = seen.state
            if reflect:
                thought = ""
                if share == 1 or coin(f"{desk.start.seed} {desk.start.id} {len(desk.turns)}", share):
                    thought = (await desk.ask("reflector", text=seen.state + ANALYZE)).text.split(ACTION.strip())[0]
                text += ANALYZE + (thought if advice is None else advice(seen.state, thought))
            turn = await desk.ask(
                "policy", text=text + seen.menu + ACTION, allowed=seen.labels if restrict else None, max_tokens=1
            )
            await desk.act(turn.text)

    return protocol


class ReflectMethod(Plain):
    def __init__(self, config: Config, run: Run):
        self.config, self.run = config, run
        self.source = get_task(config.task.name, **config.task.options)
        teacher = get_teacher(config.teacher.name)
        self.lessons: list[Lesson] = teacher.lessons(
            self.source, config.teacher.starts, config.teacher.perturb, config.seed
        )
        words = [ANALYZE, ACTION, *teacher.words]
        models = {"policy": load_model(config.model, words)}
        trains = {"policy": config.learner.optim.model_copy(update={"lr": config.sft.lr})}
        if config.reflect:
            models["reflector"] = load_model(config.model.model_copy(update={"seed": config.model.seed + 1}), words)
            trains["reflector"] = trains["policy"]
        self.learner = Learner(models, config.learner, trains, config.steps)
        self.engines = {
            n: LocalEngine(lm, config.engine.slots, config.engine.max_len, config.engine.fixed)
            for n, lm in models.items()
        }
        self.replay: list[Episode] = []
        self._metrics: dict[str, float] = {}
        self.frozen = ""  # the reflector's weights when its lessons were over
        self.pending: Callable[[], None] | None = None

    @property
    def stages(self) -> tuple[int, int]:
        """The last step of the reflector's imitation and of the policy's."""
        first = self.config.sft.reflector if self.config.reflect else 0
        return first, first + self.config.sft.policy

    def seats(self) -> list[Seat]:
        kinds: dict[str, Any] = {"policy": "trained", "reflector": "frozen"}
        budget = {"policy": 1, "reflector": self.config.thought}
        return [Seat(n, e, SamplingLaw(), budget[n], kind=kinds[n]) for n, e in self.engines.items()]

    def updates(self, step: int) -> Iterator[Update]:
        c, (thinks, imitates) = self.config, self.stages
        self._metrics = {}
        if step <= imitates:
            which = "reflector" if step <= thinks else "policy"
            local = step if step <= thinks else step - thinks
            rows = batch_rows(len(self.lessons), c.sft.batch, local, c.seed)
            yield Update(
                [self.sample(self.lessons[r], which, f"{step} {k}") for k, r in enumerate(rows)],
                Sft(model=which),
                which,
                name=which,
                lr=c.sft.lr,
            )
            if step == thinks and c.reflect:
                self.pending = lambda: setattr(self, "frozen", self.learner.models["reflector"].fingerprint())
            if step == imitates:
                self.pending = lambda: self.mark("sft", step)
            return
        for engine in self.engines.values():
            engine.publish(step - 1)
        tasks = draw_tasks(self.source, "train", c.rl.starts, c.seed * 1_000_003 + step)
        episodes = play(
            self.source,
            tasks,
            self.seats(),
            two_players(c.reflect, c.restrict, share=c.reflect_prob),
            seed=c.seed,
            prefix=f"{step}:",
        )
        write_segment(self.run.episodes_dir, step, episodes)
        good, dropped = scored(episodes)
        self._metrics = {**summary(good), **dropped}
        objective = WeightedLogp(entropy=c.rl.entropy)
        yield Update(
            build_samples(good, "policy", {"advantage": self.advantages(good)}), objective, name="rl", lr=c.rl.lr
        )
        won = [e for e in good if isinstance(e.outcome, Scored) and e.outcome.success]
        self.replay = [*self.replay, *won][-c.rl.replay :] if c.rl.replay else []
        if self.replay:
            draw = np.random.default_rng([c.seed, step])
            again = [self.replay[i] for i in draw.integers(0, len(self.replay), c.rl.replay_batch)]
            values = {e.id: list(discounted([t.reward for t in e.turns if t.seat == "policy"], 1.0)) for e in again}
            yield Update(
                build_samples(again, "policy", {"advantage": values}), WeightedLogp(), name="replay", lr=c.rl.lr
            )
        if step == c.steps:
            self.pending = lambda: self.mark("rl", step)

    def sample(self, lesson: Lesson, which: str, place: str) -> Sample:
        """One lesson as a sample of the reflector or of the policy; `place` names where it stands in the run."""
        tokenizer = self.learner.models[which].tokenizer
        encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
        if which == "reflector":
            prompt, answer = encode(lesson.state + ANALYZE), [*encode(lesson.reflection), *stop_ids(tokenizer)[:1]]
        else:
            heard = lesson.reflection if coin(f"{self.config.seed} {place}", self.config.reflect_prob) else ""
            thought = ANALYZE + heard if self.config.reflect else ""
            wanted = lesson.oracle if self.config.teacher.label == "oracle" else lesson.action
            prompt, answer = encode(lesson.state + thought + lesson.menu + ACTION), encode(wanted)
        weight = np.r_[np.zeros(len(prompt)), np.ones(len(answer))]
        return Sample(np.array([*prompt, *answer]), {"weight": weight}, {"weight": float(len(answer))})

    def advantages(self, episodes: Sequence[Episode]) -> dict[str, list[float]]:
        """Undiscounted return to go of every decision (the reference's cost to go, with the other sign)."""
        returns = {e.id: discounted([t.reward for t in e.turns if t.seat == "policy"], 1.0) for e in episodes}
        base = float(np.mean(np.concatenate(list(returns.values())))) if self.config.rl.baseline == "batch" else 0.0
        return {k: list(v - base) for k, v in returns.items()}

    def metrics(self) -> Mapping[str, float]:
        """Called when a step's updates are done: the moment to look at what they made."""
        pending, self.pending = self.pending, None
        if pending:
            pending()
        return self._metrics

    def mark(self, name: str, step: int) -> None:
        """Play every start of the task once and keep the episodes: the numbers of the method's table."""
        if self.frozen and self.learner.models["reflector"].fingerprint() != self.frozen:
            raise RunError("the reflector's weights have changed since its lessons ended: it must stay frozen")
        for engine in self.engines.values():
            engine.publish(step)
        kind = "reflect-" if self.config.reflect else "plain-"
        protocol = two_players(self.config.reflect, self.config.restrict)
        keep_evaluation(
            self.run,
            kind + name,
            asyncio.run(
                play_all(
                    self.source,
                    start_all(self.source.tasks("all"), 1, self.config.seed + 1, f"{kind}{name}:"),
                    self.seats(),
                    protocol,
                )
            ),
        )

    def evaluate(self, step: int) -> Mapping[str, float]:
        tasks = draw_tasks(self.source, self.config.eval.split, self.config.eval.n, self.config.seed)
        protocol = two_players(self.config.reflect, self.config.restrict)
        good, dropped = scored(
            play(self.source, tasks, self.seats(), protocol, seed=self.config.seed + 1, prefix="eval:")
        )
        return {**summary(good), **dropped}

    def state(self) -> Mapping[str, Any]:
        return {"replay": [to_json(e) for e in self.replay], "frozen": self.frozen}

    def load(self, state: Mapping[str, Any]) -> None:
        self.replay, self.frozen = [from_json(line) for line in state["replay"]], state["frozen"]


def protocol(config: Config, source: Any) -> Protocol:
    """Who speaks when, for those who replay a run."""
    return two_players(config.reflect, config.restrict, share=config.reflect_prob)


def keep_evaluation(run: Run, name: str, episodes: Sequence[Episode]) -> Path:
    """Episodes of an evaluation, beside those of training: RUN/evaluation/NAME.jsonl."""
    path = run.path / "evaluation" / f"{name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    atomic_write(path, "".join(to_json(e) + "\n" for e in episodes).encode(), "evaluation")
    return path


def evaluate_advice(run: Run, config: Config, seed: int) -> None:
    """The trained pair of a run, loaded from its last checkpoint, with its reflections withheld and with those of other
    states: what are the words worth? No teacher is behind it: the reflector is the one that was saved."""
    last = listed(run.checkpoints_dir)[-1]
    kinds: dict[str, Any] = {"policy": "trained", "reflector": "frozen"}
    seats = []
    for name in ("policy", "reflector"):
        lm = load_model(config.model.model_copy(update={"name": str(last / name), "shape": None}))
        engine = LocalEngine(lm, config.engine.slots, config.engine.max_len, config.engine.fixed)
        seats.append(Seat(name, engine, SamplingLaw(), 1 if name == "policy" else config.thought, kind=kinds[name]))
    source = get_task(config.task.name, **config.task.options)
    said = sorted(
        {
            t.text
            for e in read_segment(run.path / "evaluation" / "reflect-rl.jsonl")
            for t in e.turns
            if t.seat == "reflector"
        }
    )

    def other(state: str, thought: str) -> str:
        return said[int.from_bytes(hashlib.blake2b(state.encode(), digest_size=4).digest(), "little") % len(said)]

    for name, advice in (("on", None), ("shuffled", other), ("off", lambda state, thought: "")):
        starts = start_all(source.tasks("all"), 1, seed + 1, f"advice-{name}:")
        protocol = two_players(True, config.restrict, advice)
        keep_evaluation(run, f"advice-{name}", asyncio.run(play_all(source, starts, seats, protocol)))


def random_player(source: Any, seed: int, tokenizer: Any) -> list[Episode]:
    """The uniform choice among listed labels: where every comparison starts."""
    engine = ScriptedEngine(lambda prompt, draw: draw.choice(labels), tokenizer, "random")
    labels = source.make().reset(source.tasks("all")[0]).labels
    return play(
        source,
        source.tasks("all"),
        [Seat("policy", engine, kind="scripted")],
        two_players(False),
        seed=seed,
        prefix="random:",
    )


def run(config: Config, run: Run, resume: bool = False) -> dict[str, float]:
    if not hasattr(get_task(config.task.name, **config.task.options), "tasks"):
        raise RecipeError(f"task '{config.task.name}' has no starts")
    return train(ReflectMethod(config, run), config, run, resume)
