"""The output of a command: tables for people, one line of JSON for programs.

--json                 only the line
stdout is a terminal   only tables: the line would fill the screen
stdout goes elsewhere  tables, then the line, so that a script can read the last line
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import typer

SHORT = 24  # a cell of so many characters stays on one line
WIDE = 240  # columns if stdout is not a terminal and $COLUMNS is not set


def screen() -> Any:
    """A console as wide as the terminal, or as $COLUMNS says."""
    from rich.console import Console

    known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(width=None if known else WIDE, highlight=False)


def print_table(table: Any, console: Any = None) -> None:
    """Print a table of rich without cutting a number: if it is wider than the screen, the terminal breaks its lines."""
    console = console or screen()
    for column in table.columns:
        column.overflow = "fold"
        cells = [str(cell) for cell in column.cells]
        column.no_wrap = all(len(cell) <= SHORT for x in cells for cell in x.split("\n"))
    print_whole(table, console)


def print_rows(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> None:
    from rich.table import Column, Table

    first, *rest = columns
    table = Table(Column(first, no_wrap=True), *rest, title=title or None)
    for row in rows:
        table.add_row(*row)
    print_table(table)


def print_whole(table: Any, console: Any) -> None:
    """Print a table as wide as it must be to cut nothing."""
    before = console.width
    wide = console.options.update(max_width=100_000, width=100_000)
    for column in table.columns:  # rich itself cuts a cell of two words in a column that is not wrapped
        needs = [console.measure(cell, options=wide) for cell in (column.header, *column.cells)]
        column.min_width = max(n.maximum if column.no_wrap else n.minimum for n in needs)
    console.width = max(before, console.measure(table, options=wide).minimum)
    console.print(table)
    console.width = before


def finish(result: Mapping[str, Any], quiet: bool, *shown: Callable[[int], Sequence[Any]]) -> None:
    """Each of `shown` gets the width of the screen and returns what to print: tables, or plain lines."""
    if not quiet:
        console = screen()
        for make in shown:
            for item in make(console.width):
                if isinstance(item, str):
                    console.print(item, markup=False, soft_wrap=not sys.stdout.isatty())
                else:
                    print_whole(item, console)
    if quiet or not sys.stdout.isatty():
        typer.echo(json.dumps(result, ensure_ascii=False, allow_nan=False))
