"""The judge that a recipe names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trailmark import registry
from trailmark.score.base import Judge
from trailmark.score.config import JudgeConfig, judge_config


def open_judge(reward: JudgeConfig | str | Mapping[str, Any]) -> Judge:
    """The judge that a recipe names: a text such as `my_file.py:score`, or a section with a `kind`. This is the only
    place that makes judges from settings. Models are loaded when they are first needed."""
    settings = judge_config(reward)
    return registry.resolve(settings.opens)(settings)
