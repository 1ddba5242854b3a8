"""The players of Reflect-RL, and the stages in which they imitate a teacher: the reflector imitates its words, the
policy its actions.

A stage is an ordinary run of method `reflect_imitation` in RUN/reflector or RUN/policy, with its own learner,
optimiser and schedule. It can be reported, evaluated and served like any other run.

Imitation and play build their prompts with the same functions (`play.Talk`). Before training, everything that
would not fit is counted: reflections longer than `thought`, states that would lose their middle, lists of actions that
leave no room. Lessons are never cut. Instead the recipe is refused, and the error says how many lessons are too long,
the first of them, and which keys to raise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

import numpy as np

from trailmark.config import ModelConfig, SamplingConfig
from trailmark.errors import RecipeError, TaskError, shorten
from trailmark.learn.learner import Learner, Update
from trailmark.learn.watch import summary
from trailmark.memory import need_rows
from trailmark.methods.base import Method, ModelInMemory, name_in_run
from trailmark.methods.batches import batch_rows, epoch_steps, how_long
from trailmark.methods.reflect.config import ImitationRecipe, PlayersRecipe
from trailmark.methods.reflect.curriculum import Level, LevelTasks, make_levels, starts_of
from trailmark.methods.reflect.lessons import Lesson, get_teacher
from trailmark.methods.reflect.play import (
    ACTION,
    ANALYZE,
    CUT,
    Talk,
    coin,
    label_alphabet,
    label_words,
    menu_labels,
    shuffled_menu,
    two_players,
)
from trailmark.models.lm import LM
from trailmark.models.load import load_model
from trailmark.objectives.sft import Sft
from trailmark.progress import counted
from trailmark.rollout.bos import prompt_ids
from trailmark.rollout.encode import encode
from trailmark.rollout.play import Desk, Protocol, label_ids, play, stop_ids
from trailmark.runs.store import Run
from trailmark.samples import scored
from trailmark.seats.config import AnyKind, LocalSeat, filled
from trailmark.seats.model_names import stored_model
from trailmark.seats.open_seats import OpenSeats
from trailmark.tasks import get_task, keep_judge
from trailmark.tasks.base import TaskSource
from trailmark.tasks.labels import add_labels
from trailmark.token_bounds import Bounds
from trailmark.types import Sample, Task

STARTS = 16  # how many starts are checked if a world cannot list its menus


class Players(Method):
    """The world and its players: what imitation and play share."""

    def __init__(self, config: PlayersRecipe, run: Run | None, imitates: Sequence[str] = ()):
        """`imitates` names the players that learn from lessons. Every mistake in the recipe is found here, before the
        first step."""
        super().__init__(config, run)  # type: ignore[arg-type]
        need_rows(config.teacher.prompts, "teacher.prompts")
        self.source = get_task(config.task.name, **config.task.options)
        if run is not None:
            keep_judge(self.source, run.path)
        teacher = get_teacher(config.teacher.name, config.teacher.path)
        words = [ANALYZE, ACTION, *teacher.words, *label_words(self.source)]
        self.words = words
        self.models: dict[str, LM] = {name: load_seat(config, self.source, name, words) for name in players_of(config)}
        self.source.bind(self.models["policy"].tokenizer)
        for lm in self.models.values():
            lm.name = name_in_run(lm.name, run) if run is not None else lm.name
        self.opened = OpenSeats(self.seats_of(config), self.models)
        self.talk = talk_of(config, self.source, self.models["policy"].tokenizer)
        self.levels = make_levels(config.curriculum, self.source)
        self.lessons: list[Lesson] = []
        if imitates:
            t = config.teacher
            # lessons from a file have their own starts, of any mode
            each = config.curriculum.kind == "modes" and t.name != "file"
            sources = [LevelTasks(self.source, level) for level in self.levels] if each else [self.source]
            self.lessons = [x for source in sources for x in teacher.lessons(source, t.prompts, t.perturb, config.seed)]
            if not self.lessons:
                raise RecipeError(
                    f"teacher '{t.name}' has no lessons for this recipe: look at teacher.path and perturb"
                )
            if "policy" in imitates:
                check_labels(self.lessons, config, self.models["policy"].tokenizer)
        final_tasks(config, self.source, self.levels)  # fail now, not after hours, if the starts do not exist
        if config.eval.every:
            starts_of(self.levels, self.source, config.eval.split, config.eval.n, config.seed)
        self.check_room(imitates)
        if config.curriculum.index is not None and config.curriculum.index >= len(self.levels):
            raise RecipeError(f"curriculum.index is {config.curriculum.index}, and there are {len(self.levels)} stages")

    def check_room(self, imitates: Sequence[str]) -> None:
        """Raise an error before the first step if a lesson would be cut, or if a list of actions does not fit."""
        c, policy = self.config, self.models["policy"]
        made = c.model.shape is not None and not c.load.policy
        room = Room(self.opened.engines["policy"].max_len, c.engine.max_len, policy.context, made)
        if imitates:
            tokenizers = {name: lm.tokenizer for name, lm in self.models.items()}
            check_lessons(self.lessons, self.talk, tokenizers, room, imitates)
        if self.source.markov or self.source.menus() is not None:
            check_menus(self.source, c.eval.split, self.talk, policy.tokenizer, room)

    def evaluate(self, step: int) -> Mapping[str, float]:
        self.opened.publish(step)
        c = self.config
        tasks = starts_of(self.levels, self.source, c.eval.split, c.eval.n, c.seed)
        protocol = always_reflecting(self.talk)
        how = {"seed": c.seed + 1, "prefix": "eval:", "failures": c.failures}
        episodes = self.keep_plays(step, lambda: play(self.source, tasks, self.opened.seats, protocol, **how))
        good, dropped = scored(episodes)
        parts = {s.name: [e for e in good if e.task.meta.get("stage") == s.name] for s in self.levels if s.name}
        each = {f"{k}/{name}": v for name, part in parts.items() for k, v in summary(part).items() if k == "success"}
        return {**summary(good), **each, **dropped}

    def sample(self, lesson: Lesson, seat: str, place: str) -> Sample:
        """One lesson as a training sample of a player, with the prompt that play would use. `place` is its position in
        the run."""
        tokenizer, limit = self.models[seat].tokenizer, self.opened.engines[seat].max_len
        if seat == "reflector":
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

    # -- about a run ----------------------------------------------------------------------------------------------

    @classmethod
    def models_in_memory(cls, config: Any) -> list[ModelInMemory]:
        """The players; in play the policy is trained."""
        optim = {"policy": config.learner.optim}
        return [ModelInMemory(n, seat_model(config, n), optim.get(n), config.engine) for n in players_of(config)]

    @classmethod
    def seats_of(cls, config: PlayersRecipe) -> dict[str, AnyKind]:
        """The seats. The reflector is frozen in play and stored in every checkpoint."""
        seats: dict[str, AnyKind] = {"policy": LocalSeat(trained=True, sampling=SamplingConfig(max_tokens=1))}
        if config.reflect:
            thinks = SamplingConfig(max_tokens=config.thought)
            seats["reflector"] = LocalSeat(model=seat_model(config, "reflector"), sampling=thinks)
        return filled(seats, None, config.engine)

    @classmethod
    def protocol(cls, config: PlayersRecipe, source: TaskSource) -> Protocol:
        """The order of the players. Labels depend on the tokenizer of the seat `policy`, so they are made when a play
        begins."""

        async def as_in_training(desk: Desk) -> None:
            await two_players(talk_of(config, source, desk.seats["policy"].engine.tokenizer))(desk)

        return as_in_training

    @classmethod
    def evaluation_protocol(cls, config: PlayersRecipe, source: TaskSource) -> Protocol:
        """As in training, but every decision gets a reflection."""

        async def hears_all(desk: Desk) -> None:
            await always_reflecting(talk_of(config, source, desk.seats["policy"].engine.tokenizer))(desk)

        return hears_all

    @classmethod
    def starts(cls, config: PlayersRecipe, source: TaskSource, split: str, n: int | None, seed: int) -> list[Task]:
        """`n` starts of each level of the curriculum."""
        return starts_of(make_levels(config.curriculum, source), source, split, n, seed)


class ImitationMethod(Players):
    """Trains one player by imitation. Checkpoints also hold the other player, because the two play together."""

    Config = ImitationRecipe
    config: ImitationRecipe

    @classmethod
    def unread(cls, config: ImitationRecipe) -> tuple[str, ...]:
        """What measures the player, and how fast. (`engine.max_len` says which lessons fit.)"""
        return ("eval", "final", "engine.max_num_seqs", "engine.batch_invariant", "engine.dtype")

    def __init__(self, config: ImitationRecipe, run: Run):
        need_rows(config.batch, "batch")
        super().__init__(config, run, [config.seat])
        if config.epochs is not None:
            steps = epoch_steps(len(self.lessons), config.batch, config.epochs)
            self.config = config = config.model_copy(update={"steps": steps})
        self.learner = Learner(self.models, config.learner, {config.seat: config.learner.optim}, config.steps)
        self.learner.keeps = tuple(name for name in self.models if name != config.seat)

    @classmethod
    def check(cls, config: ImitationRecipe) -> list[str]:
        return [f"imitates: the {config.seat}, {how_long(config.steps, config.epochs)} of {config.batch} lessons"]

    def updates(self, step: int) -> Iterator[Update]:
        yield Update(self.unscored_samples(step), Sft(model=self.config.seat), self.config.seat)

    def unscored_samples(self, step: int) -> list[Sample]:
        rows = batch_rows(len(self.lessons), self.config.batch, step, self.config.seed, self.config.epochs)
        return [self.sample(self.lessons[r], self.config.seat, f"{step} {k}") for k, r in enumerate(rows)]

    @classmethod
    def models_in_memory(cls, config: Any) -> list[ModelInMemory]:
        optim = config.learner.optim
        return [replace(h, optim=optim if h.name == config.seat else None) for h in super().models_in_memory(config)]

    def evaluate(self, step: int) -> Mapping[str, float]:
        """Only the policy is evaluated: a reflector cannot play alone."""
        return super().evaluate(step) if self.config.seat == "policy" else {}


# --- pieces that evaluation and replay share with the run ----------------------------------------------------------


def players_of(config: PlayersRecipe) -> tuple[Literal["policy", "reflector"], ...]:
    return ("policy", "reflector") if config.reflect else ("policy",)


def load_seat(config: PlayersRecipe, source: Any, seat: Literal["policy", "reflector"], words: Sequence[str]) -> LM:
    """Load the model of a player. With `labels: all`, labels that its tokenizer lacks are added."""
    lm = load_model(seat_model(config, seat), words)
    if config.labels == "all" and source.binds:
        add_labels(lm, seed=config.model.seed)
    return lm


def imitated(lesson: Lesson, config: PlayersRecipe) -> str:
    return lesson.oracle if config.teacher.label == "oracle" else lesson.action


def check_labels(lessons: Sequence[Lesson], config: PlayersRecipe, tokenizer: Any) -> None:
    """Raise an error if a label of the lessons is not a single token: any label that is imitated, or any label of a
    menu that is permuted. Labels drawn from the alphabet are always single tokens."""
    if config.shuffle == "alphabet":
        return
    answers = {imitated(x, config) for x in lessons}
    if config.shuffle == "permute":
        answers |= {label for x in lessons for label in x.labels or menu_labels(x.menu)}
    for label in sorted(answers):
        if (size := len(encode(tokenizer, label))) != 1:
            raise RecipeError(
                f"the lessons answer with label '{label}', which is {size} tokens of this model: make them with "
                f"`trailmark data … "
                "--tokenizer`, or set labels: all (new tokens) or shuffle: alphabet (labels drawn anew)"
            )


def seat_model(config: PlayersRecipe, seat: Literal["policy", "reflector"]) -> ModelConfig:
    """The model section of a player: a new model (each player with its own seed), or one from an earlier run."""
    folder = getattr(config.load, seat)
    if folder is not None:
        return stored_model(config.model, folder)
    return config.model.model_copy(update={"seed": config.model.seed + (seat == "reflector")})


def talk_of(config: PlayersRecipe, source: Any, tokenizer: Any) -> Talk:
    """The `Talk` of a run's players."""
    draws = config.head == "alphabet" or config.shuffle == "alphabet"
    known = label_alphabet(source, tokenizer) if draws else ()
    return Talk(config.reflect, config.head, config.shuffle, config.reflect_prob, known, None, config.thought,
                config.instruction)  # fmt: skip


