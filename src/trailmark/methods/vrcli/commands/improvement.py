"""`trailmark improvement`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

BESIDE = {  # rows of the table for what else could stand in the place of a plan
    "mean, plan of another row": "other_plan_improvement",
    "mean, random words of the prompt": "random_words_improvement",
    "mean, no plan": "empty_improvement",
    "own above another row's": "own_plan_gain",
    "  95 % interval, low": "own_plan_gain_low",
    "  95 % interval, high": "own_plan_gain_high",
}


def improvement(
    rows: Annotated[Path, typer.Argument(metavar="ROWS", help="Rows of `trailmark data stories`, such as test.jsonl.")],
    answers: Annotated[
        list[str] | None, typer.Argument(metavar="NAME=FILE …", help="JSONL of id and text, or episodes.")
    ] = None,
    model: Annotated[str, typer.Option(help="The frozen model that reads the gold texts.")] = "smollm2",
    control: Annotated[
        list[str] | None, typer.Option(help="Also plans that need no model: empty, gold, synopsis, other.")
    ] = None,
    reader: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=MODEL", help="Also a model that reads without a plan, such as a fine-tuned one."),
    ] = None,
    marker: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="A plan follows it; may be repeated. Default: reward.markers of the run of episodes, else In summary: "
            "and the like.",
        ),
    ] = None,
    n: Annotated[int | None, typer.Option(min=1, help="Only the first rows.")] = None,
    tokens: Annotated[str, typer.Option(help="What is scored: text, turn or template.")] = "turn",
    dtype: Annotated[str, typer.Option(help="Of the model's weights.")] = "float32",
    server: Annotated[
        str | None,
        typer.Option(help="A server that has the model (`trailmark serve`, vLLM), such as http://host:8000."),
    ] = None,
    served: Annotated[str | None, typer.Option(help="Its name on the server, if it is not that of --model.")] = None,
    cache: Annotated[Path | None, typer.Option(help="A file of likelihoods; the same command resumes with it.")] = None,
    baselines: Annotated[
        Path | None, typer.Option(help="A file of baselines by row id, for reward.baselines; new rows are added.")
    ] = None,
    failures: Annotated[
        float, typer.Option(min=0, max=1, metavar="SHARE", help="Of the server's answers that may fail.")
    ] = 0.0,
    out: Annotated[Path | None, typer.Option(help="A JSONL of all scores.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """By how much plans lower the perplexity of the gold texts, with intervals. Beside them stand what the plans of
    other rows, random words and no plan do, copying and length; a warning says if other rows' plans do as well."""
    from trailmark.config import ModelConfig, ServerConfig
    from trailmark.data.output_paths import new_file
    from trailmark.errors import TrailmarkError
    from trailmark.failures import must_be_few
    from trailmark.methods.vrcli import plans as p
    from trailmark.methods.vrcli.commands.chapters import named_files, read_texts
    from trailmark.recipe import resolve
    from trailmark.score.likelihood import TextScorer
    from trailmark.seats.pinned_models import pin_models

    if tokens not in ("text", "turn", "template"):
        raise TrailmarkError(f"improvement: --tokens '{tokens}' is not known: text, turn or template.")
    if not answers and not control and not reader and baselines is None:
        raise TrailmarkError("improvement: name a file of answers, such as rl=rl.jsonl, or a --control.")
    if served is not None and server is None:
        raise TrailmarkError("improvement: --served is the model's name on a server: also name --server.")
    if out is not None:
        new_file(out)
    wanted = p.given_markers(marker)
    every = p.read_scored_rows(rows)
    found = dict(list(every.items())[:n])
    arms: dict[str, tuple[list[tuple[str, str]], float | None]] = {}
    for name, file in named_files(answers or [], "improvement"):
        markers = next(m for m in (wanted, p.markers_beside(file), p.MARKERS) if m is not None)
        arms[name] = p.plans_of(((i, t) for i, t in read_texts(file, every, empty=True) if i in found), markers)
        if not arms[name][0]:
            raise TrailmarkError(f"improvement: {file} has no answer to the first {n} rows of {rows}.")
    for kind in control or ():
        if kind in arms:
            raise TrailmarkError(f"improvement: two arms are called '{kind}'.")
        with _in(rows):
            arms[kind] = p.control(found, kind), None
    readers = dict(named_files(reader or [], "improvement"))
    if twice := next((name for name in readers if name in arms), None):
        raise TrailmarkError(f"improvement: two arms are called '{twice}'.")
    there = None if server is None else resolve({"address": server, "model": served or model}, ServerConfig)
    opened = lambda name: pin_models(resolve({"name": name, "dtype": dtype}, ModelConfig))
    scorer = TextScorer(opened(model), cache, there, "--server")
    scorer.files = dict.fromkeys(found, rows)
    result: dict[str, Any] = {"command": "improvement", "rows": str(rows), "model": served or model, "arms": {}}
    with _in(rows):
        stored = None if baselines is None else p.store_baselines(baselines, scorer, found, tokens)  # type: ignore[arg-type]
    if stored is not None:
        result["baselines"] = {"file": str(baselines), "rows": len(found), "computed": stored.computed}
    if server is not None:
        scorer.baselines.failed = {}
    lines = []
    for name, (made, share) in arms.items():
        with _in(rows):
            scores = p.score_plans(scorer, found, made, tokens, stored)  # type: ignore[arg-type]
            extra, others = ({}, {}) if name in (control or ()) else p.beside(scorer, found, scores, tokens, stored)  # type: ignore[arg-type]
        result["arms"][name] = {**p.summary(scores, found), "markers": share, **extra}
        lines += [{"arm": name, **s} for s in scores]
        lines += [{"arm": f"{name}/{other}", **s} for other, some in others.items() for s in some]
    for name, other in readers.items():
        with _in(rows):
            scores = p.score_reader(scorer, TextScorer(opened(str(other)), cache), found, tokens)  # type: ignore[arg-type]
        result["arms"][name] = {**p.summary(scores, found), "markers": None, "reader": str(other)}
        lines += [{"arm": name, **s} for s in scores]
    if lost := scorer.baselines.failed:
        must_be_few("texts", list(lost.values()), len(scorer.baselines.asked), failures, "--failures")
        result["failed"] = len(lost)
    if out is not None:
        from trailmark.methods.vrcli.stories.setup import write_lines

        write_lines(out, lines)
    if json:
        from json import dumps

        typer.echo(dumps(result))
    else:
        _show(result)


