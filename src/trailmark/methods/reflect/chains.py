"""Runs that continue other runs: one merged log, and one curve (`trailmark curves`).

A run that started from a checkpoint of another run (`load.policy` of method reflect, `model.name` of other methods)
continues it. Its step k is step `offset + k` of the whole chain, where the offset counts the steps up to that
checkpoint over all earlier runs. Steps that the earlier run made after that checkpoint are another branch and are left
out.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trailmark.errors import DataError, RunError
from trailmark.runs.atomic_files import atomic_write
from trailmark.runs.checkpoints import is_checkpoint, listed
from trailmark.runs.named_models import read_models
from trailmark.runs.store import read_metrics, read_recipe

PANELS = ("success", "reward", "loss")  # the default metrics of a curve
COLOURS = ("#2f6fb3", "#c8501e", "#2a9d5c", "#8250a8", "#b08900", "#5b6770")


@dataclass(frozen=True)
class Link:
    """One run of a chain. Its steps up to `until` (None: all) follow `offset` earlier steps."""

    run: Path
    offset: int
    until: int | None = None


def origin(run: Path) -> tuple[Path, int] | None:
    """The run and step that a run started from: its stage `policy`, or another run. None if it did not start from a
    checkpoint of a run."""
    if taught := listed(run / "policy" / "checkpoints"):
        return run / "policy", int(taught[-1].name)
    recipe = read_recipe(run)
    named = {
        "load.policy": (recipe.get("load") or {}).get("policy"),
        "model.name": (recipe.get("model") or {}).get("name"),
    }
    key, name = next(((k, v) for k, v in named.items() if isinstance(v, str)), ("", ""))
    meant = read_models(run).get(key)
    folder = Path(meant["folder"] if meant else name).resolve()
    if not name or not folder.is_dir():
        return None
    at = folder if is_checkpoint(folder) else folder.parent
    if not is_checkpoint(at) or not at.name.isdigit() or not (at.parent.parent / "recipe.yaml").is_file():
        return None
    return at.parent.parent, int(at.name)


def chain(run: str | Path) -> list[Link]:
    """The runs that led to `run`, oldest first, with the run itself last."""
    here = Path(run).resolve()
    if not (here / "recipe.yaml").is_file():
        raise RunError(f"{run} is no run: it has no recipe.yaml.")
    links: list[tuple[Path, int | None]] = [(here, None)]
    while (before := origin(links[0][0])) is not None:
        if before[0] in [p for p, _ in links]:
            raise DataError("goes on from itself.", links[0][0] / "recipe.yaml")
        links.insert(0, before)
    out, offset = [], 0
    for path, until in links:
        out.append(Link(path, offset, until))
        offset += until or 0
    return out


def merged(run: str | Path) -> list[dict[str, Any]]:
    """The metrics of a run and of the runs that it continues, as one log. `step` counts over the whole chain; `run` and
    `own_step` say which run a row is from."""
    rows = []
    for link in chain(run):
        for row in read_metrics(link.run):
            if link.until is None or row["step"] <= link.until:
                rows.append({**row, "step": link.offset + row["step"], "run": link.run.name, "own_step": row["step"]})
    return rows


def smooth(steps: Sequence[int], values: Sequence[float], width: int) -> list[float]:
    """The mean over the values within `width` steps, half before and half after. Steps without a value are left out."""
    out, first, last = [], 0, 0
    for step in steps:
        while steps[first] < step - width // 2:
            first += 1
        while last < len(steps) and steps[last] <= step + width // 2:
            last += 1
        out.append(sum(values[first:last]) / (last - first))
    return out


def curve(rows: Sequence[Mapping[str, Any]], metric: str) -> tuple[list[int], list[float]]:
    """The steps and values of a metric. "loss" is the loss of reinforcement learning, or any loss that there is."""
    names = ("rl/loss", "loss", "policy/loss") if metric == "loss" else (metric,)
    first = [(r["step"], next((r[n] for n in names if isinstance(r.get(n), int | float)), None)) for r in rows]
    found = [(s, v) for s, v in first if v is not None]
    return [s for s, _ in found], [float(v) for _, v in found]


def draw_curves(runs: Sequence[str | Path], out: Path, metrics: Sequence[str] = PANELS, width: int = 99) -> Path:
    """Draw one picture: a panel for each metric, and a curve for each run with the runs that it continues."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    logs = {str(run): merged(run) for run in runs}
    kind, kinds = out.suffix.removeprefix(".").lower() or "png", FigureCanvasAgg.get_supported_filetypes()
    if kind not in kinds:
        raise DataError(f"--out {out}: '.{kind}' is no kind of picture. Known: {', '.join(sorted(kinds))}.")
    figure = Figure(figsize=(7, 2.4 * len(metrics)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(metrics), 1, sharex=True, squeeze=False)[:, 0]
    for axes, metric in zip(panels, metrics):
        for colour, (name, rows) in zip(_endless(len(logs)), logs.items()):
            steps, values = curve(rows, metric)
            if steps:
                axes.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
                axes.plot(steps, smooth(steps, values, width), color=colour, linewidth=1.8, label=Path(name).name)
        if not axes.lines:
            known = sorted({k for rows in logs.values() for r in rows for k in r} - {"step", "run", "own_step"})
            raise DataError(f"no run logged '{metric}'. Logged: {', '.join(known)}.")
        axes.set_ylabel(metric)
        axes.grid(alpha=0.2)
    panels[0].legend(frameon=False, fontsize="small")
    panels[-1].set_xlabel("step, counted through continued runs")
    held = io.BytesIO()
    figure.savefig(held, format=kind)
    out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(out, held.getvalue())
    return out


def _endless(n: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(n)]


def write_merged(run: str | Path, out: Path) -> int:
    """Write the merged log as JSON lines. Returns the number of lines."""
    if out.exists():
        raise RunError(f"{out} exists: choose another file.")
    rows = merged(run)
    out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(out, "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows).encode())
    return len(rows)
