"""`trailmark lpr …`: the stages of an `lpr` recipe one by one, and its records as files of the original.

    trailmark lpr stages RECIPE                   what there is to do, and what is done
    trailmark lpr run STAGE RECIPE KEY=VALUE      make one stage; those before it must be done
    trailmark lpr export STAGE RECIPE OUT         what a stage made, as records: {text, label, response, pred, id}, …

`trailmark train RECIPE` makes them all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

lpr = typer.Typer(name="lpr", help="The stages of an lpr recipe, one by one.", no_args_is_help=True)

Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe of method lpr.")]
Words = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Keys to set.")]
Round = Annotated[int, typer.Option("--round", min=1, help="Of which round.")]


def _config(recipe: Path, words: list[str] | None) -> Any:
    from trailmark import methods
    from trailmark.config import load_recipe
    from trailmark.errors import RecipeError

    config = methods.resolve_recipe(load_recipe(recipe, words or ()))
    if config.method != "lpr":
        raise RecipeError(f"{recipe}: it is of method '{config.method}', and these are the stages of method lpr.")
    return config


def _name(config: Any, stage: str, number: int) -> str:
    """The stage that somebody means: its whole name, or its kind in a round."""
    from trailmark.errors import RecipeError, nearest
    from trailmark.methods.lpr import Road
    from trailmark.runs.store import Run

    names = [s.name for s in Road(config, Run(config.out)).stages()]
    found = next((n for n in (stage, f"{stage}-{number}") if n in names), None)
    if found is None:
        mine = [n for n in names if number > config.steps or n.partition("-")[2] in ("", str(number))]
        raise RecipeError(f"there is no stage '{stage}' of round {number} in this recipe.{nearest(stage, mine)}")
    return found


@lpr.command()
def stages(recipe: Recipe, words: Words = None) -> None:
    """List the stages of a recipe, and which of them are done."""
    from trailmark.methods.lpr import LAYOUT, Road
    from trailmark.runs.store import Run

    config = _config(recipe, words)
    for stage in Road(config, Run(config.out)).stages():
        done = (Path(config.out) / LAYOUT.record.format(name=stage.name)).exists()
        typer.echo(f"{stage.name:<16}{'done' if done else 'to do'}")


@lpr.command()
def run(
    stage: Annotated[str, typer.Argument(metavar="STAGE", help="solutions, cleaned, states, completions, values, …")],
    recipe: Recipe,
    words: Words = None,
    number: Round = 1,
) -> None:
    """Make one stage. It is skipped if it is done, and goes on if it was stopped."""
    import json

    from trailmark.methods.lpr import LAYOUT, part
    from trailmark.runs.launch import launch

    config = _config(recipe, words)
    name = _name(config, stage, number)
    launch(part([name]), config, resume=True)
    made = json.loads((Path(config.out) / LAYOUT.record.format(name=name)).read_text("utf-8"))["summary"]
    told = ", ".join(f"{k} {v:g}" if isinstance(v, float) else f"{k} {v}" for k, v in made.items())
    typer.echo(f"{name}: {told}")


@lpr.command()
def export(
    stage: Annotated[
        str, typer.Argument(metavar="STAGE", help="solutions, cleaned, states, completions, scores or pairs.")
    ],
    recipe: Recipe,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write: a list (.json), or lines (.jsonl).")],
    words: Words = None,
    number: Round = 1,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it is there.")] = False,
) -> None:
    """Write what a stage made as records of the reference implementation."""
    from trailmark.data.output_paths import new_file
    from trailmark.formats.rows import dump
    from trailmark.methods.lpr import Road
    from trailmark.runs.store import Run

    config = _config(recipe, words)
    name = _name(config, stage, number)
    rows = records_of(Road(config, Run.open(config.out)), name)
    new_file(out, overwrite=overwrite)
    dump(out, rows, "lines" if out.suffix == ".jsonl" else "list")
    typer.echo(f"{out}: {len(rows)} records")


def records_of(road: Any, name: str) -> list[dict[str, Any]]:
    """What a stage made, as records of the reference implementation (`formats/lpr.py`)."""
    from trailmark.errors import RunError
    from trailmark.formats import lpr as records
    from trailmark.formats.rows import read_lines
    from trailmark.methods.lpr import LAYOUT
    from trailmark.runs.store import read_segment

    what, _, number = name.partition("-")
    k, folder, words = int(number or 1), road.root / name, road.tokenizer
    if not (road.root / LAYOUT.record.format(name=name)).exists():
        raise RunError(f"{road.root}: stage '{name}' is not done yet: make it with `trailmark lpr run`.")
    if what in ("solutions", "lessons", "cleaned"):
        files = sorted(p for p in folder.glob("*.jsonl") if ".annotations" not in p.name and p.name != "written.jsonl")
        return records.solution_records([e for p in files for e in read_segment(p)], words)
    if what == "states":
        return records.state_records(road.solved(k), road.shard(k, None), words)
    if what == "completions":
        return records.completion_records(road.completed(k), road.shard(k, None), words)
    if what == "scores":
        rewards, outputs = road.rewards(k, road.solved(k))
        return records.score_records(road.solved(k), outputs, rewards, words)
    if what == "pairs" and (folder / "pairs.jsonl").exists():
        every = [*road.solved(k), *(road.completed(k) if road.config.pairs.steps is not None else [])]
        return records.pair_records(read_lines(folder / "pairs.jsonl"), every, words)
    raise RunError(
        f"stage '{name}' has no such records: export solutions, cleaned, states, completions, scores or pairs."
    )
