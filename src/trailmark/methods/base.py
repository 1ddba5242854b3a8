"""The base class of methods: a `Config`, the updates of each step, and class methods that answer questions about runs.

`trailmark train` calls `check` and `train`. `eval`, `verify`, `serve` and `report` call the other class methods on an
existing run. So none of these commands knows a method by its name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from trailmark.config import EngineConfig, ModelConfig, OptimConfig, RunConfig
from trailmark.errors import RecipeError
from trailmark.learn.loop import Training, train
from trailmark.methods.batches import Walk
from trailmark.models.adapters import is_adapter
from trailmark.models.lm import LM
from trailmark.models.load import load_model
from trailmark.rollout.judging import collecting_notes
from trailmark.rollout.play import Protocol
from trailmark.runs.checkpoints import listed
from trailmark.runs.stages import Stage, begun_from, is_stage, run_stages
from trailmark.runs.store import Run, write_beside, write_segment
from trailmark.seats.config import AnyKind, LocalSeat, check_seats, filled, trained_seats
from trailmark.seats.model_names import locate, stored_model
from trailmark.seats.open_seats import check_servers
from trailmark.seats.pinned_models import pin_models
from trailmark.tasks import get_task, keep_judge
from trailmark.tasks.base import TaskSource, draw_tasks
from trailmark.types import Annotation, Episode, Sample, Task


@dataclass(frozen=True)
class ModelInMemory:
    """A model that a run holds."""

    name: str
    model: ModelConfig
    optim: OptimConfig | None = None  # how it is trained; None: it is frozen
    engine: EngineConfig | None = None  # how it is sampled from; None: it is not
    output: bool = True  # whether its output layer is read, and not only a head
    stays: bool = False  # `learner.offload` does not move it


class Method(Training):
    """Derive from this class, set `Config`, and define `updates`. `__init__` sets `self.config` and `self.run`."""

    Config: ClassVar[type[RunConfig]] = RunConfig
    staged: ClassVar[tuple[str, ...]] = ()  # recipe keys that only the stages read
    asked_seats: ClassVar[tuple[str, ...]] = ()  # the seats that the protocol asks; empty: not known
    self_play: ClassVar[bool] = False  # whether it learns from several trained seats, which are one model
    reread: ClassVar[bool] = False  # others read `unread` keys in the run's recipe: a change of these is written there
    only: ClassVar[tuple[str, ...] | None] = None  # the stages to make (`trailmark stages`); None: all, and the run
    redo: ClassVar[tuple[str, ...]] = ()  # the stages that are made again though nothing has changed
    imitates: ClassVar[bool] = False  # whether runs imitate the file `config.data`; then `imitated` gives its rows

    def __init__(self, config: Any, run: Run):
        self.config, self.run = config, run

    # -- before a run ---------------------------------------------------------------------------------------------

    @classmethod
    def check(cls, config: Any) -> list[str]:
        """Further lines that `--dry-run` prints."""
        return []

    @classmethod
    def models_in_memory(cls, config: Any) -> list[ModelInMemory]:
        """The models that a run holds, for a plan of its memory. Default: one that is trained, and sampled from if
        there is a task."""
        engine = getattr(config, "engine", None) if getattr(config, "task", None) is not None else None
        return [ModelInMemory("policy", config.model, config.learner.optim, engine)]

    @classmethod
    def trainings(cls, config: Any) -> list[tuple[str, type[Method], Any]]:
        """The trainings of a recipe in their order, for a plan: a name, the method, and its recipe, which must be one
        that can begin now. Default: one."""
        return [("", cls, config)]

    @classmethod
    def stages(cls, config: Any, run: Run) -> list[Stage]:
        """The stages to make before training, in RUN/NAME. A training stage called `policy` makes the model that the
        run starts from. Default: none."""
        return []

    @classmethod
    def unread(cls, config: Any) -> tuple[str, ...]:
        """The keys of a recipe that do not change what it trains: a stage is not made again for these."""
        return ()

    # -- about a run ----------------------------------------------------------------------------------------------

    @classmethod
    def seats_of(cls, config: Any) -> dict[str, AnyKind]:
        """The seats of the recipe's `seats` section, if it has one. Else one seat, `policy`, with the trained model."""
        given = getattr(config, "seats", None) or {"policy": LocalSeat(trained=True)}
        check_seats(given, shared=cls.self_play)
        return filled(given, getattr(config, "sampling", None), getattr(config, "engine", None))

    @classmethod
    def check_asked(cls, config: Any, source: TaskSource) -> None:
        """Raise an error if a seat is never asked: its model would be loaded for nothing."""
        seats = list(cls.seats_of(config))
        asked = list(cls.asked_seats)
        if not asked and len(seats) > 1 and cls.protocol(config, source) is None:
            first = source.make().reset(draw_tasks(source, "train", 1, config.seed)[0])
            asked = seats if first.seat else trained_seats(cls.seats_of(config))[:1]
        if asked and (idle := next((name for name in seats if name not in asked), None)):
            raise RecipeError(
                f"seats.{idle}: nobody asks this seat: in task '{source.name}' method {config.method} asks "
                f"{' and '.join(asked)}. Leave it out, or name it as one of these."
            )

    @classmethod
    def first_model(cls, config: Any, run: Run) -> ModelConfig:
        """The model that a run starts from: what its stage `policy` made, or else the recipe's `model`."""
        made = run.path / "policy"
        return stored_model(config.model, locate(str(made)).folder) if listed(made / "checkpoints") else config.model

    @classmethod
    def protocol(cls, config: Any, source: TaskSource) -> Protocol | None:
        """The order in which the seats speak in training. None: one seat plays alone, or the world says whose turn it
        is."""
        return None

    @classmethod
    def evaluation_protocol(cls, config: Any, source: TaskSource) -> Protocol | None:
        """The order in which the seats speak in evaluations. Default: as in training."""
        return cls.protocol(config, source)

    @classmethod
    def learns_from(cls, config: Any) -> str:
        """The split of the task that is learnt from."""
        return "train"

    @classmethod
    def walk(cls, config: Any, source: TaskSource) -> Walk | None:
        """How training walks the starts of the task. None: it does not play, or chooses its starts itself."""
        return None

    @classmethod
    def starts(cls, config: Any, source: TaskSource, split: str, n: int | None, seed: int) -> Sequence[Task]:
        """The starts that an evaluation plays."""
        return draw_tasks(source, split, n, seed)

    @classmethod
    def open_source(cls, config: Any) -> TaskSource:
        """The task of a recipe. An empty split of its evaluations fails now, not at the first one."""
        source = get_task(config.task.name, **config.task.options)
        if config.eval.every:
            cls.starts(config, source, config.eval.split, 1, config.seed)
        return source

    @classmethod
    def imitated(cls, config: Any, tokenizer: Any, context: int) -> Sequence[list[Sample]]:
        """The samples of each row of the file that the run imitates."""
        return []

    # -- a run ----------------------------------------------------------------------------------------------------

    def unscored_samples(self, step: int) -> list[Sample] | None:
        """The samples of a step before any model has scored them; None if they must be played first."""
        return None

    def load_first_model(self) -> LM:
        """Load `first_model`, with the name that episodes store."""
        lm = load_model(self.first_model(self.config, self.run))
        lm.name = name_in_run(lm.name, self.run)
        return lm

    def collect_notes(self) -> contextlib.AbstractContextManager[list[Annotation]]:
        source = getattr(self, "source", None)
        return contextlib.nullcontext([]) if source is None else collecting_notes(source)

    def keep_plays(
        self,
        step: int,
        play: Callable[[], list[Episode]],
        measure: Callable[[list[Episode]], Sequence[Annotation]] | None = None,
    ) -> list[Episode]:
        """Play an evaluation during training, and store it in RUN/evaluation/000012.jsonl, with the judge's notes next
        to it, and those of `measure`. `self.noted` holds these notes."""
        with self.collect_notes() as notes:
            episodes = play()
        self.noted = [*notes, *(() if measure is None else measure(episodes))]
        path = write_segment(self.run.path / "evaluation", step, episodes)
        write_beside(path, self.noted)
        return episodes

    def judge_metrics(self, notes: Sequence[Annotation]) -> dict[str, float]:
        """What the world's judge says about plays besides their rewards, as metrics."""
        judge = getattr(getattr(self, "source", None), "judge", None)
        return {} if judge is None else judge.metrics(notes)

    @classmethod
    def train(cls, config: Any, run: Run, resume: bool = False) -> dict[str, float]:
        """Make the stages, then train from the first step, or resume. Returns the metrics of the last step."""
        config = pin_models(config, run)
        seats = cls.seats_of(config)  # fail before anything is loaded if a seat cannot be filled
        stages, begun = cls.stages(config, run), (run.path / "stages" / "used.json").exists()
        if stages:  # report mistakes before the stages take hours, and before any file is moved
            check_servers(seats)
            source = cls.open_source(config) if getattr(config, "task", None) else None
            if source is not None and listed(run.checkpoints_dir):
                keep_judge(source, run.path)  # a resumed run must use the judge that it began with
        if stages or begun:
            run_stages(run.path, stages, only=cls.only, redo=cls.redo, alone=True)
            if cls.only is not None:
                return {}
            begun_from(run.path, stages)
        method = cls(config, run)
        return train(method, method.config, run, resume)  # the method's own config: a method may change `steps`


def name_in_run(name: str, run: Run) -> str:
    """The name of a model that is stored in this run (or in the run that this one is a stage of), without the path of
    that run. Episodes store this name, so that equal runs in two places store equal episodes."""
    root = run.path.parent if is_stage(run.path) else run.path
    return str(Path(name).relative_to(root)) if Path(name).is_relative_to(root) else name


def reference_in_memory(model: ModelConfig, name: str | None = None) -> list[ModelInMemory]:
    """The reference as `load_reference` loads it: nothing where it is the policy below its adapter."""
    if name is None and model.lora and not is_adapter(model.name):
        return []
    return [ModelInMemory("ref", model.model_copy(update={"lora": None, "name": name or model.name}))]
