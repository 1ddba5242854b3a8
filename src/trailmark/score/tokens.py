"""Scores of stored episodes, token by token: log-probs, entropies, values. One annotation per turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trailmark.models.lm import LM


def source_of(lm: LM) -> str:
    """Identifies the model: its name, and a fingerprint of its weights."""
    return f"{lm.name}@{lm.fingerprint()[:12]}"
