"""A run to look at: one HTML page, plots, and episodes in the terminal.

read        read what is complete on disk
pieces      token ids as pieces of text
episodes    episodes as the page shows them: who wrote what, what was trained, who earned what
tables      metrics as curves, evaluation files as rows
concerns    what a person should look at first
page        everything in one file (page.html is the template)
plots       the curves as PNG
terminal    `trailmark inspect`
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trailmark.evaluate.run import FailedAs


def write_report(
    run: str | Path,
    out: str | Path | None = None,
    plots: bool = True,
    tokenizer: str | None = None,
    failed: FailedAs = "apart",
) -> Path:
    """Write the page of a run (`RUN/report.html`) and its plots (`plots/` beside the page). Returns the page's path.
    `failed` says whether failed episodes of an evaluation count as lost."""
    from trailmark.errors import RunError
    from trailmark.report.page import build, render
    from trailmark.runs.atomic_files import atomic_write, cannot_write

    page = Path(out) if out is not None else Path(run) / "report.html"
    data = build(run, tokenizer, failed)
    try:
        try:
            page.parent.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise cannot_write(page, e) from e
        atomic_write(page, render(data).encode())
    except RunError as e:
        raise e if out is not None else RunError(f"{e} To write it elsewhere: --out FILE.") from e
    if plots and data["curves"]:
        from trailmark.report.plots import write_plots

        write_plots(data["curves"], page.parent / "plots", data["name"])
    return page
