"""The judge that a recipe names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trailmark.score import config
from trailmark.score.base import Judge


def open_judge(reward: config.JudgeConfig | str | Mapping[str, Any]) -> Judge:
    """The judge that a recipe names: a text such as `my_file.py:score`, or a section with a `kind`. This is the only
    place that makes judges from settings. Models are loaded when they are first needed."""
    settings = config.judge_config(reward)
    if isinstance(settings, config.FunctionJudgeConfig):
        from trailmark.score.function import open_function

        return open_function(settings)
    if isinstance(settings, config.ModelJudgeConfig):
        from trailmark.score.judge import ModelJudge

        return ModelJudge(settings)
    from trailmark.score.likelihood_judge import LikelihoodJudge

    return LikelihoodJudge(settings)
