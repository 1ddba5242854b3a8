"""The curves as PNG files, for papers and chats. Matplotlib is imported here and nowhere else."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trailmark.errors import RunError
from trailmark.runs.atomic_files import LINK, atomic_write, cannot_write

TRAIN, EVAL = "#2f6fb3", "#c8501e"
FAR = 1e300  # larger numbers are drawn here: matplotlib takes differences of twice their size


def smooth(values: Sequence[float], weight: float) -> list[float]:
    """An exponential mean that starts at the first value, without a lasting weight on it:
    s_t = Σ w^(t-k) v_k / Σ w^(t-k)."""
    out: list[float] = []
    total = count = 0.0
    for v in values:
        total, count = weight * total + v, weight * count + 1
        out.append(total / count)
    return out


def write_plots(curves: Sequence[Mapping[str, Any]], folder: Path, title: str = "", weight: float = 0.8) -> list[Path]:
    """One PNG per metric, and one of all metrics that ever changed (`all.png`). Training is pale with a smoothed line,
    evaluation is dots."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    written: list[Path] = []
    names: set[str] = set()
    if folder.is_symlink():
        raise RunError(f"{folder} {LINK}.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for c in curves:
            figure = Figure(figsize=(6, 3.6), dpi=120, layout="constrained")
            FigureCanvasAgg(figure)
            _draw(figure.add_subplot(), c, weight)
            name = re.sub(r"[^A-Za-z0-9_.-]", "-", c["name"]).lstrip(".") or "metric"
            while name.lower() in names:
                name += "-"
            names.add(name.lower())
            written.append(_save(figure, folder / f"{name}.png"))
        moving = [c for c in curves if len({v for _, v in (*c["train"], *c["eval"])}) > 1] or list(curves)
        columns = min(3, len(moving))
        rows = -(-len(moving) // columns)
        figure = Figure(figsize=(4.5 * columns, 2.8 * rows), dpi=100, layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(title, parse_math=False)
        for i, c in enumerate(moving):
            _draw(figure.add_subplot(rows, columns, i + 1), c, weight)
        _save(figure, folder / "all.png")
    except OSError as e:
        raise cannot_write(folder, e) from e
    return [*written, folder / "all.png"]


def _save(figure: Any, path: Path) -> Path:
    held = io.BytesIO()
    figure.savefig(held, format="png")
    atomic_write(path, held.getvalue())
    return path


def _draw(axes: Any, curve: Mapping[str, Any], weight: float) -> None:
    train, test = ([(step, max(-FAR, min(FAR, v))) for step, v in curve[k]] for k in ("train", "eval"))
    if train:
        steps, values = zip(*train)
        axes.plot(steps, values, color=TRAIN, alpha=0.3, linewidth=1)
        axes.plot(steps, smooth(values, weight), color=TRAIN, linewidth=1.8, label="training")
    if test:
        steps, values = zip(*test)
        axes.plot(steps, values, color=EVAL, marker="o", markersize=4, linewidth=1.2, label="evaluation")
        axes.legend(frameon=False, fontsize="small")
    axes.set_title(curve["name"], fontsize="medium", loc="left", parse_math=False)
    axes.set_xlabel("step", fontsize="small")
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
