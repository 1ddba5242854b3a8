"""`trailmark eval`, `compare`, `study`, `curves` and `prune`. `evaluate/output.py` says what they print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trailmark import MOST_SEED
from trailmark.commands.options import ServerOptions, grouped, say_error

if TYPE_CHECKING:
    from trailmark.evaluate.players import Wish
    from trailmark.types import Annotation, Episode

Json = Annotated[bool, typer.Option("--json", help="Print only one line of JSON.")]


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


def _must_have_scores(rows: Sequence[Mapping[str, Any]]) -> None:
    """A table without numbers is no result: print the reason, and exit with code 1."""
    rows = [r for r in rows if not r["episodes"] or r.get("hidden") != r["episodes"]]  # hidden labels are no failure
    rows = [r for r in rows if r["scored"] == 0 and "success" not in r["metrics"]]  # all failed, and count as lost
    for r in rows:
        why = r.get("warning") or ("there are no episodes" if not r["episodes"] else "no episode has a score")
        say_error(f"nothing was scored for {r['name']}: {why}.")
    if rows:
        raise typer.Exit(1)


@grouped
def evaluate(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A run, a checkpoint, a model folder, a name on the hub, tiny, a server's address, random, oracle.",
        ),
    ] = None,
    options: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL … KEY=VALUE …", help="More models; options of the task.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="The task; default: the run's own.")] = None,
    split: Annotated[str | None, typer.Option(help="Split of the task; default: the run's, or 'test'.")] = None,
    n: Annotated[int | None, typer.Option(min=1, help="Number of starts; default: the run's, or all.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Episodes of each start, for pass@k and maj@k.")] = 1,
    seed: Annotated[int | None, typer.Option(min=0, max=MOST_SEED, help="Random seed of starts and draws.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0: the most likely token.")] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0, max=1, help="Sample from the most likely tokens with this mass.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of one turn.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.")] = "auto",
    chat: Annotated[
        bool, typer.Option("--chat", help="Give instructions in words and read the answer; servers always get words.")
    ] = False,
    react: Annotated[
        bool, typer.Option("--react", help="Ask for an analysis first, then the choice: servers, or with --chat.")
    ] = False,
    server: ServerOptions = ServerOptions(),
    search: Annotated[
        str | None, typer.Option(metavar="KIND:WIDTH", help="Search: beam:B, best_of:N or actions:K; --value chooses.")
    ] = None,
    value: Annotated[
        str | None, typer.Option(metavar="RUN", help="The value model of a search: a run, a folder, a server, or logp.")
    ] = None,
    budget: Annotated[
        int | None, typer.Option(min=1, help="Most tokens that the search of one decision may sample.")
    ] = None,
    tree: Annotated[
        bool, typer.Option("--tree", help="Store all candidates of a search in the episodes of --out.")
    ] = False,
    vary: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=A,B,…",
            help="Play once per value of a task option: order=ABCD,DCBA, or dataset=reclor@val,logiqa2@dev.",
        ),
    ] = None,
    leaderboard: Annotated[
        Path | None, typer.Option(metavar="FILE.npy", help="Task logic: write the chosen options, a number per row.")
    ] = None,
    episodes: Annotated[
        Path | None, typer.Option(help="Recompute from this file, folder or run, without a model.")
    ] = None,
    best_by: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --episodes: choose among samples by these step scores.")
    ] = None,
    over: Annotated[
        str, typer.Option(help="With --best-by: product, min, geomean, mean, sum or last of the steps.")
    ] = "product",
    tokenizer: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --episodes of two seats: their tokenizer; adds `followed`.")
    ] = None,
    side: Annotated[str | None, typer.Option(help="Whose outcome counts, where there are several.")] = None,
    seat: Annotated[str | None, typer.Option(help="Whose turns and tokens are counted; all.")] = None,
    put: Annotated[
        list[str] | None,
        typer.Option(metavar="SEAT=MODEL", help="Put another model into a seat of the run. May be repeated."),
    ] = None,
    failed: FailedAs = Failures.apart,
    failures: Annotated[
        float, typer.Option(min=0, max=1, metavar="SHARE", help="Of the plays of a server that may fail.")
    ] = 0.0,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the episodes to this JSONL; the same command plays again what failed at a server."),
    ] = None,
    json: Json = False,
) -> None:
    """Success, reward, cost and length with intervals: of a model in a task, or recomputed from stored episodes.

    Options that are not given come from the recipe of MODEL's run, so `trailmark eval RUN` repeats the run's own
    evaluation. Models without a task of their own (random, oracle, a server, a run that imitates rows) play the starts
    of the first run that has one; a run does so with that run's settings. Exit code 1: nothing could be scored, plays
    of a server failed, or a leaderboard's file lacks an answer, and the reason is printed.
    """
    from trailmark.errors import TrailmarkError

    if (model is None) == (episodes is None):
        raise TrailmarkError("eval: give either a MODEL to play or --episodes PATH to recompute from.")
    if episodes is not None:
        more = {"--task": task, "options": options, "--out": out, "--leaderboard": leaderboard, "--vary": vary,
                "--search": search, "--split": split, "--n": n, "--samples": samples > 1, "--seed": seed is not None,
                "--temperature": temperature is not None, "--max-tokens": max_tokens, "--put": put}  # fmt: skip
        if given := [name for name, value in more.items() if value]:
            raise TrailmarkError(f"eval --episodes recomputes what was played: it takes no {' or '.join(given)}.")
        return _recompute(episodes, tokenizer, side, seat, failed, json, best_by, over)
    if tokenizer is not None:
        raise TrailmarkError("eval: --tokenizer belongs to --episodes; a model has its own.")
    if best_by is not None:
        raise TrailmarkError("eval: --best-by belongs to --episodes.")
    if search is None and (value or budget or tree):
        raise TrailmarkError("eval: --value, --budget and --tree belong to --search, such as --search beam:3.")
    from trailmark.evaluate.players import Wish, with_task
    from trailmark.seats.locate import is_address

    is_model = lambda w: "=" not in w and (is_address(w) or Path(w).is_dir() or w in ("random", "oracle"))
    extra = [w for w in options or () if is_model(w)]
    words = [w for w in options or () if w not in extra]
    # If one of the models is a server, --react is for servers only: a trained run plays as it was trained.
    talk = chat or (react and not any(map(is_address, [str(model), *extra])))
    wish = Wish(task, words, split, n, samples, seed, temperature, top_p, max_tokens, device, talk, react,
                server.served, server.header or (), server.query or (), server.key_env, search, value, budget, tree,
                with_task([str(model), *extra]), leaderboard is not None, out,
                1.0 if failed == Failures.lost else failures, put or ())  # fmt: skip
    _play([str(model), *extra], wish, side, seat, failed, out, json, vary, leaderboard)


def _recompute(
    path: Path,
    tokenizer: str | None,
    side: str | None,
    seat: str | None,
    failed: Failures,
    json: bool,
    best_by: str | None,
    over: str,
) -> None:
    """`eval --episodes`: the table of stored episodes."""
    from trailmark.evaluate.copy_rate import hears_words
    from trailmark.evaluate.output import finish
    from trailmark.evaluate.run import stage_rows
    from trailmark.evaluate.stored_episodes import commands_of, episode_files, read_files
    from trailmark.evaluate.tables import table, warnings

    words = None
    if tokenizer is not None:
        from trailmark.report.pieces import named

        words = named(tokenizer)
    found = episode_files(path)
    sets = {name: read_files(files) for name, files in found.items()}
    meant = {name: {} if words is None else commands_of(files) for name, files in found.items()}
    each = [stage_rows(played, name, side, seat, failed.value, words, meant[name]) for name, played in sets.items()]
    rows = [row for some in each for row in some]
    unread = words is None and any(map(hears_words, sets.values()))
    chosen = [] if best_by is None else _chosen_rows(path, best_by, over)
    rows += chosen
    hint = ["note: one seat advises another: --tokenizer NAME adds how often the advice is followed."] * unread
    result = {"command": "eval", "source": str(path), "failed_as": failed.value, "rows": rows}
    whole = [some[0] for some in each]  # without the rows per stage
    finish(result, json, lambda width: [table(rows, str(path), width), *warnings([*whole, *chosen]), *hint])
    _must_have_scores(whole)


def _play(
    models: list[str],
    wish: Wish,
    side: str | None,
    seat: str | None,
    failed: Failures,
    out: Path | None,
    json: bool,
    vary: str | None,
    leaderboard: Path | None,
) -> None:
    """`eval MODEL …`: let the models play, write the episodes to `out`, and print the table."""
    from trailmark.config import SamplingConfig
    from trailmark.data.output_paths import new_file
    from trailmark.errors import DataError, RunError
    from trailmark.evaluate.output import finish
    from trailmark.evaluate.players import play_model, remote_seat, varied
    from trailmark.evaluate.run import stage_rows
    from trailmark.evaluate.tables import table, warnings
    from trailmark.failures import must_be_few, unanswered
    from trailmark.runs.collect import Collection
    from trailmark.seats.locate import is_address
    from trailmark.seats.open import NoServer
    from trailmark.stopping import noting
    from trailmark.types import Failed

    for file in (out, leaderboard):
        if file is not None:
            new_file(file)
    if leaderboard is not None and (vary or wish.n):
        raise RunError(f"{leaderboard} needs all questions in one order: leave out --vary and --n.")
    try:
        for name in filter(is_address, models[1:]):  # check servers now, before the first model plays for an hour
            remote_seat(name, wish, SamplingConfig())
        wishes = {name: dict(varied(wish, vary)) for name in dict.fromkeys(models)}
        with noting("plays of a server are kept beside --out, others are not" if out and any(map(is_address, models))
                    else "its plays are not kept"):  # fmt: skip
            made = {f"{name}{label}": play_model(name, w) for name, some in wishes.items() for label, w in some.items()}
    except NoServer as problem:
        say_error(str(problem))
        raise typer.Exit(1) from None
    each = [
        stage_rows(
            played, name, side, seat, failed.value, about.pop("tokenizer", None), about.pop("commands", None)
        )
        for name, (played, about) in made.items()
    ]
    kept = [path for _, about in made.values() if (path := about.pop("kept", None)) is not None]
    rows, whole = [row for some in each for row in some], [some[0] for some in each]
    rows += [row for _, about in made.values() for row in about.pop("beside", [])]
    noted = [a for _, about in made.values() for a in about.pop("notes", [])]
    changed = list(dict.fromkeys(w for _, about in made.values() for w in about.get("warnings", ())))
    orders = []
    if vary is not None and vary.startswith("order="):
        from trailmark.evaluate.choices import order_row

        for name, some in wishes.items():
            orders.append(order_row({label: made[f"{name}{label}"][0] for label in some}, f"{name}, all orders"))
    rows += orders
    if out is not None and any(row["scored"] or row.get("hidden") or "success" in row["metrics"] for row in rows):
        _write_episodes(out, {name: played for name, (played, _) in made.items()}, noted, vary is not None)
        for path in kept:
            Collection(path).forget()
    about = next(iter(made.values()))[1]
    every = {"configurations": {name: about for name, (_, about) in made.items()}} if len(made) > 1 else {}
    result = {"command": "eval", **about, **every, "failed_as": failed.value, "rows": rows}
    told = [f"warning: {what}." for what in changed]
    told += [f"note: {name}: {line}" for name, made_by in made.items() for line in _left_out(*made_by)]
    lost = ""
    if leaderboard is not None:
        try:
            told.append(_write_leaderboard(leaderboard, models[0], *made[models[0]]))
        except DataError as problem:
            lost = f"{leaderboard} was not written: {problem}"
    title = f"{about['task']} {about['split']}"
    finish(result, json, lambda width: [table(rows, title, width), *warnings([*whole, *orders]), *told])
    if lost:
        say_error(lost)
        raise typer.Exit(1)
    _must_have_scores(whole)
    for name, (played, _) in made.items():
        bad = [e.outcome.error for e in played if isinstance(e.outcome, Failed)]
        if out is None:
            bad = bad if is_address(name) else list(unanswered(played).values())
            then = "With --out FILE the others are kept, and the same command asks only for what failed."
            must_be_few(f"plays of {name}", bad, len(played), wish.failures, "--failures", then=then)


def _write_episodes(
    out: Path, made: Mapping[str, Sequence[Episode]], notes: Sequence[Annotation], varied: bool
) -> None:
    """Write the episodes of all models to one file, and the judge's notes on them next to it."""
    from dataclasses import replace

    from trailmark.runs.annotations import write_beside
    from trailmark.runs.store import atomic_write, to_json

    out.parent.mkdir(parents=True, exist_ok=True)
    kept = {e.id for played in made.values() for e in played}  # a search stores only the plays that it chose
    if not varied:
        write_beside(out, [a for a in notes if a.episode in kept])
    mark = lambda name, e: replace(e, id=f"{name}:{e.id}") if varied else e  # one start is played several times
    lines = [to_json(mark(name, e)) + "\n" for name, played in made.items() for e in played]
    atomic_write(out, "".join(lines).encode())


