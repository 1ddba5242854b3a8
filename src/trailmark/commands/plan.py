"""`trailmark plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from trailmark.plan import Part, Plan


def plan(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe in YAML.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Keys to set.")] = None,
    probe: Annotated[bool, typer.Option(help="Make a few steps, to know times and what is really written.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the plan, as one line of JSON.")] = False,
) -> None:
    """Say what memory, tokens and time a recipe will take, and warn of what cannot go well. Nothing is kept.

    Exit code 0: nothing to warn of; 1: there are warnings.
    """
    from trailmark import methods
    from trailmark.config import load_recipe
    from trailmark.runs.data_files import no_pipes

    config = methods.resolve_recipe(load_recipe(recipe, overrides or ()))
    no_pipes(config)
    from trailmark.plan import make_plan

    made = make_plan(config, probe)
    if as_json:
        typer.echo(json.dumps(made.to_dict()))
    else:
        _show(made)
    raise typer.Exit(1 if made.warnings else 0)


def _show(made: Plan) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from trailmark.terminal.output import print_table

    console = Console(soft_wrap=False)
    for part in made.parts:
        table = Table("", "", "", box=None, pad_edge=False, show_header=False)
        for row in _rows(part):
            table.add_row(*(Text(cell) for cell in row))
        if part.name:
            console.print(Text(part.name, "bold"))
        print_table(table, console)
    for warning in made.warnings:
        console.print(Text("warning: ", "yellow") + Text(warning))


def _rows(part: Part) -> list[tuple[str, str, str]]:
    from trailmark.memory import size
    from trailmark.progress import duration, short_count

    m, t = part.memory, part.tokens
    free = "" if m.free is None else f"of {size(m.free)} free on {m.device}"
    rows = [("memory", size(m.total), free)]
    rows += [("", size(v), k) for k, v in (
        ("weights", m.weights), ("gradients", m.gradients), ("optimiser", m.optimiser),
        ("activations of a micro-batch", m.activations), ("keys and values of the engine", m.engine),
    ) if v]  # fmt: skip
    if t is not None:
        turns = " (first turns, with answers of full length)" if t.first_turns else ""
        rows.append(
            ("tokens", short_count(t.learnt), f"learnt in a step, {short_count(t.trained)} of them in the loss{turns}")
        )
        if t.prompt or t.written:
            rows.append(("", short_count(t.prompt), "in prompts of a step"))
            rows.append(("", short_count(t.written), "written in a step"))
        rows.append(("", short_count(part.steps * t.learnt), f"learnt in {part.steps} steps"))
    if part.seconds is not None and part.total_seconds is not None:
        rows.append(
            ("time", duration(part.total_seconds), f"for {part.steps} steps and {part.evaluations} evaluations")
        )
        rows += [("", f"{1000 * s:.0f} ms", f"{name} of a step") for name, s in part.seconds.items() if s]
    return rows