@contextmanager
def _in(rows: Path) -> Iterator[None]:
    """Errors about a row name its file."""
    from trailmark.errors import DataError

    try:
        yield
    except DataError as problem:
        raise problem if problem.file is not None else DataError(problem.text, rows) from None


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    from trailmark.terminal.output import print_table

    if about := result.get("baselines"):
        Console().print(f"{about['file']}: baselines of {about['rows']} rows, {about['computed']} of them computed now")
    arms = result["arms"]
    if not arms:
        return
    title = f"Improvement of the gold texts' perplexity under {result['model']}, in percent"
    table = Table(Column("", no_wrap=True), *(Column(name, no_wrap=True) for name in arms), title=title)
    share = lambda x: "–" if x is None else f"{100 * x:.1f}"
    number = lambda x, digits=3: "–" if x is None else f"{x + 0.0:.{digits}f}"  # + 0.0: no minus before a zero
    inner = lambda a, key: a.get(key) or {}
    table.add_row("plans", *(str(a["plans"]) for a in arms.values()))
    table.add_row("mean", *(number(inner(a, "improvement").get("value")) for a in arms.values()))
    for end in ("low", "high"):
        table.add_row(f"95 % interval, {end}", *(number(inner(a, "improvement").get(end)) for a in arms.values()))
    for q in ("5", "50", "95"):
        table.add_row(f"percentile {q}", *(number(inner(a, "percentiles").get(q)) for a in arms.values()))
    for words, key in BESIDE.items():
        if any(key in a for a in arms.values()):
            table.add_row(words, *(number(a.get(key)) for a in arms.values()))
    table.add_row("plans that help, %", *(share(a.get("helps")) for a in arms.values()))
    table.add_row("words of a plan", *(number(a.get("plan_words"), 1) for a in arms.values()))
    table.add_row("correlation with length", *(number(a.get("length_correlation"), 2) for a in arms.values()))
    table.add_row("trigrams copied, %", *(share(a.get("copied")) for a in arms.values()))
    table.add_row("answers with a marker, %", *(share(a["markers"]) for a in arms.values()))
    print_table(table)
    for name, a in arms.items():
        if warning := a.get("warning"):
            Console().print(f"warning: {name}: {warning}.", soft_wrap=True)
    if lost := result.get("failed"):
        Console().print(
            f"warning: {lost} texts were not scored, because their requests failed; they are in no average."
        )
    if bad := sum(a["invalid"] for a in arms.values()):
        Console().print(f"warning: {bad} improvements are no numbers, and are in no average.")
