"""`trailmark report` and `trailmark inspect`. Heavy modules are imported when they run."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from trailmark.evaluate.options import FailedAs, Failures


class By(StrEnum):
    """What the colours of written tokens show."""

    advantage = "advantage"
    logp = "logp"
    logq = "logq"
    mask = "mask"
    step = "step"


_TOKENIZER = "A folder, a name on the hub, smollm2, or tiny; else that of the newest checkpoint."


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory; the run may still be training.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to write, if not RUN/report.html.")] = None,
    show: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    plots: Annotated[bool, typer.Option(help="Write the curves as PNG into plots/ next to the page.")] = True,
    tokenizer: Annotated[str | None, typer.Option(metavar="NAME", help=_TOKENIZER)] = None,
    failed: FailedAs = Failures.apart,
) -> None:
    """Write one HTML page that shows a run: curves, episodes with credit per token, two plays side by side,
    warnings."""
    from trailmark.report import write_report

    page = write_report(run, out, plots, tokenizer, failed.value)
    typer.echo(page)
    if show:
        import webbrowser

        webbrowser.open(page.resolve().as_uri())


def inspect(
    episodes: Annotated[Path, typer.Argument(metavar="EPISODES", help="A file or folder of episodes, or a run.")],
    episode: Annotated[str | None, typer.Option(metavar="ID", help="Show this one in detail.")] = None,
    seat: Annotated[str | None, typer.Option(help="Only the turns of this seat.")] = None,
    by: Annotated[By, typer.Option(help="What the colours show.")] = By.advantage,
    tokens: Annotated[bool | None, typer.Option(help="A line for every token; default: if they are few.")] = None,
    tokenizer: Annotated[str | None, typer.Option(metavar="NAME", help=_TOKENIZER)] = None,
    color: Annotated[bool | None, typer.Option(help="Use colours; default: if the terminal shows them.")] = None,
) -> None:
    """Show episodes in the terminal: a line for each, or one of them with masks, steps, advantages and log-probs."""
    from trailmark.report.terminal import inspect_file

    inspect_file(episodes, episode, seat, by.value, tokens, tokenizer, color)