def _write_leaderboard(path: Path, name: str, played: Sequence[Any], about: Mapping[str, Any]) -> str:
    """Write the predictions of task logic to a file, and say how many there are."""
    from trailmark.evaluate.choices import write_predictions
    from trailmark.tasks import get_task

    source: Any = get_task(about["task"], **about["options"])
    size = source.size(about["split"])
    blank = write_predictions(path, played, size)
    return f"{path}: {size} predictions of {name}, {blank} of answers that name no option (these say 0)."


def _left_out(played: Sequence[Episode], about: Mapping[str, Any]) -> list[str]:
    """What a task did not play, and why; and whether it had too few starts, so that some were played again."""
    from trailmark.tasks import get_task, task_class, task_names
    from trailmark.tasks.base import TaskSource

    kind = task_class(about["task"]) if about["task"] in task_names() else TaskSource
    there, told = len({e.task.id for e in played}), list[str]()
    if getattr(kind, "finite", False) and len(played) > there * about["samples"]:
        told.append(f"split '{about['split']}' has {there:,} starts, fewer than asked for: some were played again.")
    if getattr(kind, "left_out_of", TaskSource.left_out_of) is TaskSource.left_out_of:
        return told
    return [*told, *get_task(about["task"], **about["options"]).left_out_of(about["split"])]


