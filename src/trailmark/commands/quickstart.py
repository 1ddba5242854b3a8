"""`trailmark quickstart`: a small example of a whole method, from training to a table and a page.

A method is shown if its folder brings a quickstart (`methods/quickstart.py`). It trains under `out` and returns its
results; then come the table, the report and what to read next.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trailmark import MOST_SEED, registry, stopping
from trailmark.errors import RecipeError, RunError, nearest

if TYPE_CHECKING:
    from trailmark.methods.quickstart import Results


def quickstart(
    method: Annotated[str, typer.Option(help="The method to show, such as reflect, oreo, lpr or vrcli.")] = "reflect",
    out: Annotated[Path, typer.Option(help="Where the runs go.")] = Path("runs/quickstart"),
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Random seed.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Resume an interrupted quickstart.")] = False,
    quiet: Annotated[bool, typer.Option("--json", help="Print only the JSON line of results.")] = False,
) -> None:
    """Run a whole method at a small size, on two cores, in minutes, and show the results."""
    if method not in (known := registry.names("quickstarts")):
        raise RecipeError(f"there is no quickstart for method '{method}' yet.{nearest(method, known)}")
    if out.exists() and not out.is_dir():
        raise RunError(f"{out} is a file: choose another directory with --out DIR.")
    if out.exists() and any(out.iterdir()) and not resume:
        raise RunError(f"{out} is not empty: go on with --resume, or choose another directory with --out DIR.")
    words = ["trailmark", "quickstart", "--method", method, "--out", str(out), "--seed", str(seed), "--resume"]
    with stopping.advising(lambda: f"go on with: {shlex.join(words)}"):
        say = (lambda text: None) if quiet else (lambda text: print(text, file=sys.stderr, flush=True))
        finish(out, registry.load("quickstarts", method)(out, seed, resume, say), quiet)


def finish(out: Path, results: Results, quiet: bool) -> None:
    """Write the table for people, the page of the run, and one JSON line for programs."""
    from trailmark.evaluate.run import summarise
    from trailmark.evaluate.tables import table, warnings
    from trailmark.report import write_report
    from trailmark.runs.atomic_files import atomic_write
    from trailmark.runs.store import read_segment
    from trailmark.terminal.output import finish as show

    r = results
    rows = [summarise(read_segment(path), name) for name, path in r.files.items()]
    page = write_report(r.run)
    listed = {name: str(path) for name, path in r.files.items()}
    result = {"command": "quickstart", "rows": rows, "files": listed, "report": str(page)}
    atomic_write(out / "quickstart.json", (json.dumps(result, indent=1) + "\n").encode())
    short = [{**row, "metrics": {k: v for k, v in row["metrics"].items() if k in r.metrics}} for row in rows]
    words = [
        *([r.note] if r.note else []),
        f"The same numbers from the episodes: trailmark eval --episodes {r.files[r.main]}",
        f"What happened, and why: {page}",
        *([f"Read next: {r.read_next}"] if r.read_next else []),
    ]
    show(result, quiet, lambda width: [table(short, r.title, width), *warnings(rows), *words])
