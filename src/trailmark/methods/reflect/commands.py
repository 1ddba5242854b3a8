"""`trailmark data auto-explore | sft | records | taxi | alfworld`: what Reflect-RL imitates; and `trailmark curves`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trailmark.terminal.options import (
    MANY,
    Horizon,
    Out,
    Perturb,
    Seed,
    Shuffle,
    Starts,
    TeacherOptions,
    Tokenizer,
    Words,
    grouped,
)

if TYPE_CHECKING:
    from trailmark.methods.reflect.teacher import Teacher


@grouped
def auto_explore(
    sources: Annotated[
        list[str] | None,
        typer.Argument(metavar="SRC", help="Repositories (a folder each), or packages: click==8.1.7\\[#sha256=…]."),
    ] = None,
    out: Out = Path("auto-explore"),
    stage: Annotated[list[str] | None, typer.Option(help="Only this: repos, tasks, filter, walks, split, sft.")] = None,
    tasks: Annotated[Path | None, typer.Option(help="Take questions from this file, not from the teacher.")] = None,
    rules: Annotated[
        bool, typer.Option("--filter/--no-filter", help="Leave out tests, licences, private names, …")
    ] = True,
    files: Annotated[int, typer.Option(min=1, max=MANY, help="Most files of a repository to ask about.")] = 100,
    per_file: Annotated[int, typer.Option(min=1, max=MANY, help="Most questions about one file.")] = 3,
    negatives: Annotated[int, typer.Option(min=0, max=MANY, help="Mistakes with a recovery, for each question.")] = 2,
    markov: Annotated[bool, typer.Option("--markov", help="Show the teacher only the current state.")] = False,
    horizon: Horizon = 15,
    split: Annotated[str, typer.Option(help="hash, exact (shares), or given (as the tasks say).")] = "hash",
    shuffle: Shuffle = False,
    tokenizer: Tokenizer = "",
    seed: Seed = 0,
    asked: TeacherOptions = TeacherOptions(),
) -> None:  # fmt: skip
    """Make a data set of the repository world: repositories, questions, walks, a split, files for fine-tuning."""
    from dataclasses import asdict

    from trailmark.data.output_paths import writable
    from trailmark.methods.reflect.explore.make import STAGES, Plan, make
    from trailmark.methods.reflect.explore.sources import sources_of
    from trailmark.methods.reflect.explore.split import check_by, check_given

    writable(out)
    about = asked.settings()
    if check_by(split) == "given":
        check_given(tasks)
    found = sources_of(sources or [], tasks)
    plan = Plan(
        seed, files, per_file, rules, str(tasks or ""), negatives, markov, horizon, check_by(split), shuffle, tokenizer
    )  # fmt: skip
    settings = {"kind": "auto-explore", "sources": [s.text for s in found], **asdict(plan), **about}
    make(out, found, plan, _opened(asked), settings, stage or STAGES, typer.echo)


def sft(
    records: Annotated[
        Path, typer.Argument(metavar="RECORDS", help="Records with walks: train.jsonl, or the reference's JSON.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    repos: Annotated[Path, typer.Option(help="The folder that holds their repositories.")],
    horizon: Horizon = 15,
    shuffle: Shuffle = False,
    tokenizer: Tokenizer = "",
) -> None:  # fmt: skip
    """Make the files for fine-tuning from records of repositories. Every walk is played again."""
    from trailmark.data.output_paths import writable
    from trailmark.errors import RunError
    from trailmark.methods.reflect.explore.explorer import Explorer
    from trailmark.methods.reflect.explore.make import make_sft
    from trailmark.seats.model_names import read_tokenizer

    if out.exists():
        raise RunError(f"{out} exists: choose another folder.")
    writable(out.parent)
    words = read_tokenizer(tokenizer)
    counts = make_sft(records, out, lambda path: Explorer(repos, path, horizon, words, shuffle))
    typer.echo(counts.line(str(out)))


def records(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Records: our lines, or the reference's JSON.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="NAME.jsonl: our lines; NAME.json: the reference's.")],
) -> None:
    """Convert records of repositories to the reference's JSON, or back."""
    from trailmark.data.output_paths import new_file
    from trailmark.methods.reflect.explore.records import read_records, write_records

    new_file(target)
    found = read_records(source)
    write_records(target, found)
    typer.echo(f"{target}: {len(found)} records")


