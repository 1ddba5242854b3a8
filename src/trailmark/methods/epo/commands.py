"""`trailmark data select | shape`: the two steps of EPO on files of ShareGPT."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from trailmark.terminal.options import ServerOptions, finite, grouped

Most = Annotated[float, typer.Option(callback=finite, help="The largest outcome: 10 in Sotopia, 1 elsewhere.")]


@grouped
def select(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A list of {conversations, score}: finished plays.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The same with `index` and `location`.")],
    server: Annotated[str, typer.Option(metavar="URL", help="The judge: a server that speaks OpenAI's protocol.")],
    most: Most = 1.0,
    rubric: Annotated[Path | None, typer.Option(metavar="FILE", help="What is asked, in place of ours.")] = None,
    temperature: Annotated[float, typer.Option(min=0, max=100, callback=finite, help="Of the judge.")] = 0.7,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 512,
    again: Annotated[int, typer.Option(min=0, max=100, help="Times it is asked again if it cannot be read.")] = 2,
    constrained: Annotated[bool, typer.Option("--constrained", help="It can write only JSON of an answer.")] = False,
    at_once: Annotated[int, typer.Option(min=1, max=4096, help="Questions at the same time.")] = 8,
    how: ServerOptions = ServerOptions(),
    deadline: Annotated[float, typer.Option(min=0.1, max=86400, help="Seconds for one answer, with retries.")] = 120.0,
    retries: Annotated[int, typer.Option(min=0, max=1000, help="Retries after a refused connection, 429 or 5xx.")] = 5,
    failures: Annotated[float, typer.Option(min=0, max=1, metavar="SHARE", help="Of the items that may fail.")] = 0.0,
) -> None:
    """Let a model name the strategies that decided each play. What it answers is kept in OUT.answers.jsonl: the same
    command asks only what is missing."""
    from trailmark.data.output_paths import new_file
    from trailmark.methods.epo.judge import RUBRIC, CriticalTurns
    from trailmark.methods.epo.sharegpt_files import select as run
    from trailmark.plain_files import read_plain
    from trailmark.score.config import ModelJudgeConfig
    from trailmark.seats.config import HttpSeat
    from trailmark.seats.open import UNNAMED, open_server

    answers = out.parent / f"{out.name}.answers.jsonl"  # with_name refuses the path of an empty name
    new_file(out, overwrite=answers.is_file())
    at: dict[str, Any] = {"address": server, "model": UNNAMED, "concurrency": 2 * at_once, **how.section()}
    engine = open_server(HttpSeat(**at, deadline=deadline, retries=retries), "")
    settings = {"server": at, "temperature": temperature, "max_tokens": max_tokens, "again": again, "at_once": at_once,
                "constrained": constrained, "rubric": read_plain(rubric).decode() if rubric else RUBRIC}  # fmt: skip
    judge = CriticalTurns(ModelJudgeConfig.model_validate(settings), engine, answers)
    counts = run(source, out, judge, most, failures)
    typer.echo(f"{out}: " + ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in counts.items()))


def shape(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A file of `trailmark data select`.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The same with a score on each answer.")],
    gamma: Annotated[float, typer.Option(min=0, max=1, callback=finite, help="Discount over answers.")] = 0.99,
    add: Annotated[bool, typer.Option("--add", help="A critical last answer earns the outcome besides its 1.")] = False,
    normalise: Annotated[str, typer.Option(help="trajectory, dataset, group, baseline or turns.")] = "trajectory",
    baseline: Annotated[float | None, typer.Option(help="The number that is subtracted; none: a mean.")] = None,
    first: Annotated[bool, typer.Option("--first", help="The first answer, such as OK, earns 1.")] = False,
    least: Annotated[float, typer.Option(callback=finite, help="The smallest outcome.")] = 0.0,
    most: Most = 1.0,
    outcome_only: Annotated[bool, typer.Option("--outcome-only", help="Ignore who judged what.")] = False,
) -> None:
    """Turn outcomes and critical strategies into the weights that method epo learns with."""
    import json

    from trailmark.config import resolve
    from trailmark.data.output_paths import new_file
    from trailmark.methods.epo.config import ShapeConfig
    from trailmark.methods.epo.sharegpt_files import shape as run
    from trailmark.runs.store import atomic_write

    new_file(out)
    given = {"gamma": gamma, "outcome": "add" if add else "override", "normalise": normalise, "baseline": baseline,
             "first": first, "least": least, "most": most}  # fmt: skip
    config = resolve(given, ShapeConfig)
    counts, made = run(source, out, config, not outcome_only)
    about = {**given, **made.numbers()}
    atomic_write(out.with_name(f"{out.name}.shape"), (json.dumps(about, indent=1) + "\n").encode(), "data")
    typer.echo(f"{out}: " + ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in counts.items()))
