"""Rows with a planted hint, as data that a study makes before its arms."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, PositiveInt

from trailmark.data.for_studies import StudyData
from trailmark.runs.stages import Stage


class HintRows(StudyData):
    """Conversations with a planted hint, as `trailmark data hints` writes them: a folder."""

    train: PositiveInt = Field(512, description="rows to train on")
    val: PositiveInt = Field(64, description="rows of val")
    lessons: PositiveInt = Field(9000, description="lessons that make the reader")

    def stage(self, name: str, seed: int) -> Stage:
        from trailmark.methods.vrcli.stories import hints

        def make(folder: Path) -> dict[str, int]:
            folder.mkdir(parents=True, exist_ok=True)
            made = hints.write(folder, hints.Hints(self.train, self.val, self.val, self.lessons, seed=seed))
            return dict(made.kept)

        return Stage(name, make, {**self.model_dump(mode="json"), "seed": seed}, outputs=hints.FILES)
