"""`trailmark judge`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from trailmark.terminal.options import ServerOptions, grouped


@grouped
def judge(
    rows: Annotated[Path, typer.Argument(metavar="ROWS", help="Rows of `trailmark data stories`, such as test.jsonl.")],
    systems: Annotated[list[str], typer.Argument(metavar="NAME=FILE …", help="JSONL of each system: id and text.")],
    server: Annotated[str, typer.Option(metavar="URL", help="The judge: a server that speaks OpenAI's protocol.")],
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="The CSV to write; the same command asks what is missing.")
    ] = Path("votes.csv"),
    genres: Annotated[Path | None, typer.Option(help="JSON: the genres of each book.")] = None,
    criteria: Annotated[Path | None, typer.Option(help="JSON: other dimensions, and what each asks.")] = None,
    n: Annotated[int | None, typer.Option(min=1, help="Only the first rows.")] = None,
    clean: Annotated[bool, typer.Option("--clean/--raw", help="Cut end markers and repetitions first.")] = True,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 512,
    temperature: Annotated[float, typer.Option(min=0, max=100, help="Of the judge.")] = 0.0,
    again: Annotated[int, typer.Option(min=0, max=100, help="Times it is asked again if no verdict can be read.")] = 2,
    constrained: Annotated[bool, typer.Option("--constrained", help="It can write only JSON of a verdict.")] = False,
    at_once: Annotated[int, typer.Option(min=1, max=4096, help="Pairs at the same time.")] = 8,
    how: ServerOptions = ServerOptions(),
    deadline: Annotated[float, typer.Option(min=0.1, max=86400, help="Seconds for one answer, with retries.")] = 120.0,
    retries: Annotated[int, typer.Option(min=0, max=1000, help="Retries after a refused connection, 429 or 5xx.")] = 5,
    failures: Annotated[float, typer.Option(min=0, max=1, metavar="SHARE", help="Of the pairs that may fail.")] = 0.0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Let a model compare the texts of all systems, two at a time and in both orders. Then: trailmark votes FILE."""
    from trailmark.data.output_paths import new_file
    from trailmark.errors import JudgeError, TrailmarkError
    from trailmark.methods.vrcli import pair_judge as p
    from trailmark.methods.vrcli.chapters import clean as cleaned
    from trailmark.methods.vrcli.commands.chapters import named_files, read_texts
    from trailmark.methods.vrcli.pairwise import SAME
    from trailmark.methods.vrcli.plans import read_scored_rows
    from trailmark.runs.atomic_files import atomic_write
    from trailmark.score.config import ModelJudgeConfig
    from trailmark.score.judge import ModelJudge
    from trailmark.seats.config import HttpSeat
    from trailmark.seats.open import UNNAMED, open_server

    answers = out.parent / f"{out.name}.answers.jsonl"  # with_name refuses the path of an empty name
    new_file(out, overwrite=answers.is_file())  # a file with its answers beside it is ours
    files = named_files(systems, "judge")
    if len(files) < 2:
        raise TrailmarkError("judge: name two systems or more, such as base=base.jsonl rl=rl.jsonl.")
    if bad := next((name for name, _ in files if name == SAME), None):
        raise TrailmarkError(f"judge: no system can be called '{bad}': it means a tie.")
    every = read_scored_rows(rows)
    found = dict(list(every.items())[:n])
    asked = p.read_criteria(criteria)
    flags = p.read_genres(genres, found, asked)
    prepare = lambda text: cleaned(text) if clean else text
    texts = {name: [(i, prepare(t)) for i, t in read_texts(file, every) if i in found] for name, file in files}
    pairs = p.pairs_of(texts)
    at: dict[str, Any] = {"address": server, "model": UNNAMED, "concurrency": 2 * at_once, **how.section()}
    engine = open_server(HttpSeat(**at, deadline=deadline, retries=retries), "")
    settings = {"server": at, "temperature": temperature, "max_tokens": max_tokens, "again": again, "at_once": at_once,
                "constrained": constrained}  # fmt: skip
    who = ModelJudge(ModelJudgeConfig.model_validate(settings), engine, answers)
    made = p.judged(pairs, p.ask_all(who, pairs, found, asked, failures), asked, flags)
    if not made.rows:
        raise JudgeError(f"no pair has a verdict; the first: {made.failed[0]}")
    atomic_write(out, p.as_csv(made.rows), "judge")
    result = {"command": "judge", "judge": who.name, "out": str(out), "pairs": len(pairs), **who.client.used.as_dict(),
              "failed": len(made.failed), "counts": {" ".join(k): v for k, v in made.counts.items()}}  # fmt: skip
    if json:
        from json import dumps

        typer.echo(dumps(result))
    else:
        _show(result, made)
    if made.failed:
        typer.echo(
            f"warning: {len(made.failed)} of {len(pairs)} pairs have no verdict and are not in {out}; the same command "
            f"without --failures asks about them again. The first: {made.failed[0]}",
            err=True,
        )


def _show(result: dict[str, Any], made: Any) -> None:
    from rich.console import Console

    from trailmark.terminal.output import print_rows

    kinds = ("wins", "losses", "ties", "swayed")
    rows = (["" if k else f"{a} > {b}", dimension, *(str(c[kind]) for kind in kinds)]
            for (a, b), counts in made.counts.items() for k, (dimension, c) in enumerate(counts.items()))  # fmt: skip
    print_rows(["pair", "dimension", *kinds], rows, f"Judged by {result['judge']}")
    Console().print("swayed: the order of the two texts decided, so the file says `same`.")
