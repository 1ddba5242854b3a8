"""Data that a study makes before its arms, in the place of a run: `before: {answers: {gold: {task: arith}}}`."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any

from pydantic import Field, PositiveInt

from trailmark.config import Config
from trailmark.runs.stages import Stage


class StudyData(Config):
    """Derive from this, declare it (`PROVIDES["study_data"]`), and a study may name it."""

    @abstractmethod
    def stage(self, name: str, seed: int) -> Stage:
        """The stage that makes the data, drawn with the seed."""


class Gold(StudyData):
    """Worked answers of a task, as `trailmark data gold` writes them: one file."""

    task: str = Field(description="a task whose starts carry a gold answer")
    options: dict[str, Any] = Field({}, description="options of the task")
    n: PositiveInt = Field(1000, description="number of rows")
    split: str = Field("train", description="which split")

    def stage(self, name: str, seed: int) -> Stage:
        from trailmark.data import gold

        def make(path: Path) -> dict[str, int]:
            path.unlink(missing_ok=True)
            return {"rows": gold.make(self.task, path, self.options, self.n, self.split, seed)}

        return Stage(name, make, {**self.model_dump(mode="json"), "seed": seed}, single=True)
