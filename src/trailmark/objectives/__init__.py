"""Objectives by name, for example `get_objective({"kind": "clipped", "beta": 0.04})`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trailmark.errors import RecipeError, nearest
from trailmark.objectives.base import Note, Objective, Term
from trailmark.objectives.classify import Classify
from trailmark.objectives.clipped import Clipped
from trailmark.objectives.kto import Kto
from trailmark.objectives.pairwise import Pairwise
from trailmark.objectives.ranking import Ranking
from trailmark.objectives.sft import Sft
from trailmark.objectives.soft_bellman import SoftBellman
from trailmark.objectives.value import Value
from trailmark.objectives.weighted_logp import WeightedLogp
from trailmark.recipe import Loaded, resolve

KINDS = (Sft, WeightedLogp, Clipped, Value, Classify, Pairwise, Ranking, Kto, SoftBellman)
OBJECTIVES: dict[str, type[Objective]] = {k.model_fields["kind"].default: k for k in KINDS}


def get_objective(spec: Mapping[str, Any]) -> Objective:
    kind = str(spec.get("kind", ""))
    if kind not in OBJECTIVES:
        raise RecipeError(f"unknown objective '{kind}'.{nearest(kind, OBJECTIVES)}")
    return resolve(Loaded(f"objective {kind}", dict(spec)), OBJECTIVES[kind])


__all__ = [
    "OBJECTIVES", "Classify", "Clipped", "Kto", "Note", "Objective", "Pairwise", "Ranking", "Sft", "SoftBellman",
    "Term", "Value", "WeightedLogp", "get_objective",
]  # fmt: skip
