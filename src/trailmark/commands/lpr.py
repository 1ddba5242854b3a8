"""`trailmark lpr …`: the stages of an `lpr` recipe one by one, and its records as files of the original.

    trailmark lpr stages RECIPE                   what there is to do, and what is done
    trailmark lpr run STAGE RECIPE KEY=VALUE      make one stage; those before it must be done
    trailmark lpr export STAGE RECIPE OUT         what a stage made, as records: {text, label, response, pred, id}, …
    trailmark lpr accuracy PRM ROWS               whether a reward model tells right steps from wrong ones
    trailmark lpr merge OUT FILE FILE …           records of several files as one
    trailmark lpr split FILE PART REST            some of the questions of a file, and the others

`trailmark train RECIPE` makes them all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from trailmark import MOST_SEED

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


@lpr.command()
def merge(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write: a list (.json), or lines (.jsonl).")],
    files: Annotated[list[Path], typer.Argument(metavar="FILE …", help="Records {text, label, response, pred, id}.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it is there.")] = False,
) -> None:
    """Put the responses of several files together, question by question."""
    from trailmark.data.output_paths import new_file
    from trailmark.formats.lpr import merge_records
    from trailmark.formats.rows import dump

    rows = merge_records(files)
    new_file(out, overwrite=overwrite)
    dump(out, rows, "lines" if out.suffix == ".jsonl" else "list")
    typer.echo(f"{out}: {len(rows)} questions, {sum(len(r['response']) for r in rows)} responses")


@lpr.command()
def split(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Records of any stage: rows with an id.")],
    part: Annotated[Path, typer.Argument(metavar="PART", help="The file for the share.")],
    rest: Annotated[Path, typer.Argument(metavar="REST", help="The file for the others.")],
    share: Annotated[float, typer.Option("--share", min=0, max=1, help="Of the questions.")] = 0.9,
    rows: Annotated[bool, typer.Option("--rows", help="Of the rows, whatever their questions.")] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, max=MOST_SEED, help="Random seed.")] = 0,
) -> None:
    """Cut a file in two by question: train and dev, or a subset of 40 %."""
    from trailmark.data.output_paths import new_file
    from trailmark.errors import DataError
    from trailmark.formats.lpr import split_records
    from trailmark.formats.rows import dump

    parts = split_records(file, share, "row" if rows else "question", seed)
    for path, made in zip((part, rest), parts):
        new_file(path)
        if not made:
            raise DataError(f"would be empty: --share {share:g} of {sum(map(len, parts))} rows leaves nothing.", path)
    for path, made in zip((part, rest), parts):
        dump(path, made, "lines" if path.suffix == ".jsonl" else "list")
        typer.echo(f"{path}: {len(made)} rows")


@lpr.command()
def accuracy(
    model: Annotated[str, typer.Argument(metavar="PRM", help="A reward model: a run, a checkpoint or a folder.")],
    rows: Annotated[Path, typer.Argument(metavar="ROWS", help="Solutions with labels of their steps.")],
    format: Annotated[str, typer.Option("--format", help="step-labels (PRMBench, too), or episodes.")] = "step-labels",
    label: Annotated[str, typer.Option("--label", help="The annotation with the labels.")] = "label",
    good: Annotated[float, typer.Option("--good", min=0, help="Labels from here on are of right steps.")] = 1.0,
    least: Annotated[float, typer.Option("--least", min=0, max=1, help="Scores from here on call a step right.")] = 0.5,
    n: Annotated[int | None, typer.Option("--n", min=1, help="Only the first so many solutions.")] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda.")] = "auto",
    plain: Annotated[bool, typer.Option("--json", help="Print only one line of JSON.")] = False,
) -> None:
    """Whether a reward model tells right steps from wrong ones: on labels of people, or on held-out states."""
    import json

    from trailmark import formats
    from trailmark.evaluate.searched import load_values
    from trailmark.evaluate.stats import Interval
    from trailmark.evaluate.step_labels import labelled_steps, step_row
    from trailmark.score.classes import step_scores

    values = load_values(model, device=device)
    found = formats.read(format, rows, values.lm.tokenizer)
    fits = [e for e in found.episodes if max(len(e.sequence(i)) for i in range(len(e.turns))) <= values.lm.context]
    asked = fits[:n]
    seat = asked[0].turns[-1].seat if asked else "policy"
    scores = step_scores(values.lm, asked, values.head, values.classes, seat)
    row = step_row(labelled_steps(asked, found.annotations, scores, label), good, least)
    row |= {"too long": len(found.episodes) - len(fits)}
    if plain:
        return typer.echo(json.dumps({"command": "lpr accuracy", "model": model, "rows": str(rows), **row}))
    for name, value in row.items():
        if name != "metrics":
            typer.echo(f"{name:<14}{value}")
    for name, value in row["metrics"].items():
        typer.echo(f"{name:<14}{Interval(**value)}")


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
