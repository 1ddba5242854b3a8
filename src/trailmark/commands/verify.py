"""`trailmark verify`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from trailmark.verify.report import Report


def verify(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print only the report, as one line of JSON.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Most episodes, turns or rows that a check looks at.")] = 64,
) -> None:
    """Check a run on its own data: masks, groups, rewards, sampler against learner, packing, checkpoints, replay.

    Writes RUN/verify.json. Exit code 0: all is well or does not apply; 1: something failed.
    """
    from trailmark.errors import RunError
    from trailmark.runs.atomic_files import atomic_write
    from trailmark.runs.store import Run

    Run.open(run)  # before torch is imported
    from trailmark.verify import verify as certify

    report = certify(run, limit=limit)
    text = report.to_json()
    try:
        atomic_write(run / "verify.json", text.encode() + b"\n")
    except RunError as e:  # such as a folder that may only be read
        typer.echo(f"warning: the report is not stored: {e}", err=True)
    if as_json:
        typer.echo(text)
    else:
        _table(report)
    raise typer.Exit(0 if report.ok else 1)


def _table(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from trailmark.terminal.output import print_table

    colours = {"pass": "green", "fail": "bold red", "skip": "yellow"}
    table = Table("check", "", "what", box=None, pad_edge=False)
    for c in report.checks:
        what = "\n".join([c.what, *(f"note: {n}" for n in c.notes)])
        table.add_row(c.name, Text(c.status, colours[c.status]), Text(what))
    print_table(table, Console())
    failed = [c.name for c in report.checks if c.status == "fail"]
    numbers = report["replay"].numbers
    left = numbers.get("judged", 0) - numbers.get("judged_again", 0)
    but = f", but for the rewards of {left} judged plays: their judge was not asked again" if left else ""
    typer.echo(f"{report.run}: " + (f"failed: {', '.join(failed)}" if failed else f"verified{but}"))
