"""`trailmark data experts | rollouts`: plays of other programs as one file that OREO learns from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trailmark.terminal.options import MANY, Words


def experts(
    source: Annotated[Path, typer.Argument(metavar="PLAYS", help="Published plays: JSON or lines, plain or .xz.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The JSONL to write.")],
    words: Words = None,
    n: Annotated[int | None, typer.Option(min=1, max=10 * MANY, help="Most plays.")] = None,
) -> None:
    """Write expert plays of ALFWorld as conversations (format agent, reward 1). Each is played again in its game.
    games=PATH is the folder of the games; opening=apart puts the instruction in its own message, as OREO does."""
    from trailmark.data.output_paths import new_file
    from trailmark.methods.oreo import experts as plays
    from trailmark.tasks import get_task, task_options
    from trailmark.tasks.alfworld.source import Alfworld

    new_file(out)
    made = get_task("alfworld", **{"mode": "text", **task_options(words or [])})
    assert isinstance(made, Alfworld)
    rows, left = plays.make(source, out, made, n)
    typer.echo(f"{out}: {rows} plays" + "".join(f", {k} left out ({why})" for why, k in left.items()))


def rollouts(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER …", help="Folders of {task}_{repeat}.json.")],
    out: Annotated[Path, typer.Option("--out", metavar="OUT", help="The JSONL to write.")],
    failures: Annotated[bool, typer.Option("--failures", help="Keep lost plays only.")] = False,
) -> None:
    """Merge folders of agent rollouts, as OREO's scripts write them, into one file of format agent, and count the
    successes."""
    from trailmark.methods.oreo import rollouts as plays

    won, total = plays.merge(folders, out, failures)
    typer.echo(f"{out}: {won} of {total} plays were won ({won / total:.3f})")
