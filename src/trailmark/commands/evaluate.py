"""`trailmark eval`, `compare`, `study`, `curves` and `prune`. `terminal/output.py` says what they print."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trailmark.evaluate.options import CountOptions, Failures, PlayOptions
from trailmark.terminal.options import grouped, say_error

if TYPE_CHECKING:
    from trailmark.evaluate.players import Played

Json = Annotated[bool, typer.Option("--json", help="Print only one line of JSON.")]


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
    words: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL … KEY=VALUE …", help="More models; options of the task.")
    ] = None,
    play: PlayOptions = PlayOptions(),
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
    count: CountOptions = CountOptions(),
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
        if given := [*play.given(), *(words or ())]:
            raise TrailmarkError(f"eval --episodes recomputes what was played: it takes no {' or '.join(given)}.")
        return _recompute(episodes, tokenizer, best_by, over, count, json)
    if tokenizer is not None:
        raise TrailmarkError("eval: --tokenizer belongs to --episodes; a model has its own.")
    if best_by is not None:
        raise TrailmarkError("eval: --best-by belongs to --episodes.")
    if play.search is None and (play.value or play.budget or play.tree):
        raise TrailmarkError("eval: --value, --budget and --tree belong to --search, such as --search beam:3.")
    from trailmark.evaluate.players import with_task
    from trailmark.seats.model_names import is_address

    is_model = lambda w: "=" not in w and (is_address(w) or Path(w).is_dir() or w in ("random", "oracle"))
    models = [str(model), *filter(is_model, words or ())]
    # If one of the models is a server, --react is for servers only: a trained run plays as it was trained.
    chat = play.chat or (play.react and not any(map(is_address, models)))
    failures = 1.0 if count.failed == Failures.lost else play.failures
    options = [w for w in words or () if not is_model(w)]
    play = replace(play, words=options, like=with_task(models), chat=chat, failures=failures)
    _play(models, play, count, json)


def _recompute(
    path: Path, tokenizer: str | None, best_by: str | None, over: str, count: CountOptions, json: bool
) -> None:
    """`eval --episodes`: the table of stored episodes."""
    from trailmark.evaluate.run import stage_rows
    from trailmark.evaluate.stored_episodes import commands_of, episode_files, hears_words, read_files
    from trailmark.evaluate.tables import table, warnings
    from trailmark.terminal.output import finish

    decoder = None
    if tokenizer is not None:
        from trailmark.report.pieces import named

        decoder = named(tokenizer)
    found = episode_files(path)
    sets = {name: read_files(files) for name, files in found.items()}
    labels = {name: {} if decoder is None else commands_of(files) for name, files in found.items()}
    how = count.side, count.seat, count.failed.value, decoder
    each = [stage_rows(played, name, *how, labels[name]) for name, played in sets.items()]
    chosen = [] if best_by is None else _chosen_rows(found, best_by, over)
    rows = [row for some in [*each, chosen] for row in some]
    advised = decoder is None and any(map(hears_words, sets.values()))
    hint = ["note: one seat advises another: --tokenizer NAME adds how often the advice is followed."] * advised
    result = {"command": "eval", "source": str(path), "failed_as": count.failed.value, "rows": rows}
    whole = [some[0] for some in each]  # without the rows per stage
    finish(result, json, lambda width: [table(rows, str(path), width), *warnings([*whole, *chosen]), *hint])
    _must_have_scores(whole)


def _play(models: list[str], options: PlayOptions, count: CountOptions, json: bool) -> None:
    """`eval MODEL …`: let the models play, write the episodes to `--out`, and print the table."""
    from trailmark import registry
    from trailmark.data.output_paths import new_file
    from trailmark.errors import DataError, RunError
    from trailmark.evaluate.tables import table, warnings
    from trailmark.terminal.output import finish

    out, file = options.out, options.leaderboard
    for path in (out, file):
        if path is not None:
            new_file(path)
    if file is not None and (options.vary or options.n):
        raise RunError(f"{file} needs all questions in one order: leave out --vary and --n.")
    by_model = _played(models, options)
    made = {f"{name}{label}": played for name, some in by_model.items() for label, played in some.items()}
    each = [played.rows(name, count) for name, played in made.items()]
    over_all = []
    if (key := (options.vary or "").partition("=")[0]) in registry.ours("varied"):
        row_of = registry.load("varied", key)
        for name, some in by_model.items():
            sets = {label: played.episodes for label, played in some.items()}
            over_all.append(row_of(sets, f"{name}, all {key}s"))
    whole = [some[0] for some in each]
    rows = [row for some in each for row in some]
    rows += [*(row for played in made.values() for row in played.beside), *over_all]
    if out is not None and any(row["scored"] or row.get("hidden") or "success" in row["metrics"] for row in rows):
        _write_episodes(out, made, options.vary is not None)
    about = {name: played.about for name, played in made.items()}
    first = next(iter(about.values()))
    every = {"configurations": about} if len(about) > 1 else {}
    result = {"command": "eval", **first, **every, "failed_as": count.failed.value, "rows": rows}
    notes = list(dict.fromkeys(f"warning: {what}." for a in about.values() for what in a.get("warnings", ())))
    notes += [f"note: {name}: {line}" for name, played in made.items() for line in _left_out(played)]
    lost = ""
    if file is not None:
        try:
            notes.append(made[models[0]].board.write(file, models[0], made[models[0]].episodes))
        except DataError as problem:
            lost = f"{file} was not written: {problem}"
    title = f"{first['task']} {first['split']}"
    finish(result, json, lambda width: [table(rows, title, width), *warnings([*whole, *over_all]), *notes])
    if lost:
        say_error(lost)
        raise typer.Exit(1)
    _must_have_scores(whole)
    if out is None:
        _must_be_answered(made, options.failures)


def _played(models: list[str], options: PlayOptions) -> dict[str, dict[str, Played]]:
    """What each model played, by the name of the model and by what was varied."""
    from trailmark.config import SamplingConfig
    from trailmark.evaluate.players import play_model, remote_seat, varied
    from trailmark.seats.model_names import is_address
    from trailmark.seats.open import NoServer
    from trailmark.stopping import advising

    stored = options.out is not None and any(map(is_address, models))
    try:
        for name in filter(is_address, models[1:]):  # check servers now, before the first model plays for an hour
            remote_seat(name, options, SamplingConfig())
        each = varied(options)
        lost = "plays of a server are kept beside --out, others are not" if stored else "its plays are not kept"
        with advising(lost):
            return {name: {label: play_model(name, o) for label, o in each} for name in dict.fromkeys(models)}
    except NoServer as problem:
        say_error(str(problem))
        raise typer.Exit(1) from None


def _must_be_answered(made: Mapping[str, Played], share: float) -> None:
    from trailmark.failures import must_be_few, unanswered
    from trailmark.seats.model_names import is_address
    from trailmark.types import Failed

    then = "With --out FILE the others are kept, and the same command asks only for what failed."
    for name, played in made.items():
        bad = list(unanswered(played.episodes).values())
        if is_address(name):
            bad = [e.outcome.error for e in played.episodes if isinstance(e.outcome, Failed)]
        must_be_few(f"plays of {name}", bad, len(played.episodes), share, "--failures", then=then)


def _write_episodes(out: Path, made: Mapping[str, Played], varied: bool) -> None:
    """Write the episodes of all models to one file, and the judge's notes on them next to it. What was stored on the
    way is deleted."""
    from trailmark.evaluate.players import judge_of
    from trailmark.runs.collect import Collection
    from trailmark.runs.store import write_beside, write_rows

    out.parent.mkdir(parents=True, exist_ok=True)
    every = {e.id for played in made.values() for e in played.episodes}  # a search stores only the plays that it chose
    if not varied:
        write_beside(out, [a for played in made.values() for a in played.notes if a.episode in every])
    mark = lambda name, e: replace(e, id=f"{name}:{e.id}") if varied else e  # one start is played several times
    write_rows(out, [mark(name, e) for name, played in made.items() for e in played.episodes])
    for played in made.values():
        if played.stored is not None:
            Collection(played.stored).forget()
            shutil.rmtree(judge_of(played.stored), ignore_errors=True)


def _left_out(played: Played) -> list[str]:
    """What a task did not play, and why; and whether it had too few starts, so that some were played again."""
    from trailmark.tasks.base import declared

    source, split, there = declared(played.source), played.about["split"], len({e.task.id for e in played.episodes})
    again = source.finite and len(played.episodes) > there * played.about["samples"]
    few = f"split '{split}' has {there:,} starts, fewer than asked for: some were played again."
    return [*([few] if again else []), *source.left_out_of(split)]


def _chosen_rows(files: Mapping[str, Sequence[Path]], name: str, over: str) -> list[dict[str, Any]]:
    """The rows of a choice by step scores, for every file of episodes that has them beside it."""
    from typing import get_args

    from trailmark import formats
    from trailmark.errors import TrailmarkError, nearest
    from trailmark.evaluate.choices import choose_row, steps_of
    from trailmark.score.classes import Over

    if over not in get_args(Over):
        raise TrailmarkError(f"eval: --over '{over}' is no rule.{nearest(over, get_args(Over))}")
    rows = []
    for stem, some in files.items():
        found = [formats.read("episodes", f, None) for f in some]
        played, notes = [e for f in found for e in f.episodes], [a for f in found for a in f.annotations]
        rows.append(choose_row(played, steps_of(played, notes, name), over, f"{stem}, by {name}"))  # type: ignore[arg-type]
    return rows


@grouped
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN …", help="Runs, or JSONL files of episodes.")],
    episodes: Annotated[
        str | None, typer.Option(help="The evaluation of each run: a name, or a file inside it.")
    ] = None,
    common: Annotated[bool, typer.Option("--common", help="Compare on the starts that all of them played.")] = False,
    count: CountOptions = CountOptions(),
    json: Json = False,
) -> None:
    """Compare runs with the first one: paired intervals over equal tasks and seeds, from the last evaluation of each.

    A run without an evaluation plays the starts of one that has one, with its settings. Exit code 1: nothing could be
    scored, or no start has a number in both, and the reason is printed.
    """
    from trailmark.errors import TrailmarkError
    from trailmark.evaluate import stored_episodes as stored
    from trailmark.evaluate.missing_evaluations import all_evaluated
    from trailmark.evaluate.run import summarise
    from trailmark.evaluate.tables import difference_table, table, warnings
    from trailmark.terminal.output import finish

    if len(runs) < 2:
        raise TrailmarkError("compare: give two or more runs or files.")
    found = all_evaluated(runs, episodes)
    names = stored.short_names(runs)
    sets = {name: played for name, (played, _) in zip(names, found)}
    how: dict[str, Any] = {"side": count.side, "seat": count.seat, "failed": count.failed.value}
    differences = [d.plain() for d in stored.compare(sets, common=common, **how)]
    rows = [{**summarise(sets[name], name, **how), "source": str(where)} for name, (_, where) in zip(names, found)]
    result = {"command": "compare", "failed_as": count.failed.value, "rows": rows, "differences": differences}
    note = "One evaluation of each: the intervals are over starts, and say nothing about other seeds of training."
    finish(
        result, json, lambda width: [table(rows, "as evaluated", width), *warnings(rows)],
        lambda width: [*difference_table(differences, width), note],
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

    from trailmark.evaluate.pages import write_page
    from trailmark.evaluate.study import find_study, run_study
    from trailmark.evaluate.tables import study_tables
    from trailmark.terminal.output import finish

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


def prune(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN …", help="Runs that are not being trained.")],
    keep: Annotated[int, typer.Option(min=1, help="Number of newest checkpoints to keep.")] = 1,
) -> None:
    """Delete old checkpoints; metrics, episodes and evaluations stay."""
    from trailmark.runs.store import Run

    for run in runs:
        Run.open(run)  # check all of them before anything is deleted
    from trailmark.runs.checkpoints import prune_run

    for run in runs:
        typer.echo(f"{run}: {prune_run(run, keep) / 2**20:.1f} MB freed")