def _chosen_rows(path: Path, name: str, over: str) -> list[dict[str, Any]]:
    """The rows of a choice by step scores, for every file of episodes that has them beside it."""
    from typing import get_args

    from trailmark import formats
    from trailmark.errors import TrailmarkError, nearest
    from trailmark.evaluate.choices import choose_row, steps_of
    from trailmark.evaluate.stored_episodes import episode_files
    from trailmark.score.classes import Over

    if over not in get_args(Over):
        raise TrailmarkError(f"eval: --over '{over}' is no rule.{nearest(over, get_args(Over))}")
    rows = []
    for stem, files in episode_files(path).items():
        found = [formats.read("episodes", f, None) for f in files]
        played, notes = [e for f in found for e in f.episodes], [a for f in found for a in f.annotations]
        rows.append(choose_row(played, steps_of(played, notes, name), over, f"{stem}, by {name}"))  # type: ignore[arg-type]
    return rows


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN …", help="Runs, or JSONL files of episodes.")],
    episodes: Annotated[
        str | None, typer.Option(help="The evaluation of each run: a name, or a file inside it.")
    ] = None,
    common: Annotated[bool, typer.Option("--common", help="Compare on the starts that all of them played.")] = False,
    side: Annotated[str | None, typer.Option(help="Whose outcome counts, where there are several.")] = None,
    seat: Annotated[str | None, typer.Option(help="Whose turns and tokens are counted; all.")] = None,
    failed: FailedAs = Failures.apart,
    json: Json = False,
) -> None:
    """Compare runs with the first one: paired intervals over equal tasks and seeds, from the last evaluation of each.

    A run without an evaluation plays the starts of one that has one, with its settings. Exit code 1: nothing could be
    scored, or no start has a number in both, and the reason is printed.
    """
    from trailmark.errors import TrailmarkError
    from trailmark.evaluate import stored_episodes as stored
    from trailmark.evaluate.missing_evaluations import all_evaluated
    from trailmark.evaluate.output import finish
    from trailmark.evaluate.run import summarise
    from trailmark.evaluate.tables import difference_table, table, warnings

    if len(runs) < 2:
        raise TrailmarkError("compare: give two or more runs or files.")
    found = all_evaluated(runs, episodes)
    names = stored.short_names(runs)
    sets = {name: played for name, (played, _) in zip(names, found)}
    differences = stored.compare(sets, common=common, side=side, seat=seat, failed=failed.value)
    rows = [
        {**summarise(sets[name], name, side, seat, failed=failed.value), "source": str(where)}
        for name, (_, where) in zip(names, found)
    ]
    result = {
        "command": "compare",
        "failed_as": failed.value,
        "rows": rows,
        "differences": [d.plain() for d in differences],
    }
    said = "One evaluation of each: the intervals are over starts, and say nothing about other seeds of training."
    finish(
        result, json, lambda width: [table(rows, "as evaluated", width), *warnings(rows)],
        lambda width: [*difference_table(result["differences"], width), said],
    )  # fmt: skip
    _must_have_scores(rows)


