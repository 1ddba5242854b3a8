"""The options with which commands let models play, and count what they did. Importing this is fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from trailmark import MOST_SEED
from trailmark.terminal.options import ServerOptions


class Failures(StrEnum):
    """How failed episodes count."""

    apart = "apart"
    lost = "lost"


FailedAs = Annotated[
    Failures,
    typer.Option(
        "--failed", help="Failed episodes: leave them out of averages (apart), or count them as no success (lost)."
    ),
]


@dataclass(frozen=True)
class PlayOptions:
    """How `trailmark eval` lets models play. None: as in the recipe of the model's run."""

    task: Annotated[str | None, typer.Option(help="The task; default: the run's own.")] = None
    split: Annotated[str | None, typer.Option(help="Split of the task; default: the run's, or 'test'.")] = None
    n: Annotated[int | None, typer.Option(min=1, help="Number of starts; default: the run's, or all.")] = None
    samples: Annotated[int, typer.Option(min=1, help="Episodes of each start, for pass@k and maj@k.")] = 1
    seed: Annotated[int | None, typer.Option(min=0, max=MOST_SEED, help="Random seed of starts and draws.")] = None
    temperature: Annotated[float | None, typer.Option(min=0, help="0: the most likely token.")] = None
    top_p: Annotated[
        float | None, typer.Option(min=0, max=1, help="Sample from the most likely tokens with this mass.")
    ] = None
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of one turn.")] = None
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.")] = "auto"
    chat: Annotated[
        bool, typer.Option("--chat", help="Give instructions in words and read the answer; servers always get words.")
    ] = False
    react: Annotated[
        bool, typer.Option("--react", help="Ask for an analysis first, then the choice: servers, or with --chat.")
    ] = False
    server: ServerOptions = ServerOptions()
    search: Annotated[
        str | None, typer.Option(metavar="KIND:WIDTH", help="Search: beam:B, best_of:N or actions:K; --value chooses.")
    ] = None
    value: Annotated[
        str | None, typer.Option(metavar="RUN", help="The value model of a search: a run, a folder, a server, or logp.")
    ] = None
    budget: Annotated[
        int | None, typer.Option(min=1, help="Most tokens that the search of one decision may sample.")
    ] = None
    tree: Annotated[
        bool, typer.Option("--tree", help="Store all candidates of a search in the episodes of --out.")
    ] = False
    vary: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=A,B,…",
            help="Play once per value of a task option: order=ABCD,DCBA, or dataset=reclor@val,logiqa2@dev.",
        ),
    ] = None
    leaderboard: Annotated[
        Path | None, typer.Option(metavar="FILE.npy", help="Task logic: write the chosen options, a number per row.")
    ] = None
    put: Annotated[
        list[str] | None,
        typer.Option(metavar="SEAT=MODEL", help="Put another model into a seat of the run. May be repeated."),
    ] = None
    failures: Annotated[
        float, typer.Option(min=0, max=1, metavar="SHARE", help="Of the plays of a server that may fail.")
    ] = 0.0
    out: Annotated[
        Path | None,
        typer.Option(help="Write the episodes to this JSONL; the same command plays again what failed at a server."),
    ] = None
    words: Sequence[str] = ()  # KEY=VALUE: options of the task
    like: str | None = None  # a MODEL whose run gives task, split and starts to a model without one

    def given(self) -> list[str]:
        """The options that a command got."""
        every = [(f, getattr(one, f.name)) for one in (self, self.server) for f in fields(one) if f.name != "server"]
        return ["--" + f.name.replace("_", "-") for f, value in every if value not in (f.default, [])]


@dataclass(frozen=True)
class CountOptions:
    """What of the episodes a table counts."""

    side: Annotated[str | None, typer.Option(help="Whose outcome counts, where there are several.")] = None
    seat: Annotated[str | None, typer.Option(help="Whose turns and tokens are counted; all.")] = None
    failed: FailedAs = Failures.apart
