"""ALFWorld in plain Python: household text games, without the slow start of the original.

    engine        one game, grounded: plays, copies, admissible commands
    games         where games come from: folders, packed files, a download
    source        the task: labelled actions or Thought/Action text
    dialect       `move X to Y` and `put X in/on Y`
    experts       the expert that sees everything (`exploring`: the expert that knows only its observations)
    usual_places  where things usually are, for the exploring expert
    trajectories  published expert plays, checked by replay

`from trailmark.tasks.alfworld import Alfworld, Games, Seeing, Exploring` loads only what it names. So the engine needs
nothing but Python.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trailmark.tasks.alfworld.experts import Exploring, Seeing
    from trailmark.tasks.alfworld.games import Games
    from trailmark.tasks.alfworld.source import Alfworld

__all__ = ["Alfworld", "Exploring", "Games", "Seeing"]

_WHERE = {"Alfworld": "source", "Exploring": "experts", "Games": "games", "Seeing": "experts"}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module '{__name__}' has no '{name}'")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