def always_reflecting(talk: Talk) -> Protocol:
    """As in training, but every decision gets a reflection."""
    return two_players(dataclasses.replace(talk, share=1.0))


def final_tasks(config: PlayersRecipe, source: Any, levels: Sequence[Level]) -> list[Task]:
    final = config.final
    if final.split is not None:
        return starts_of(levels, source, final.split, final.n, config.seed)
    try:
        return starts_of(levels, source, "all", final.n, 0)
    except TaskError:
        return starts_of(levels, source, config.eval.split, final.n or config.eval.n, config.seed)


# --- what imitation and play agree on ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Room:
    """The size limit of a sequence: `limit` tokens. `asked` is what the recipe asks for (engine.max_len), `context`
    what the model supports, `made` whether the model is created from a shape, with any context (model.shape)."""

    limit: int
    asked: int | None
    context: int
    made: bool

    def raised(self, needed: int) -> str:
        """The settings that make room for `needed` tokens."""
        keys = [f"engine.max_len={needed}"]
        if self.context < needed:
            keys.append(f"model.shape.context={needed}" if self.made else "a model with a longer context")
        return " and ".join(keys)


def check_lessons(
    lessons: Sequence[Lesson], talk: Talk, tokenizers: dict[str, Any], room: Room, imitates: Sequence[str]
) -> None:
    """Raise an error if a lesson would have to be cut. `imitates` names the players that learn from the lessons."""
    thought, problems = talk.thought, []
    if "reflector" in imitates:
        sizes = Sizes(tokenizers["reflector"])
        long = [(n, x) for x in lessons if (n := sizes.at_most(x.reflection, talk.thought - 1) + 1) > talk.thought]
        if long:
            thought, first = max(n for n, _ in long), long[0][1]
            problems.append(
                f"{len(long)} of {len(lessons)} lessons have reflections longer than thought={talk.thought} "
                f"tokens, up to "
                f"{thought} with their end: set thought={thought}. The first: {_brief(first.reflection)}"
            )
    sized = {name: Sizes(tokenizer) for name, tokenizer in tokenizers.items()}
    progress = counted(lessons, "checking the lessons", "lessons", len(lessons))
    needs = [_needed(x, talk, sized, thought, imitates, room.limit) for x in progress]
    long = [n for n in needs if n > room.limit]
    if long:
        first = lessons[next(k for k, n in enumerate(needs) if n > room.limit)]
        problems.append(
            f"{len(long)} of {len(lessons)} lessons need up to {max(long)} tokens for prompt and answer, and "
            f"{room.limit} fit: "
            f"set {room.raised(max(long))}, or make shorter states. The first: {_brief(first.state)}"
        )
    if problems:
        raise RecipeError("lessons are never cut. " + " ".join(problems))


