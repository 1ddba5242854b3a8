"""The plan in a model's answer: what follows the last marker."""

from __future__ import annotations

from collections.abc import Sequence

from trailmark.score.likelihood import after_markers

MARKERS = ("In summary:", "In summary,", "Detailed Plan:")


def plan_of(answer: str, markers: Sequence[str] = MARKERS) -> str:
    """The text after the last occurrence of each marker, cut in the order of the markers. Markers are case-sensitive. A
    marker with nothing after it gives an empty plan."""
    return after_markers(answer, markers).strip()


def has_marker(answer: str, markers: Sequence[str] = MARKERS) -> bool:
    return any(m in answer for m in markers)


def marker_rate(answers: Sequence[str], markers: Sequence[str] = MARKERS) -> float:
    """The share of answers with a marker."""
    return sum(has_marker(a, markers) for a in answers) / len(answers)
