"""`trailmark eval`, `trailmark compare`, `trailmark study`. Each ends with one line of JSON; `--json` prints only that."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print only one line of JSON.")]


def _finish(result: dict[str, Any], quiet: bool, *shown: Any) -> None:
    """Tables for people, then the one line for programs."""
    import json
    import sys

    from rich.console import Console

    if not quiet:
        console = Console(width=None if sys.stdout.isatty() else 240)
        for item in shown:
            console.print(item, highlight=False)
    typer.echo(json.dumps(result, ensure_ascii=False, allow_nan=False))


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
    task: Annotated[str | None, typer.Option(help="The task; of a run, its own.")] = None,
    split: Annotated[str | None, typer.Option(help="Of the task; 'test' unless the run says otherwise.")] = None,
    n: Annotated[int | None, typer.Option(min=1, help="Starts; all of the split, or as many as the run says.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Episodes of each start: pass@k, maj@k.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Of starts and draws.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0: the most likely token.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="Keep tokens of this mass.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of one turn.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.")] = "auto",
    chat: Annotated[
        bool, typer.Option("--chat", help="Prompt in words and read the label; servers always are.")
    ] = False,
    react: Annotated[bool, typer.Option("--react", help="An analysis first, then the choice (with --chat).")] = False,
    served: Annotated[str | None, typer.Option(metavar="NAME", help="The model's name at a server.")] = None,
    header: Annotated[list[str] | None, typer.Option(help="Of a server: NAME=VALUE or NAME=env:VARIABLE.")] = None,
    query: Annotated[list[str] | None, typer.Option(help="Of a server: NAME=VALUE, such as api-version=…")] = None,
    key_env: Annotated[str | None, typer.Option(metavar="VARIABLE", help="Holds a server's bearer key.")] = None,
    search: Annotated[
        str | None, typer.Option(metavar="KIND:WIDTH", help="beam:B, best_of:N or actions:K, chosen by --value.")
    ] = None,
    value: Annotated[
        str | None, typer.Option(metavar="RUN", help="Whose value chooses: a run, a folder, a server, or logp.")
    ] = None,
    budget: Annotated[int | None, typer.Option(min=1, help="Most tokens that one searched decision may draw.")] = None,
    tree: Annotated[bool, typer.Option("--tree", help="Keep all that was searched in the episodes of --out.")] = False,
    episodes: Annotated[Path | None, typer.Option(help="No model: recompute from this file, folder or run.")] = None,
    side: Annotated[str | None, typer.Option(help="Whose outcome counts, where there are several.")] = None,
    seat: Annotated[str | None, typer.Option(help="Whose turns and tokens are counted; all.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the episodes to this JSONL.")] = None,
    json: Json = False,
) -> None:
    """Success, reward, cost and length with intervals: of a model in a task, or recomputed from stored episodes.

    What is not said comes from the recipe of the run that MODEL belongs to, so `trailmark eval RUN` is the evaluation that
    the run itself makes. Models after the first that lie in no run (random, oracle, a server) play the first one's starts.
    """
    from trailmark.errors import RunError, TrailmarkError
    from trailmark.evaluate.run import stage_rows
    from trailmark.evaluate.tables import table
    from trailmark.store import atomic_write, to_json

    if (model is None) == (episodes is None):
        raise TrailmarkError("eval: give either a MODEL to play or --episodes PATH to recompute from.")
    if episodes is not None:
        from trailmark.evaluate.stored import episode_files, read_files

        if task or options or out:
            raise TrailmarkError("eval --episodes recomputes what was played: it takes no --task, options or --out.")
        rows = [
            row for name, f in episode_files(episodes).items() for row in stage_rows(read_files(f), name, side, seat)
        ]
        result: dict[str, Any] = {"command": "eval", "source": str(episodes), "rows": rows}
        return _finish(result, json, table(rows, str(episodes)))
    from trailmark.evaluate.players import Wish, is_address, play_model

    if out is not None and out.exists():
        raise RunError(f"{out} exists: choose another file.")
    extra = [
        w for w in options or () if "=" not in w and (is_address(w) or Path(w).is_dir() or w in ("random", "oracle"))
    ]
    words = [w for w in options or () if w not in extra]
    if search is None and (value or budget or tree):
        raise TrailmarkError("eval: --value, --budget and --tree belong to --search, such as --search beam:3.")
    wish = Wish(task, words, split, n, samples, seed, temperature, top_p, max_tokens, device, chat or react, react, served,
                header or (), query or (), key_env, search, value, budget, tree, str(model))  # fmt: skip
    made = {name: play_model(name, wish) for name in dict.fromkeys([str(model), *extra])}
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(out, "".join(to_json(e) + "\n" for played, _ in made.values() for e in played).encode())
    rows = [row for name, (played, _) in made.items() for row in stage_rows(played, name, side, seat)]
    rows += [row for _, about in made.values() for row in about.pop("beside", [])]
    about = made[str(model)][1]
    every = {"configurations": {name: about for name, (_, about) in made.items()}} if extra else {}
    return _finish(
        {"command": "eval", **about, **every, "rows": rows}, json, table(rows, f"{about['task']} {about['split']}")
    )


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN …", help="Runs, or JSONL files of episodes.")],
    episodes: Annotated[
        str | None, typer.Option(help="Which evaluation of each run: a name, or a file inside it.")
    ] = None,
    common: Annotated[bool, typer.Option("--common", help="Compare on the starts that all of them played.")] = False,
    side: Annotated[str | None, typer.Option(help="Whose outcome counts, where there are several.")] = None,
    seat: Annotated[str | None, typer.Option(help="Whose turns and tokens are counted; all.")] = None,
    json: Json = False,
) -> None:
    """Compare with the first: paired intervals over equal tasks and seeds, from the last evaluation of each."""
    from trailmark.errors import TrailmarkError
    from trailmark.evaluate import stored
    from trailmark.evaluate.run import summarise
    from trailmark.evaluate.tables import difference_table, table

    if len(runs) < 2:
        raise TrailmarkError("compare: two runs or files, or more.")
    found = [stored.evaluated(path, episodes) for path in runs]
    names = stored.short_names(runs)
    sets = {name: played for name, (played, _) in zip(names, found)}
    differences = stored.compare(sets, common=common, side=side, seat=seat)
    rows = [{**summarise(sets[name], name, side, seat), "source": str(where)} for name, (_, where) in zip(names, found)]
    result = {"command": "compare", "rows": rows, "differences": [d.plain() for d in differences]}
    _finish(result, json, table(rows, "as evaluated"), difference_table(result["differences"]))


def study(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A study in studies/, or a YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Keys of the study.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where runs and results go; runs/studies/NAME.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Other seeds, such as 0,1,2.")] = None,
    resume: Annotated[bool, typer.Option("--resume/--no-resume", help="Go on with what is there.")] = True,
    docs: Annotated[Path | None, typer.Option(help="Also write this page of the docs, with its picture.")] = None,
    json: Json = False,
) -> None:
    """Run arms x seeds at an equal budget; write a table, a picture, and a verdict per claim.

    Finished runs are kept and half-finished ones go on, so a study that was stopped is started again with the same words.
    Two processes may run the same study at once and share its work.
    """
    import contextlib
    import sys

    from trailmark.evaluate.pages import write_page
    from trailmark.evaluate.study import find_study, run_study
    from trailmark.evaluate.tables import study_tables

    more = [*(overrides or ()), *([f"seeds=[{seeds}]"] if seeds is not None else [])]
    path = find_study(name)
    with contextlib.redirect_stdout(sys.stderr):  # whatever a method prints, stdout is ours
        result, folder = run_study(path, more, out, resume)
    if docs is not None:
        write_page(folder, docs)
    _finish({"command": "study", "out": str(folder), **result}, json, *study_tables(result), f"results: {folder}")


def curves(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN …", help="Runs; each with those it goes on from.")],
    out: Annotated[Path, typer.Option(help="The picture: .png, .svg or .pdf.")] = Path("curves.png"),
    metrics: Annotated[str, typer.Option(help="Panels, such as success,reward.")] = "success,reward,loss",
    width: Annotated[int, typer.Option(min=1, help="Steps of the moving average.")] = 99,
    log: Annotated[Path | None, typer.Option(help="Also write the merged log of the first run as JSONL.")] = None,
) -> None:
    """Draw curves across runs that continue one another, their steps counted through; optionally merge their logs."""
    from trailmark.evaluate.upkeep import draw_curves, write_merged

    typer.echo(draw_curves(runs, out, metrics.split(","), width))
    if log is not None:
        typer.echo(f"{log}: {write_merged(runs[0], log)} steps")


def prune(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN …", help="Runs that nobody trains now.")],
    keep: Annotated[int, typer.Option(min=1, help="Newest checkpoints kept of each.")] = 1,
) -> None:
    """Remove old checkpoints; metrics, episodes and evaluations stay."""
    from trailmark.evaluate.upkeep import prune_run

    for run in runs:
        typer.echo(f"{run}: {prune_run(run, keep) / 2**20:.1f} MB freed")