class Sizes:
    """The number of tokens of texts. A text that surely fits is not encoded."""

    def __init__(self, tokenizer: Any):
        self.tokenizer, self.bounds = tokenizer, Bounds(tokenizer)

    def at_most(self, text: str, room: int, prompt: bool = False) -> int:
        """The size of a text if it is above `room`; otherwise a number that may be too large. A prompt may get a
        BOS."""
        most = self.bounds.most(text)
        if most is not None and most + prompt <= room:
            return most + prompt
        return len((prompt_ids if prompt else encode)(self.tokenizer, text))


def _needed(
    lesson: Lesson, talk: Talk, sized: Mapping[str, Sizes], thought: int, imitates: Sequence[str], limit: int
) -> int:
    """The number of tokens of the longest sequence that play can make from a lesson's state, with a reflection of full
    length. Below `limit` the number may be too large."""
    sizes = []
    before = talk.instruction if talk.reflect else ""
    if "reflector" in imitates:
        text = before + lesson.state + ANALYZE
        sizes.append(sized["reflector"].at_most(text, limit - thought, prompt=True) + thought)
    if "policy" in imitates:
        rest = ANALYZE + lesson.menu + ACTION if talk.reflect else lesson.menu + ACTION
        answer = (thought if talk.reflect else 0) + 1
        sizes.append(sized["policy"].at_most(before + lesson.state + rest, limit - answer, prompt=True) + answer)
    return max(sizes)


