"""`trailmark plans`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def plans(
    rows: Annotated[Path, typer.Argument(metavar="ROWS", help="Rows of `trailmark data stories`, such as test.jsonl.")],
    answers: Annotated[list[str] | None, typer.Argument(metavar="NAME=FILE …", help="JSONL of id and text.")] = None,
    model: Annotated[str, typer.Option(help="The frozen model that reads the gold texts.")] = "smollm2",
    control: Annotated[
        list[str] | None, typer.Option(help="Also plans that need no model: empty, gold, synopsis, other.")
    ] = None,
    n: Annotated[int | None, typer.Option(min=1, help="Only the first rows.")] = None,
    tokens: Annotated[str, typer.Option(help="What is scored: text, turn or template.")] = "turn",
    dtype: Annotated[str, typer.Option(help="Of the model's weights.")] = "float32",
    cache: Annotated[Path | None, typer.Option(help="A file of likelihoods; the same command resumes with it.")] = None,
    out: Annotated[Path | None, typer.Option(help="A JSONL of all scores.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """By how much plans lower the perplexity of the gold texts, with intervals, beside copying and length."""
    from trailmark.commands.chapters import named_files, read_texts
    from trailmark.config import ModelConfig
    from trailmark.data.output_paths import new_file
    from trailmark.errors import TrailmarkError
    from trailmark.evaluate import plans as p
    from trailmark.recipe import resolve
    from trailmark.score.likelihood import TextScorer
    from trailmark.seats.names import fix_names

    if tokens not in ("text", "turn", "template"):
        raise TrailmarkError(f"plans: --tokens '{tokens}' is not known: text, turn or template.")
    if not answers and not control:
        raise TrailmarkError("plans: name a file of answers, such as rl=rl.jsonl, or a --control.")
    if out is not None:
        new_file(out)
    every = p.read_scored_rows(rows)
    found = dict(list(every.items())[:n])
    arms: dict[str, tuple[list[tuple[str, str]], float | None]] = {}
    for name, file in named_files(answers or [], "plans"):
        arms[name] = p.plans_of((i, t) for i, t in read_texts(file, every, empty=True) if i in found)
        if not arms[name][0]:
            raise TrailmarkError(f"plans: {file} has no answer to the first {n} rows of {rows}.")
    for kind in control or ():
        if kind in arms:
            raise TrailmarkError(f"plans: two arms are called '{kind}'.")
        arms[kind] = p.control(found, kind), None
    scorer = TextScorer(fix_names(resolve({"name": model, "dtype": dtype}, ModelConfig)), cache)
    result: dict[str, Any] = {"command": "plans", "rows": str(rows), "model": model, "arms": {}}
    lines = []
    for name, (made, share) in arms.items():
        scores = p.score_plans(scorer, found, made, tokens)  # type: ignore[arg-type]
        result["arms"][name] = {**p.summary(scores, found), "markers": share}
        lines += [{"arm": name, **s} for s in scores]
    if out is not None:
        from trailmark.data.stories.setup import write_lines

        write_lines(out, lines)
    if json:
        from json import dumps

        typer.echo(dumps(result))
    else:
        _show(result)


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    gain = Column("improvement % [95 %]", no_wrap=True)
    head = ("plans", gain, "median", "help %", "words", "corr. length", "copied %", "marker %")
    table = Table("arm", *head, title=f"Improvement of the gold texts' perplexity under {result['model']}")
    share = lambda x: "–" if x is None else f"{100 * x:.1f}"
    for name, a in result["arms"].items():
        if "improvement" not in a:
            table.add_row(name, str(a["plans"]), "no plan could be scored")
            continue
        i = a["improvement"]
        ends = "?" if i["low"] is None else f"{i['low']:.3f}, {i['high']:.3f}"
        corr = "–" if a["length_correlation"] is None else f"{a['length_correlation']:.2f}"
        table.add_row(
            name, f"{a['plans']}", f"{i['value']:.3f} [{ends}]", f"{a['percentiles']['50']:.3f}", share(a["helps"]),
            f"{a['plan_words']:.1f}", corr, share(a["copied"]), share(a["markers"]),
        )  # fmt: skip
    Console().print(table)
    if bad := sum(a["invalid"] for a in result["arms"].values()):
        Console().print(f"warning: {bad} improvements are no numbers, and are in no average.")
