"""The output of a command: tables for people, one line of JSON for programs.

--json                 only the line
stdout is a terminal   only tables: the line would fill the screen
stdout goes elsewhere  tables, then the line, so that a script can read the last line
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typer

WIDE = 240  # columns if stdout is not a terminal and $COLUMNS is not set


def screen() -> Any:
    """A console as wide as the terminal, or as $COLUMNS says."""
    from rich.console import Console

    known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(width=None if known else WIDE, highlight=False)


def finish(result: Mapping[str, Any], quiet: bool, *shown: Callable[[int], Sequence[Any]]) -> None:
    """Each of `shown` gets the width of the screen and returns what to print: tables, or plain lines."""
    if not quiet:
        console = screen()
        for make in shown:
            for item in make(console.width):
                if isinstance(item, str):
                    console.print(item, markup=False, soft_wrap=not sys.stdout.isatty())
                else:
                    console.print(item)
    if quiet or not sys.stdout.isatty():
        typer.echo(json.dumps(result, ensure_ascii=False, allow_nan=False))
