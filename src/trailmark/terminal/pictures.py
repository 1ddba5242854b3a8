"""How pictures look, and how they are written. matplotlib is imported when needed."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trailmark.runs.atomic_files import atomic_write

BLUE, GREY = "#2a6f97", "#8d99ae"
STYLE = {"svg.hashsalt": "trailmark", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}


@contextlib.contextmanager
def picture(place: Path, size: tuple[float, float]) -> Iterator[Any]:
    """A figure to draw in, which is then written as PLACE.png and PLACE.svg. The same drawing gives the same bytes."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        for kind, meta in (("png", {"Software": None}), ("svg", {"Date": None})):
            data = io.BytesIO()
            figure.savefig(data, format=kind, dpi=150, metadata=meta)
            atomic_write(place.with_name(f"{place.name}.{kind}"), data.getvalue())
