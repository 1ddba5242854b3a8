"""What a method is: a class with a `Config`, the updates of each step, and answers about its runs.

`trailmark train` calls `check` and `train`. `eval`, `verify`, `serve` and `report` ask the other class methods about a
run that exists, so none of them knows a method by its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from trailmark.config import EngineConfig, ModelConfig, OptimConfig, RunConfig, SamplingConfig
from trailmark.learn.loop import Training, train
from trailmark.models.adapters import is_adapter
from trailmark.models.lm import LM
from trailmark.models.load import load_model
from trailmark.rollout.play import Protocol, Seat
from trailmark.runs.checkpoints import listed
from trailmark.runs.stages import Stage, begun_from, run_stages
from trailmark.runs.store import Run
from trailmark.seats.config import AnyKind, LocalSeat, check_seats, filled
from trailmark.seats.locate import locate, stored_model
from trailmark.seats.names import fix_names
from trailmark.seats.table import check_servers, sampling_law
from trailmark.tasks import get_task, keep_judge
from trailmark.tasks.base import TaskSource, draw_tasks
from trailmark.types import Sample, Task


@dataclass(frozen=True)
class Held:
    """A model that a run holds."""

    name: str
    model: ModelConfig
    optim: OptimConfig | None = None  # how it is trained; None: it is frozen
    engine: EngineConfig | None = None  # how it is sampled from; None: it is not
    output: bool = True  # whether its output layer is read, and not only a head


class Method(Training):
    """Derive from this, set `Config`, and define `updates`. `self.config` and `self.run` are set by `__init__`."""

    Config: ClassVar[type[RunConfig]] = RunConfig
    staged: ClassVar[tuple[str, ...]] = ()  # keys of the recipe that only its stages read
    imitates: ClassVar[bool] = False  # whether its runs imitate the file `config.data`, and `imitated` gives its rows

    def __init__(self, config: Any, run: Run):
        self.config, self.run = config, run

    # -- before a run ---------------------------------------------------------------------------------------------

    @classmethod
    def check(cls, config: Any) -> list[str]:
        """Lines that `--dry-run` adds to the recipe."""
        data = getattr(config, "data", None)
        if not isinstance(data, str) or not data:
            return []
        from trailmark.formats.messages import count_rows

        return [f"data: {data}, {f'{count_rows(data)} rows' if Path(data).is_file() else 'which is not here yet'}"]

    @classmethod
    def holds(cls, config: Any) -> list[Held]:
        """The models that a run holds, for a plan of its memory. Default: one that is trained, and sampled from if there
        is a task."""
        engine = getattr(config, "engine", None) if getattr(config, "task", None) is not None else None
        return [Held("policy", config.model, config.learner.optim, engine)]

    @classmethod
    def trainings(cls, config: Any) -> list[tuple[str, type[Method], Any]]:
        """The trainings of a recipe in their order, for a plan: a name, the method, and its recipe, which must be one that
        can begin now. Default: one."""
        return [("", cls, config)]

    @classmethod
    def stages(cls, config: Any, run: Run) -> list[Stage]:
        """What is made before training, in RUN/stages. A training stage called `policy` makes the model that the run
        begins with. Default: nothing."""
        return []

    @classmethod
    def can_go_on(cls, config: Any, run: Run) -> None:
        """Refuse to go on with a run that this version cannot go on with. Default: it can."""
        return None

    # -- about a run ----------------------------------------------------------------------------------------------

    @classmethod
    def seats_of(cls, config: Any) -> dict[str, AnyKind]:
        """Who sits where: as the `seats` section says, where the recipe has one; else one seat, `policy`, with the
        model that is trained."""
        given = getattr(config, "seats", None) or {"policy": LocalSeat(trained=True)}
        check_seats(given)
        return filled(given, getattr(config, "sampling", None), getattr(config, "engine", None))

    @classmethod
    def first_model(cls, config: Any, run: Run) -> ModelConfig:
        """The model that a run begins with: what its stage `policy` made, if it has one; else the recipe's `model`."""
        made = run.path / "stages" / "policy"
        return stored_model(config.model, locate(str(made)).folder) if listed(made / "checkpoints") else config.model

    @classmethod
    def protocol(cls, config: Any, source: TaskSource) -> Protocol | None:
        """Who speaks when, in training. None: one seat plays alone, or the world says whose turn it is."""
        return None

    @classmethod
    def evaluation_protocol(cls, config: Any, source: TaskSource) -> Protocol | None:
        """Who speaks when, in evaluations. Default: as in training."""
        return cls.protocol(config, source)

    @classmethod
    def starts(cls, config: Any, source: TaskSource, split: str, n: int | None, seed: int) -> Sequence[Task]:
        """The starts that an evaluation plays."""
        return draw_tasks(source, split, n, seed)

    @classmethod
    def imitated(cls, config: Any, tokenizer: Any, context: int) -> Sequence[list[Sample]]:
        """The samples of each row of the file that a run imitates."""
        return []

    # -- a run ----------------------------------------------------------------------------------------------------

    def drawn(self, step: int) -> list[Sample] | None:
        """The samples of a step before any model has scored them; None if they must be played first."""
        return None

    def load_first_model(self) -> LM:
        """`first_model`, loaded, with the name that episodes store."""
        lm = load_model(self.first_model(self.config, self.run))
        lm.name = name_in_run(lm.name, self.run)
        return lm

    @classmethod
    def train(cls, config: Any, run: Run, resume: bool = False) -> dict[str, float]:
        """Make the stages, then train from the first step, or go on. Gives the metrics of the last step."""
        config = fix_names(config, run)
        seats = cls.seats_of(config)  # seats that cannot be filled are refused before anything is loaded
        stages, begun = cls.stages(config, run), (run.path / "stages" / "used.json").exists()
        if stages:  # a mistake is told before hours of stages, and before anything is set aside
            check_servers(seats)
            source = None if (task := getattr(config, "task", None)) is None else get_task(task.name, **task.options)
            if source is not None and listed(run.checkpoints_dir):
                keep_judge(source, run.path)  # it must be the judge that the run began with
        if stages or begun:
            run_stages(run.path / "stages", stages)
            begun_from(run.path, stages)
        method = cls(config, run)
        return train(method, method.config, run, resume)  # its own config: a method may count `steps` itself


def name_in_run(name: str, run: Run) -> str:
    """The name of a model that lies in the run, or in the run that this one is a stage of, without the place of that
    run. Episodes store it, and equal runs in two places must store equal episodes."""
    root = run.path.parent.parent if run.path.parent.name == "stages" else run.path
    return str(Path(name).relative_to(root)) if Path(name).is_relative_to(root) else name


def reference_held(model: ModelConfig, name: str | None = None) -> list[Held]:
    """The reference as `load_reference` loads it: nothing where it is the policy below its adapter."""
    if name is None and model.lora and not is_adapter(model.name):
        return []
    return [Held("ref", model.model_copy(update={"lora": None, "name": name or model.name}))]


def trained_seat(engine: Any, name: str, s: SamplingConfig) -> Seat:
    """The seat of the model that is trained."""
    return Seat(name, engine, sampling_law(s), s.max_tokens, tuple(s.stop), "trained")