@grouped
def taxi(
    words: Words = None,
    out: Out = Path("taxi-data"),
    starts: Starts = 100,
    perturb: Perturb = 0.5,
    fatal: Annotated[bool, typer.Option("--fatal", help="Random steps may end the game.")] = False,
    seed: Seed = 0,
    asked: TeacherOptions = TeacherOptions(),
) -> None:
    """Write plays of the taxi with a teacher's reflections, the action taken and the best one. The default horizon is
    20."""
    from trailmark.methods.reflect.taxi_guide import TaxiGuide
    from trailmark.tasks import task_options
    from trailmark.tasks.taxi import Taxi

    about = asked.settings()
    options = {"horizon": 20, **task_options(words or [])}
    source = _task("taxi", options)
    assert isinstance(source, Taxi)
    settings = {"kind": "taxi", "options": options, "starts": starts, "perturb": perturb, "fatal": fatal, "seed": seed}
    draw = lambda: source.tasks("train", starts, seed)
    _plays(out, {**settings, **about}, draw, lambda: TaxiGuide(source, fatal), asked)


@grouped
def alfworld(
    words: Words = None,
    out: Out = Path("alfworld-data"),
    starts: Starts = 100,
    split: Annotated[str, typer.Option(help="Which games.")] = "train",
    perturb: Perturb = 0.5,
    tokenizer: Tokenizer = "",
    seed: Seed = 0,
    asked: TeacherOptions = TeacherOptions(),
) -> None:
    """Write plays of an ALFWorld expert (expert=seeing or expert=exploring) with a teacher's reflections. games=PATH is
    the folder of the games."""
    from trailmark.errors import TrailmarkError
    from trailmark.methods.reflect.alfworld_guide import AlfworldGuide
    from trailmark.seats.model_names import read_tokenizer
    from trailmark.tasks import task_options
    from trailmark.tasks.alfworld.source import Alfworld

    about = asked.settings()
    options = task_options(words or [])
    source = _task("alfworld", options)
    assert isinstance(source, Alfworld)
    if source.mode != "labels":
        raise TrailmarkError("data alfworld records labels: leave out mode, or set mode=labels.")
    if tokenizer:
        source.bind(read_tokenizer(tokenizer))
    settings = {"kind": "alfworld", "options": options, "starts": starts, "split": split, "perturb": perturb,
                "tokenizer": tokenizer, "seed": seed}  # fmt: skip
    draw = lambda: source.tasks(split, starts, seed)
    _plays(out, {**settings, **about}, draw, lambda: AlfworldGuide(source), asked)
    if source.games.skipped:
        typer.echo(
            f"games left out: {len(source.games.skipped)}; the first: {next(iter(source.games.skipped.values()))}"
        )


def _opened(asked: TeacherOptions) -> Callable[[Path], Teacher]:
    from trailmark.methods.reflect.teacher import Offline, Server

    return lambda answers: Offline() if (client := asked.open(answers)) is None else Server(client)


def _plays(out: Path, settings: dict[str, Any], tasks: Callable[[], Any], guide: Any, asked: TeacherOptions) -> None:
    from trailmark.data.output_paths import writable
    from trailmark.data.stages import Counts, data_folder
    from trailmark.methods.reflect import plays
    from trailmark.progress import Progress

    writable(out)
    with data_folder(out, settings) as place:
        who = _opened(asked)(out / "answers.jsonl")

        def stage() -> Counts:
            starts = tasks()
            with Progress(len(starts), name="plays") as bar:
                return plays.make(
                    out, starts, guide, who, settings["perturb"], settings["seed"], lambda n: bar.update(n, {})
                )

        outputs = ["steps.jsonl", "oracle", "behaviour", "plays.partial.jsonl"]
        place.make([place.stage("plays", stage, outputs)], ["plays"], typer.echo)


def _task(name: str, options: dict[str, Any]) -> Any:
    from trailmark.tasks import get_task

    return get_task(name, **options)


def curves(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN …", help="Runs; each is drawn with the runs that it continues.")
    ],
    out: Annotated[Path, typer.Option(help="The picture: .png, .svg or .pdf.")] = Path("curves.png"),
    metrics: Annotated[str, typer.Option(help="Panels, such as success,reward.")] = "success,reward,loss",
    width: Annotated[int, typer.Option(min=1, help="Steps of the moving average.")] = 99,
    log: Annotated[Path | None, typer.Option(help="Also write the merged log of the first run as JSONL.")] = None,
) -> None:
    """Draw curves over runs that continue each other, with steps counted over all; optionally merge their logs."""
    from trailmark.runs.store import Run

    for run in runs:
        Run.open(run)  # before torch is imported
    from trailmark.methods.reflect.chains import draw_curves, write_merged

    typer.echo(draw_curves(runs, out, metrics.split(","), width))
    if log is not None:
        typer.echo(f"{log}: {write_merged(runs[0], log)} steps")
