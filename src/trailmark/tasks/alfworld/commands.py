"""`trailmark worlds`: compare our worlds with the originals."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trailmark import MOST_SEED
from trailmark.errors import TrailmarkError, nearest

WORLDS = ("alfworld",)
app = typer.Typer(help="Compare our worlds with the originals they stand for.", no_args_is_help=True)


@app.callback()
def _options() -> None: ...


@app.command()
def check(
    world: Annotated[str, typer.Argument(metavar="WORLD", help="Such as 'alfworld'.")],
    games: Annotated[Path | None, typer.Option(help="Folder of its games (default: $ALFWORLD_DATA).")] = None,
    n: Annotated[int, typer.Option(min=1, help="How many games, spread over the task types.")] = 60,
    walks: Annotated[int, typer.Option(min=0, help="Random walks in each game, beside its walkthrough.")] = 3,
    length: Annotated[int, typer.Option(min=1, help="Commands in a random walk.")] = 30,
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Random seed of games and walks.")] = 0,
) -> None:
    """Run the same commands in our world and in the original, and show every difference.

    Needs the original: pip install 'trailmark[alfworld]'. Exit code 0: all equal; 1: something differs.
    """
    if world not in WORLDS:
        raise TrailmarkError(f"there is no original to compare '{world}' with.{nearest(world, WORLDS)}")
    from trailmark.tasks.alfworld.compare_original import check as judge
    from trailmark.tasks.alfworld.games import Games

    report = judge(Games(games), n, walks, length, seed)
    typer.echo(str(report))
    raise typer.Exit(0 if report.ok else 1)
