"""`trailmark convert`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from trailmark.formats import FORMATS, find

_LIST = "\n\n".join(["The formats:", *(f"{name}: {kind.about}" for name, kind in FORMATS.items())])


def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="The file to read.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write.")],
    from_: Annotated[str, typer.Option("--from", metavar="FORMAT", help="What IN is.")],
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help="The format of OUT.")],
    tokenizer: Annotated[str, typer.Option(metavar="NAME", help="A folder, a name on the hub, smollm2, or tiny.")],
    seat: Annotated[str | None, typer.Option(help="The seat that speaks in IN, and whose view OUT has.")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out rows that cannot be read.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")] = False,
) -> None:
    """Turn a file of episodes or conversations into another format."""
    from trailmark import formats
    from trailmark.data.output_paths import new_file
    from trailmark.errors import DataError
    from trailmark.seats.locate import load_tokenizer
    from trailmark.types import Scored

    find(from_), find(to)
    if target.is_file() and not overwrite:
        raise DataError("is already there: choose another name, or replace it with --overwrite.", target)
    new_file(target, overwrite=True)
    words = load_tokenizer(tokenizer)
    found = formats.read(from_, source, words, seat=seat, skip_bad=skip_bad)
    formats.write(to, target, found.episodes, words, annotations=found.annotations, seat=seat)
    typer.echo(f"{target}: {len(found.episodes)} episodes")
    if found.skipped:
        typer.echo(f"left out {len(found.skipped)} rows; the first: {found.skipped[0]}", err=True)
    if to != "episodes":
        lost = sorted({a.name for a in found.annotations} - {*FORMATS[to].holds})
        lost += ["reward"] * (not FORMATS[to].rewards and any(isinstance(e.outcome, Scored) for e in found.episodes))
        if from_ != to:
            lost += [f"{key} ({n} episodes)" for key, n in sorted(_extras(found.episodes).items())]
        if lost:
            typer.echo(f"'{to}' has no room for: {', '.join(lost)}", err=True)


def _extras(episodes: Iterable[Any]) -> Counter[str]:
    """Fields of rows and messages besides their text. Only the format that they came from can store them."""
    found: Counter[str] = Counter()
    for e in episodes:
        talk = [*e.task.data.get("messages", ()), *e.info.get("messages", ())]
        said = {k for m in talk for k in m if k not in ("role", "content", "tag", "score")}
        found.update(said | {k for k in e.info.get("row", {}) if k not in ("reward", "score")})
    return found


convert.__doc__ = f"{convert.__doc__}\n\n{_LIST}"