def study(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A study in studies/, or a YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Keys of the study.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for runs and results; default: runs/studies/NAME.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Other seeds, such as 0,1,2.")] = None,
    resume: Annotated[bool, typer.Option("--resume/--no-resume", help="Resume a study.")] = True,
    docs: Annotated[Path | None, typer.Option(help="Also write this page of the docs, with its picture.")] = None,
    json: Json = False,
) -> None:
    """Run arms x seeds at an equal budget; write a table, a picture, and a verdict per claim.

    Finished runs are kept and unfinished ones resumed, so repeat the same command if a study was stopped. Two processes
    may work on the same study at once.
    """
    import contextlib
    import sys

    from trailmark.evaluate.output import finish
    from trailmark.evaluate.pages import write_page
    from trailmark.evaluate.study import find_study, run_study
    from trailmark.evaluate.tables import study_tables

    more = [*(overrides or ()), *([f"seeds=[{seeds}]"] if seeds is not None else [])]
    path = find_study(name)
    with contextlib.redirect_stdout(sys.stderr):  # output of a method must not mix with the result on stdout
        result, folder = run_study(path, more, out, resume)
    if docs is not None:
        write_page(folder, docs)
    notes = [f"note: {note}" for note in result["notes"]]
    finish(
        {"command": "study", "out": str(folder), **result}, json,
        lambda width: [*study_tables(result, width), *notes, f"results: {folder}"],
    )  # fmt: skip


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
    from trailmark.runs.continued import draw_curves, write_merged

    typer.echo(draw_curves(runs, out, metrics.split(","), width))
    if log is not None:
        typer.echo(f"{log}: {write_merged(runs[0], log)} steps")


def prune(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN …", help="Runs that are not being trained.")],
    keep: Annotated[int, typer.Option(min=1, help="Number of newest checkpoints to keep.")] = 1,
) -> None:
    """Delete old checkpoints; metrics, episodes and evaluations stay."""
    from trailmark.runs.store import Run

    for run in runs:
        Run.open(run)  # check all of them before anything is deleted
    from trailmark.runs.continued import prune_run

    for run in runs:
        typer.echo(f"{run}: {prune_run(run, keep) / 2**20:.1f} MB freed")
