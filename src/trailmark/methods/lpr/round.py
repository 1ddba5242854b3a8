"""A round of LPR: where its stages lie, what they have made, and which model writes in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from trailmark.config import ModelConfig, SamplingConfig
from trailmark.errors import DataError
from trailmark.formats.rows import read_lines
from trailmark.functions import load_function
from trailmark.methods.base import name_in_run
from trailmark.methods.batches import Walk
from trailmark.methods.lpr import pairs as lpr_pairs
from trailmark.methods.lpr import states as lpr_states
from trailmark.methods.lpr.config import LprFiles, LprRecipe
from trailmark.methods.pipeline import numbers, recipe_stage
from trailmark.models.load import load_model
from trailmark.runs.stages import Stage
from trailmark.runs.store import Run, read_segment
from trailmark.score.classes import outputs_of
from trailmark.seats.config import AnyKind, HttpSeat, LocalSeat, check_seats, filled
from trailmark.seats.model_names import load_tokenizer
from trailmark.seats.open_seats import OpenSeats
from trailmark.seats.pinned_models import pin_models
from trailmark.steps import mark_steps, without_end
from trailmark.tasks import get_task, keep_judge
from trailmark.tasks.base import draw_tasks
from trailmark.tasks.logic.clean import STRICT, Cleaning
from trailmark.tasks.logic.clean import clean as react_clean
from trailmark.types import Annotation, Episode, Task

SEAT = "policy"
HOW = ("concurrency", "deadline", "retries", "backoff", "api_key_env")  # its answers stay the same
Made = tuple[Mapping[str, Any], Mapping[str, int]]  # what a stage kept, and what it left out by reason


@dataclass(frozen=True)
class Round:
    """Round k of a recipe, in the folder of a run. Round 0 is what comes before the first one."""

    config: LprRecipe
    run: Run
    k: int = 1

    @property
    def root(self) -> Path:
        return self.run.path

    @property
    def files(self) -> LprFiles:
        """The files from elsewhere. They belong to the first round."""
        return self.config.files if self.k == 1 else LprFiles()

    def name(self, kind: str) -> str:
        return f"{kind}-{self.k}" if self.k else kind

    def at(self, kind: str) -> Path:
        """The folder of a stage of this round."""
        return self.root / self.name(kind)

    def stage(
        self, kind: str, make: Callable[[Round, Path], Made], keys: Sequence[str] = (), after: Sequence[str] = (),
        files: str | Sequence[str] | None = None,
    ) -> Stage:  # fmt: skip
        """A stage of this round: `make` writes files and returns what it kept and left out. It reads keys of the
        recipe, stages (those of this round by their kind) and files from elsewhere."""

        def build(folder: Path) -> dict[str, Any]:
            kept, left_out = make(self, folder)
            return {**kept, **{f"left out: {why}": n for why, n in sorted(left_out.items()) if n}}

        names = [n if n[-1].isdigit() or n == "sft" else self.name(n) for n in after]
        elsewhere = {f"file {n}": file for n, file in enumerate(listed(files))}
        return recipe_stage(
            self.name(kind), build, self.config, self.root, keys, names, elsewhere, metrics=floats(kind)
        )

    # -- the model that writes ----------------------------------------------------------------------------------------

    @cached_property
    def tokenizer(self) -> Any:
        """The policy's. It stays the same through all rounds."""
        return load_tokenizer(self.config.model.tokenizer or self.config.model.name, "model.name")

    @property
    def words(self) -> str:
        """The key that names the tokenizer, which encodes what came as text."""
        return "model.tokenizer" if self.config.model.tokenizer else "model.name"

    @property
    def taught(self) -> bool:
        return "teacher" in self.config.seats or self.config.teacher.gold

    @property
    def ends_with(self) -> str:
        """The training that ends this round; of round 0, the one before the first round. "": there is none."""
        if self.k == 0:
            return "sft" if self.taught else ""
        return self.name("rl" if self.config.rl is not None else "policy")

    def begins_with(self, after_preference: bool = False) -> str:
        """The training whose policy this round begins with, or its reinforcement. "": the recipe's model."""
        if after_preference and self.config.preference is not None:
            return self.name("policy")
        return Round(self.config, self.run, self.k - 1).ends_with

    def policy(self, after_preference: bool = False) -> ModelConfig:
        """The model section of this policy."""
        name = self.begins_with(after_preference)
        return self.config.model.model_copy(update={"name": str(self.root / name)}) if name else self.config.model

    @property
    def policy_keys(self) -> list[str]:
        """What a stage reads that loads the policy: where an earlier stage made it, the recipe's name is not read."""
        return ["model", "-model.name"] if self.begins_with() else ["model"]

    @property
    def policy_stages(self) -> list[str]:
        return [name] if (name := self.begins_with()) else []

    # -- seats --------------------------------------------------------------------------------------------------------

    def trains(self, seat: str) -> bool:
        """Whether this seat is the model that is trained."""
        kind = seats_of(self.config)[seat]
        return isinstance(kind, LocalSeat) and kind.trained

    def answer_keys(self, seat: str, sampling: SamplingConfig | None) -> list[str]:
        """What decides how a seat answers. `sampling` is the stage's own: it goes before the seat's, and that before
        the recipe's."""
        kind, own, key = seats_of(self.config)[seat], self.config.seats.get(seat), f"seats.{seat}"
        keys = [key, *([f"-{key}.{how}" for how in HOW] if isinstance(kind, HttpSeat) else [])]
        if sampling is not None:
            keys.append(f"-{key}.sampling")
        elif own is None or own.sampling is None:
            keys.append("sampling")
        if isinstance(kind, LocalSeat) and (own is None or getattr(own, "engine", None) is None):
            keys.append("engine")
        return [*keys, *(self.policy_keys if self.trains(seat) else [])]

    def answer_stages(self, seat: str) -> list[str]:
        return self.policy_stages if self.trains(seat) else []

    def seat(self, name: str, model: ModelConfig, sampling: SamplingConfig | None, source: Any) -> Any:
        """A seat, opened for a task: with `model` where it is the one that is trained."""
        config, models = seats_of(self.config)[name], {}
        if self.trains(name):
            lm = load_model(pin_models(model))
            lm.name = name_in_run(lm.name, self.run)
            models = {name: lm}
        opened = OpenSeats({name: config}, models, self.config.seed)
        opened.publish(max(self.k - 1, 0) if name == SEAT else 0)
        opened.bind(source)
        return opened.seat(name, sampling)

    # -- questions ----------------------------------------------------------------------------------------------------

    def source(self, more: Mapping[str, Any] | None = None, judge: bool = True) -> Any:
        """The task. `judge`: it judges answers, and a run that goes on must use the judge that it began with."""
        source = get_task(self.config.task.name, **{**self.config.task.options, **(more or {})})
        if judge:
            keep_judge(source, self.root)
        return source

    def asked(self, source: Any) -> Sequence[Task]:
        """The questions of this round. Rounds walk a finite list of questions as steps do."""
        c = self.config
        if c.sample.prompts is None:
            return draw_tasks(source, c.sample.split, None, c.seed * 1_000_003 + self.k)
        return Walk(source, c.sample.prompts, c.seed, c.sample.split).take(self.k)

    def questions(self, source: Any) -> list[Task]:
        """What a file from elsewhere may ask: all questions that the task lists, and those of the first round."""
        return [*source.tasks(self.config.sample.split), *Round(self.config, self.run, 1).asked(source)]

    def usable(self, episodes: Sequence[Episode], source: Any) -> tuple[list[Episode], Counter[str]]:
        """The solutions that can be used, cut into steps, and why others cannot."""
        c = self.config.clean
        cleaner = load_function(c.clean, "clean.clean")[0] if c.clean else None
        if cleaner is None and c.react != "any":
            cleaner = partial(react_clean, rules=STRICT if c.react == "strict" else Cleaning())
        return lpr_states.clean_all(episodes, c, self.tokenizer, SEAT, partial(prompt_of, source), cleaner)

    # -- what the stages have made ------------------------------------------------------------------------------------

    def solved(self) -> list[Episode]:
        return read_segment(self.at("cleaned") / "all.jsonl")

    def shard(self, wanted: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """The states of some shards; None: of all."""
        files = sorted(self.at("states").glob("states*.jsonl"), key=_shard_number)
        if not files:
            raise DataError("holds no states.", self.at("states"))
        return [s for i, file in enumerate(files) if wanted is None or i in wanted for s in read_lines(file)]

    def annotated(self) -> list[int] | None:
        """The shards whose states are completed."""
        c = self.config
        return None if c.complete.shards is None else sorted({*c.complete.shards, *c.labels.dev_shards})

    @property
    def shard_keys(self) -> list[str]:
        return ["complete.shards", *(["labels.dev_shards"] if self.config.complete.shards is not None else [])]

    def completed(self) -> list[Episode]:
        return read_segment(self.at("completions") / "all.jsonl")

    def steps_of_completions(self) -> list[Episode]:
        """The completions, cut into steps of their own."""
        marked = (mark_steps(e, SEAT, self.tokenizer, self.config.clean.split) for e in self.completed() if e.turns)
        return [without_end(e, SEAT, self.tokenizer) for e in marked]

    def valued(self) -> list[Annotation]:
        return read_segment(self.at("values") / "values.jsonl", Annotation)

    def rewards(self, episodes: Sequence[Episode]) -> tuple[dict[str, float], dict[Any, Any]]:
        """The reward r_p of each solution, and what the reward model said at each step."""
        if not self.needs_prm():
            return {}, {}
        outputs = outputs_of(read_segment(self.at("scores") / "scores.jsonl", Annotation))
        return lpr_pairs.solution_rewards(episodes, outputs, self.read(), self.tokenizer), outputs

    # -- the reward model ---------------------------------------------------------------------------------------------

    def needs_prm(self) -> bool:
        """Whether something in this round asks the reward model: its pairs, or its reinforcement."""
        p = self.config.pairs
        whole = p.process and p.values is None
        ranks = p.states is not None or (whole if p.steps is None else p.steps.by == "score")
        return (self.config.preference is not None and ranks and self.files.pairs is None) or self.pays_steps()

    def pays_steps(self) -> bool:
        """Whether the reinforcement pays what the round's reward model says."""
        rewards = {} if self.config.rl is None else self.config.rl.get("rewards", {})
        return self.config.rl is not None and "model" not in rewards and rewards.get("alpha", 1.0) > 0

    @property
    def kind(self) -> str:
        return self.config.prm.get("kind", "classes")

    def learns_values(self) -> bool:
        """Whether the reward model learns the values of states. (Others learn outcomes.)"""
        return self.needs_prm() and self.kind in ("classes", "scalar")

    def read(self) -> Any:
        """How rewards are read, with the classes from C on that the reward model has. C is 2, if there are so many."""
        c = self.config
        if c.read.classes is not None or self.kind in ("pairwise", "scalar"):
            return c.read
        two = self.kind == "outcome" or c.labels.binary
        return c.read.model_copy(
            update={"classes": [1] if two else list(range(min(2, c.complete.n), c.complete.n + 1))}
        )

    @property
    def read_keys(self) -> list[str]:
        """What `read` reads."""
        if self.config.read.classes is not None:
            return ["read"]
        counts = ["labels.binary", *([] if self.config.labels.binary else ["complete.n"])]
        return ["read", "prm.kind", *(counts if self.kind == "classes" else [])]


def seats_of(config: LprRecipe) -> dict[str, AnyKind]:
    """A server or a script may write the solutions: what is trained is the recipe's model all the same."""
    given = {SEAT: LocalSeat(trained=True), **config.seats}
    check_seats({n: s for n, s in given.items() if n != SEAT} | {SEAT: LocalSeat(trained=True)})
    return filled(given, config.sampling, config.engine)


def prompt_of(source: Any, e: Episode) -> str:
    """The prompt of an answer that came as text alone."""
    if "format" in e.info and "prompt" in e.task.data:
        return e.task.data["prompt"]
    return source.make().reset(e.task).text


def floats(kind: str) -> Callable[[Mapping[str, Any]], dict[str, float]]:
    """The metrics of a stage."""
    return lambda summary: {f"{kind}/{name}": float(v) for name, v in numbers(summary).items()}


def shard_name(i: int, n: int) -> str:
    return "states.jsonl" if n == 1 else f"states.{i}-of-{n}.jsonl"


def _shard_number(path: Path) -> int:
    parts = path.name.split(".")
    return int(parts[1].split("-")[0]) if len(parts) > 2 else 0


def listed(files: str | Sequence[str] | None) -> list[str]:
    return [] if files is None else [files] if isinstance(files, str) else list(files)


def because(counts: Mapping[str, int]) -> str:
    """What was left out and why, for an error."""
    return ", ".join(f"{n} {why}" for why, n in sorted(counts.items()) if n) or "there are none"
