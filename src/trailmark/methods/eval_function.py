"""A user's own number about evaluations: `eval_fn: my_file.py:name`.

The function has the signature of a reward (`score/function.py`). It is asked about every finished play of an evaluation
during training. Its mean is the metric `eval/name`, which may also choose the best checkpoint. Each number is stored
with the evaluation. Nothing is trained on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trailmark.config import ModelConfig
from trailmark.errors import RecipeError
from trailmark.rollout.judging import judge_episodes
from trailmark.score.config import FunctionJudgeConfig
from trailmark.score.function import FunctionJudge, open_function
from trailmark.types import Annotation, Episode, Scored

OURS = {"reward", "turns", "written_tokens", "success", "invalid", "failed", "improvement", "copied", "marker_rate",
        "length_correlation", "empty_improvement", "other_improvement", "plan_words"}  # fmt: skip


class EvalFunction:
    def __init__(self, path: str, model: ModelConfig, run: Path):
        """`model` is read by a function that asks for a `scorer`: the one that training starts from."""
        frozen = model.model_copy(update={"lora": None, "gradient_checkpointing": False})
        judge = open_function(FunctionJudgeConfig(path=path, model=frozen), "eval_fn")
        if not isinstance(judge, FunctionJudge):
            raise RecipeError(f"eval_fn: {path} is a class: name a function.")
        self.judge, self.name = judge, path.rpartition(":")[2]
        if self.name in OURS:
            raise RecipeError(f"eval_fn: there is a metric eval/{self.name} already: give the function another name.")
        judge.keep(run / "eval_fn")

    def notes(self, source: Any, episodes: Sequence[Episode]) -> list[Annotation]:
        """The function's number for each finished play."""
        played = [e for e in episodes if isinstance(e.outcome, Scored)]
        verdicts = judge_episodes(source, played, self.judge)
        found = [(e, v.outcome) for e, v in zip(played, verdicts)]
        return [Annotation(e.id, self.name, "episode", (o.reward,), None, self.judge.stamp)
                for e, o in found if isinstance(o, Scored)]  # fmt: skip

    def metrics(self, notes: Sequence[Annotation]) -> dict[str, float]:
        mine = [a.values[0] for a in notes if a.name == self.name and a.source == self.judge.stamp]
        return {self.name: sum(mine) / len(mine)} if mine else {}
