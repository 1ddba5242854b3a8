"""What is available of a run: its recipe, method and task, episodes, samples, and the weights of the kept versions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trailmark.episodes import evenly
from trailmark.errors import DataError, TrailmarkError
from trailmark.runs.store import Run, read_recipe, read_segment, segments
from trailmark.samples import build_samples, scored
from trailmark.score.config import pin_options
from trailmark.seats.model_names import models_in
from trailmark.seats.pinned_models import pin_models
from trailmark.types import Episode, Sample

if TYPE_CHECKING:
    from trailmark.models.lm import LM

MOST_SEGMENTS = 32
Build = Callable[..., list[Sample]]


class Missing(Exception):
    """Something that a check needs is not available; the check is skipped with this reason."""


class Evidence:
    def __init__(self, path: str | Path, build: Build | None = None, limit: int = 64):
        self.run, self.build, self.limit = Run.open(path), build or build_samples, limit
        self.unreadable: list[str] = []
        self.read: dict[int, list[Episode]] = {}
        self.resolve_problem = ""
        try:
            self.files = segments(self.run.episodes_dir)
        except DataError as problem:
            self.files, self.unreadable = [], [str(problem)]
        kept = {v + 1 for v in self.checkpoints}
        wanted = {p.name for p in evenly(self.files, MOST_SEGMENTS)}
        for path in self.files:
            if path.name in wanted or int(path.stem) in kept:
                try:
                    self.read[int(path.stem)] = read_segment(path)
                except DataError as problem:
                    self.unreadable.append(str(problem))

    # -- recipe ---------------------------------------------------------------------------------------------------

    @cached_property
    def method(self) -> Any:
        from trailmark.methods import get_method

        return get_method(str(read_recipe(self.run).get("method")))

    @cached_property
    def config(self) -> Any:
        from trailmark.config import resolve

        try:
            return resolve(read_recipe(self.run), self.method.Config)
        except TrailmarkError as problem:
            self.resolve_problem = str(problem)
            raise Missing(f"the recipe does not resolve: {problem}") from problem

    @cached_property
    def source(self) -> Any:
        """The task, made from the recipe. If it takes its labels from the policy's tokenizer, it gets the run's."""
        from trailmark.tasks import get_task

        task = getattr(self.config, "task", None)
        if task is None:
            raise Missing("the recipe has no task")
        try:
            source: Any = get_task(task.name, **pin_options(task.options, self.run.path))
            if source.binds:
                source.bind(self.weights.any().tokenizer)
            return source
        except TrailmarkError as problem:
            raise Missing(f"the task cannot be made: {problem}") from problem

    # -- weights --------------------------------------------------------------------------------------------------

    @cached_property
    def checkpoints(self) -> dict[int, Path]:
        """Step (that is, version) -> folder, oldest first."""
        from trailmark.runs.checkpoints import listed

        return {int(p.name): p for p in listed(self.run.checkpoints_dir)}

    @cached_property
    def weights(self) -> Weights:
        return Weights(self)

    # -- episodes and samples -------------------------------------------------------------------------------------

    @property
    def episodes(self) -> list[Episode]:
        if not self.read:
            raise Missing("the run has no episodes" if not self.unreadable else "no episodes can be read")
        return [e for index in sorted(self.read) for e in self.read[index]]

    def sample_episodes(self, wanted: Callable[[Episode], bool] = lambda e: True) -> list[Episode]:
        """At most `limit` episodes, spread over the run."""
        return evenly([e for e in self.episodes if wanted(e)], self.limit)

    def seats(self, e: Episode) -> list[str]:
        """The seats of an episode whose tokens were trained."""
        named = [name for name, p in e.players.items() if p.kind == "trained"]
        return named or (["policy"] if any(t.seat == "policy" for t in e.turns) else [])

    def trained(self, episodes: Sequence[Episode]) -> Iterator[tuple[str, list[Episode]]]:
        """Each trained seat with the episodes it took part in."""
        by_seat: dict[str, list[Episode]] = {}
        for e in episodes:
            for seat in self.seats(e):
                if any(t.seat == seat and t.tokens for t in e.turns):
                    by_seat.setdefault(seat, []).append(e)
        yield from by_seat.items()

    @property
    def mean(self) -> tuple[Any, int]:
        """How the recipe averages tokens, and the constant length if it divides by one."""
        sampling = getattr(self.config, "sampling", None)
        return getattr(self.config, "mean", "token"), getattr(sampling, "max_tokens", 1)

    @property
    def conversations(self) -> bool:
        """Whether the run imitates a file of conversations."""
        return self.method.imitates

    def rows(self) -> Sequence[list[Sample]]:
        """The samples of each row of the data of an imitation run."""
        if not Path(self.config.data).is_file():
            raise Missing(f"the data file '{self.config.data}' is not here")
        lm = self.weights.any()
        return self.method.imitated(self.config, lm.tokenizer, lm.context)

    def batch(self) -> list[Sample]:
        """A batch as the newest step would train on it. Its advantages are invented, so that none is 0."""
        if self.conversations:
            return [s for row in evenly(self.rows(), self.limit) for s in row]
        for index in sorted(self.read, reverse=True):
            good = scored(evenly(self.read[index], self.limit))[0]
            good = [e for e in good if not any(t.law.temperature == 0 for t in e.turns)]
            mean, length = self.mean
            out: list[Sample] = []
            draw = np.random.default_rng(0)
            for seat, mine in self.trained(good):
                turns = {e.id: sum(t.seat == seat and bool(t.tokens) for t in e.turns) for e in mine}
                made_up = {name: (draw.normal(size=n) + 2.0).tolist() for name, n in turns.items()}
                out += self.build(mine, seat, {"advantage": made_up}, mean, length)
            if out:
                return out
        self.episodes  # noqa: B018  (raises Missing if there are none)
        raise Missing("no scored episode has tokens of a trained seat that were drawn at a temperature above 0")


class Weights:
    """One model that can take the weights of any available version. It is made from the newest checkpoint that loads.
    Version 0 is the model that the run began with, if that has the same shape (a method may add words of its own)."""

    def __init__(self, evidence: Evidence):
        self.evidence = evidence
        self.broken: dict[int, str] = {}
        self.problem = ""  # why the recipe's own model cannot be loaded
        self._lm: LM | None = None
        self._first: dict[str, Any] | None = None
        config = evidence.config.model
        for version in reversed(evidence.checkpoints):
            if self._lm is None and (folder := self.folder(version)) is not None:
                self._lm = self._load(
                    version, config.model_copy(update={"name": str(folder), "lora": None, "tokenizer": None})
                )
        first = self._load(0, None) if self.folder(0) is None else None
        if first is not None:
            self._lm = self._lm or first
            shapes = {n: p.shape for n, p in self._lm.parameters()}
            if {n: p.shape for n, p in first.parameters()} == shapes:
                self._first = {n: p.detach().clone() for n, p in first.parameters()}

    def _load(self, version: int, config: Any) -> LM | None:
        """The model of a section; without one, the model that the run began with."""
        from trailmark.models.load import load_model

        ev = self.evidence
        try:
            return load_model(config or ev.method.first_model(pin_models(ev.config, ev.run, write=False), ev.run))
        except Exception as problem:  # a damaged file raises anything
            why = str(problem) if isinstance(problem, TrailmarkError) else f"{type(problem).__name__}: {problem}"
            if version:
                self.broken[version] = why
            else:
                self.problem = why
            return None

    def any(self) -> LM:
        """The model with the newest weights that can be loaded."""
        for version in dict.fromkeys([*reversed(self.evidence.checkpoints), 0]):
            if (lm := self.at(version)) is not None:
                return lm
        raise Missing(f"no weights are available: {next(iter(self.broken.values()), self.problem)}")

    def folder(self, version: int, seat: str = "policy") -> Path | None:
        """The folder of a seat's trained model in a checkpoint."""
        root = self.evidence.checkpoints.get(version)
        if root is None:
            return None
        held = models_in(root)
        return held.get(seat) or held.get("policy") or next(iter(held.values()), None)

    def at(self, version: int, seat: str = "policy") -> LM | None:
        """The model of version `version`, or None if its weights are not available."""
        from trailmark.learn.checkpoint import load_weights

        if self._lm is None or version in self.broken:
            return None
        if version == 0 and self._first is not None:
            own = dict(self._lm.parameters())
            for name, tensor in self._first.items():
                own[name].data.copy_(tensor)
            return self._lm
        if (folder := self.folder(version, seat)) is None:
            return None
        try:
            load_weights(self._lm, folder)
        except Exception as problem:  # a damaged file raises anything
            self.broken[version] = f"{folder}: {type(problem).__name__}: {problem}"
            return None
        return self._lm

    @property
    def versions(self) -> list[int]:
        """The versions whose weights are available, oldest first."""
        return [v for v in dict.fromkeys((0, *self.evidence.checkpoints)) if self.at(v) is not None]
