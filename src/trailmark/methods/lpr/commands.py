"""`trailmark lpr …`: what the stages of an `lpr` recipe made, and its records as files of the original.

    trailmark lpr export STAGE RECIPE OUT         what a stage made, as records: {text, label, response, pred, id}, …
    trailmark lpr accuracy PRM ROWS               whether a reward model tells right steps from wrong ones
    trailmark lpr curve RECIPE                    what the reward model says at the first step, the second, …
    trailmark lpr merge OUT FILE FILE …           records of several files as one
    trailmark lpr split FILE PART REST            some of the questions of a file, and the others
    trailmark lpr calibration RECIPE              Monte-Carlo values against the exact ones, as a table and a picture
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from trailmark import MOST_SEED

lpr = typer.Typer(name="lpr", help="What the stages of an lpr recipe made.", no_args_is_help=True)

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
    from trailmark.methods.lpr.method import LprMethod
    from trailmark.methods.lpr.round import Round
    from trailmark.methods.pipeline import round_of, stage_named
    from trailmark.runs.store import Run

    config = _config(recipe, words)
    name = stage_named(LprMethod, config, stage, number)
    rows = records_of(Round(config, Run.open(config.out), round_of(name)[1]), name)
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
    from trailmark.formats.rows import dump
    from trailmark.methods.lpr.formats import merge_records

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
    from trailmark.formats.rows import dump
    from trailmark.methods.lpr.formats import split_records

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
    from trailmark.methods.lpr.labels import labelled_steps, step_row
    from trailmark.score.classes import step_scores
    from trailmark.score.value_models import load_values
    from trailmark.stats.intervals import Interval

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


@lpr.command()
def curve(
    recipe: Recipe,
    words: Words = None,
    number: Round = 1,
    most: Annotated[int | None, typer.Option("--most", min=1, help="Only so many steps.")] = None,
    plain: Annotated[bool, typer.Option("--json", help="Print only one line of JSON.")] = False,
) -> None:
    """What the reward model of a round says along right and wrong solutions, step by step."""
    import json

    from trailmark.episodes import won
    from trailmark.errors import RunError
    from trailmark.methods.lpr.labels import step_curve
    from trailmark.methods.lpr.pairs import step_numbers
    from trailmark.methods.lpr.round import Round
    from trailmark.runs.stages import record_of
    from trailmark.runs.store import Run

    config = _config(recipe, words)
    r = Round(config, Run.open(config.out), number)
    if not record_of(r.root, name := r.name("scores")).exists():
        raise RunError(f"{r.root}: stage '{name}' is not done yet: make it with `trailmark stages`.")
    solved = r.solved()
    _, outputs = r.rewards(solved)
    found = [(won(e), step_numbers(outputs[e.id, 0], r.read())) for e in solved if (e.id, 0) in outputs]
    rows = step_curve(found, most)
    if plain:
        return typer.echo(json.dumps({"command": "lpr curve", "rows": rows}))
    head = list(rows[0]) if rows else []
    typer.echo("  ".join(f"{name:>15}" for name in head))
    for row in rows:
        cells = ("-" if v is None else str(v) if isinstance(v, int) else f"{v:.3f}" for v in row.values())
        typer.echo("  ".join(f"{v:>15}" for v in cells))


def records_of(r: Any, name: str) -> list[dict[str, Any]]:
    """What a stage made, as records of the reference implementation (`methods/lpr/formats.py`). `r` is its round."""
    from trailmark.errors import RunError
    from trailmark.formats.rows import read_lines
    from trailmark.methods.lpr import formats as records
    from trailmark.methods.pipeline import round_of
    from trailmark.runs.stages import record_of
    from trailmark.runs.store import read_segment

    what, folder, words = round_of(name)[0], r.root / name, r.tokenizer
    if not record_of(r.root, name).exists():
        raise RunError(f"{r.root}: stage '{name}' is not done yet: make it with `trailmark stages`.")
    if what in ("solutions", "lessons", "cleaned"):
        files = sorted(p for p in folder.glob("*.jsonl") if ".annotations" not in p.name)
        return records.solution_records([e for p in files for e in read_segment(p)], words)
    if what == "states":
        return records.state_records(r.solved(), r.shard(), words)
    if what == "completions":
        return records.completion_records(r.completed(), r.shard(), words)
    if what == "scores":
        rewards, outputs = r.rewards(r.solved())
        return records.score_records(r.solved(), outputs, rewards, words)
    if what == "pairs" and (folder / "pairs.jsonl").exists():
        every = [*r.solved(), *(r.completed() if r.config.pairs.steps is not None else [])]
        every += read_segment(r.at("worsened") / "all.jsonl") if r.config.worsen is not None else []
        return records.pair_records(read_lines(folder / "pairs.jsonl"), every, words)
    raise RunError(
        f"stage '{name}' has no such records: export solutions, cleaned, states, completions, scores or pairs."
    )


@lpr.command()
def calibration(
    recipe: Recipe,
    words: Words = None,
    number: Round = 1,
    states: Annotated[int, typer.Option(min=2, help="So many states, drawn at random.")] = 100,
    floor: Annotated[float, typer.Option(min=0, max=0.5, help="Texts less likely than this are not followed.")] = 0.003,
    out: Annotated[Path | None, typer.Option(help="The picture, without an ending.")] = None,
) -> None:
    """Compare Monte-Carlo values of states with the exact ones, summed over all that the policy may write."""
    import json

    from trailmark.errors import RunError
    from trailmark.methods.lpr.exact import calibration as grouped
    from trailmark.methods.lpr.exact import draw_calibration
    from trailmark.methods.lpr.round import Round
    from trailmark.runs.atomic_files import atomic_write
    from trailmark.runs.store import Run

    config = _config(recipe, words)
    run = Run.open(config.out)
    place = out or run.path / f"calibration-{number}"
    rows = exact_values(Round(config, run, number), states, floor)
    if len(rows) < 2:
        raise RunError(f"{run.path}: round {number} has {len(rows)} states with values: make stage 'values' first.")
    exact, counted = [r["exact"] for r in rows], [r["counted"] for r in rows]
    groups = grouped(exact, counted)
    unseen = max(r["unseen"] for r in rows)
    error = sum(abs(a - b) for a, b in zip(exact, counted)) / len(rows)
    bias = sum(b - a for a, b in zip(exact, counted)) / len(rows)
    draw_calibration(exact, counted, groups, place, f"{len(rows)} states, {config.complete.n} completions each")
    found = {"states": rows, "groups": groups, "bias": bias, "error": error, "unseen": unseen}
    atomic_write(place.with_name(f"{place.name}.json"), (json.dumps(found, indent=1) + "\n").encode())
    typer.echo("exact value    states  mean exact  mean Monte-Carlo [95 % interval]")
    for g in groups:
        ends = f" [{g['low']:.3f}, {g['high']:.3f}]" if g["low"] is not None else ""
        typer.echo(f"{g['from']:.1f} to {g['to']:.1f}{g['states']:>12}{g['exact']:>12.3f}{g['counted']:>18.3f}{ends}")
    typer.echo(f"mean difference {bias:+.3f}, mean distance {error:.3f}, at most {unseen:.3f} not followed")
    typer.echo(f"{place}.png")


def exact_values(r: Any, most: int, floor: float) -> list[dict[str, Any]]:
    """Some states of a round with their exact and their Monte-Carlo values."""
    import random

    from trailmark.episodes import won

    c = r.config
    exact = _exact(r, floor)
    episodes = {e.id: e for e in r.solved()}
    found = [(a, n) for a in r.valued() for n, v in enumerate(a.values) if v >= 0]
    drawn, out = random.Random(f"calibration {c.seed}").sample(found, min(most, len(found))), []
    for a, n in sorted(drawn, key=lambda x: (x[0].episode, x[1])):
        e = episodes[a.episode]
        value = exact(e, e.turns[a.turn or 0].steps[n][1])
        told = {"exact": value.value, "low": value.low, "unseen": value.unseen, "counted": a.values[n] / c.complete.n}
        out.append({"episode": e.id, "step": n, "right": won(e), **told})
    return out


def _exact(r: Any, floor: float) -> Any:
    """A function of an episode and a token: the exact value of the state there. For a scripted player of puzzles its
    probabilities are summed; for a model here, all that it may write is followed."""
    from trailmark.errors import RecipeError
    from trailmark.functions import load_function
    from trailmark.methods.lpr.exact import Exact, exact_value
    from trailmark.models.load import load_model
    from trailmark.rollout.play import stop_ids
    from trailmark.seats.pinned_models import pin_models
    from trailmark.tasks.puzzle.source import Puzzles

    c, source = r.config, r.source()
    if (seat := c.seats.get("policy")) is not None:
        policy = getattr(load_function(getattr(seat, "function", ""), "seats.policy.function")[0], "policy", None)
        if policy is None or not isinstance(source, Puzzles):
            raise RecipeError(
                "exact values need a model here, or a puzzle player (trailmark.tasks.puzzle.policies:careless)"
            )
        text = lambda e, end: r.tokenizer.decode(e.turns[0].tokens[:end])
        return lambda e, end: Exact(source.true_value(e.task, text(e, end), policy), 0.0)
    law = c.complete.sampling or c.sampling
    if law.top_p != 1 or law.top_k or law.temperature <= 0 or law.min_tokens or law.stop:
        raise RecipeError("exact values need a temperature above 0, and no top_p, top_k, min_tokens or stop")
    lm = load_model(pin_models(r.policy()))
    stops = stop_ids(lm.tokenizer, chat=True)

    def followed(e: Any, end: int) -> Exact:
        turn = e.turns[0]

        def right(more: Any) -> float:
            world = source.make()
            world.reset(e.task)
            return float(world.step(lm.tokenizer.decode(turn.tokens[:end] + tuple(more))).outcome.success or 0)

        begun = turn.prompt + turn.tokens[:end]
        return exact_value(lm, begun, stops, law.max_tokens - end, right, floor, law.temperature)

    return followed