def check_menus(source: Any, split: str, talk: Talk, tokenizer: Any, room: Room) -> None:
    """Raise an error if a list of actions leaves no room for the state in a prompt."""
    worst, bad, seen, first = 0, 0, 0, ""
    for where, menu in menus(source, split):
        rest = CUT + ANALYZE + menu + ACTION if talk.reflect else CUT + menu + ACTION
        needed = len(prompt_ids(tokenizer, rest)) + (talk.thought if talk.reflect else 0) + 3
        seen, worst = seen + 1, max(worst, needed)
        if needed > room.limit:
            bad, first = bad + 1, first or where
    if bad:
        raise RecipeError(
            f"{bad} of {seen} lists of actions of task '{source.name}' do not fit a prompt (the first: "
            f"{first}): with a "
            f"reflection they take up to {worst} tokens, and {room.limit} fit: set {room.raised(worst)}."
        )


def menus(source: Any, split: str) -> Iterator[tuple[str, str]]:
    """(where, menu) for every list of actions, if the world can list them (`menus`); else for some first states."""
    if (listed := source.menus()) is not None:
        yield from listed
        return
    for part in dict.fromkeys(("train", split)):
        try:
            tasks: Iterable[Any] = source.tasks(part, STARTS, 0)
        except TaskError:
            continue
        for task in islice(tasks, STARTS):
            yield f"start '{task.id}'", source.make().reset(task).menu


def _brief(text: str) -> str:
    return repr(shorten(text, 80)) + "."
