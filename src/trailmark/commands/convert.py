"""`trailmark convert`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from trailmark.formats import find, known

_LIST = "\n\n".join(["The formats:", *(f"{name}: {kind.about}" for name, kind in known().items())])


def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="The file to read, or the folder of a checkpoint.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The file or folder to write.")],
    from_: Annotated[str | None, typer.Option("--from", metavar="FORMAT", help="What IN is.")] = None,
    to: Annotated[str | None, typer.Option("--to", metavar="FORMAT", help="The format of OUT.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="NAME", help="A folder, a name on the hub, smollm2, or tiny.")
    ] = None,
    seat: Annotated[str | None, typer.Option(help="The seat that speaks in IN, and whose view OUT has.")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out rows that cannot be read.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")] = False,
    like: Annotated[
        str | None, typer.Option(metavar="MODEL", help="transformers: whose config and tokenizer, if IN has none.")
    ] = None,
    tag: Annotated[
        str | None, typer.Option(metavar="STEP", help="transformers: a step of DeepSpeed; default: the newest.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="transformers: float32, bfloat16 or float16; default: as it is, float32 for DeepSpeed.")
    ] = "",
    push: Annotated[
        str | None, typer.Option(metavar="NAME", help="transformers: upload OUT to the hub, to a private repository.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="With --push: everyone may see a new repository.")] = False,
) -> None:
    """Turn a file of episodes or conversations into another format, or (--to transformers) a checkpoint that lies in
    pieces into one folder."""
    from trailmark.errors import TrailmarkError

    if to == "transformers":
        if from_ or tokenizer or seat or skip_bad or overwrite:
            raise TrailmarkError(
                "convert --to transformers reads a checkpoint: it takes --like, --tag, --dtype, --push and --public."
            )
        return _checkpoint(source, target, like, tag, dtype, push, public)
    if like or tag or dtype or push or public:
        raise TrailmarkError("convert: --like, --tag, --dtype, --push and --public belong to --to transformers.")
    if from_ is None or to is None or tokenizer is None:
        missing = "--from" if from_ is None else "--to" if to is None else "--tokenizer"
        raise TrailmarkError(f"convert: {missing} is missing. (A checkpoint needs only --to transformers.)")
    _rows(source, target, from_, to, tokenizer, seat, skip_bad, overwrite)


def _checkpoint(
    source: Path, target: Path, like: str | None, tag: str | None, dtype: str, push: str | None, public: bool
) -> None:
    from tempfile import TemporaryDirectory

    from trailmark.errors import TrailmarkError
    from trailmark.models import shards
    from trailmark.runs.checkpoints import is_run
    from trailmark.seats.model_names import locate

    if dtype not in ("", "float32", "bfloat16", "float16"):
        raise TrailmarkError(f"convert: --dtype '{dtype}' is not known: float32, bfloat16 or float16.")
    if public and push is None:
        raise TrailmarkError("convert: --public belongs to --push NAME.")
    if source.is_dir() and is_run(source):
        source = Path(locate(str(source)).folder)
    with TemporaryDirectory() as place:
        beside = None if like is None else _like(locate(like, key="--like").folder, Path(place))
        for line in shards.convert(source, target, beside, tag, dtype):
            typer.echo(line)
    if push is not None:
        typer.echo(f"uploaded to {shards.push(target, push, public)}")


def _like(name: str, place: Path) -> Path:
    """A folder with config and tokenizer of a model."""
    if Path(name).is_dir():
        return Path(name)
    if name == "smollm2":
        from trailmark.models.smollm import smollm2_folder

        return smollm2_folder()
    from trailmark.models.load import load_config, tokenizer_by_name

    if name != "tiny":
        load_config(name).save_pretrained(place)
    tokenizer_by_name(name).save_pretrained(place)
    return place


def _rows(
    source: Path, target: Path, from_: str, to: str, tokenizer: str, seat: str | None, skip_bad: bool, overwrite: bool
) -> None:
    from trailmark import formats
    from trailmark.data.output_paths import new_file
    from trailmark.errors import DataError
    from trailmark.formats.turns import differ
    from trailmark.seats.model_names import load_tokenizer
    from trailmark.types import Scored

    find(from_), find(to)
    if target.is_file() and not overwrite:
        raise DataError("is already there: choose another name, or replace it with --overwrite.", target)
    new_file(target, overwrite=True)
    words = load_tokenizer(tokenizer)
    found = formats.read(from_, source, words, seat=seat, skip_bad=skip_bad)
    formats.write(to, target, found.episodes, words, annotations=found.annotations, seat=seat)
    typer.echo(f"{target}: {len(found.episodes)} episodes")
    if n := sum("text_says" in e.info for e in found.episodes):
        typer.echo(differ(n), err=True)
    if found.skipped:
        typer.echo(f"left out {len(found.skipped)} rows; the first: {found.skipped[0]}", err=True)
    if to != "episodes":
        lost = sorted({a.name for a in found.annotations} - {*find(to).holds})
        lost += ["reward"] * (not find(to).rewards and any(isinstance(e.outcome, Scored) for e in found.episodes))
        if from_ != to:
            lost += [f"{key} ({n} episodes)" for key, n in sorted(_extras(found.episodes).items())]
        if lost:
            typer.echo(f"'{to}' has no room for: {', '.join(lost)}", err=True)


def _extras(episodes: Iterable[Any]) -> Counter[str]:
    """Fields of rows and messages besides their text. Only the format that they came from can store them."""
    found: Counter[str] = Counter()
    for e in episodes:
        talk = [*e.task.data.get("messages", ()), *e.info.get("messages", ())]
        fields = {k for m in talk for k in m if k not in ("role", "content", "tag", "score")}
        found.update(fields | {k for k in e.info.get("row", {}) if k not in ("reward", "score")})
    return found


convert.__doc__ = f"{convert.__doc__}\n\n{_LIST}"
