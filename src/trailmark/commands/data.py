"""`trailmark data …`: data sets to imitate. Papers add their own (`PROVIDES["data"]`).

gold          a task's own worked answers
tokenizer     a small tokenizer for a tiny model, from the texts of a file
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from trailmark import MOST_SEED, registry
from trailmark.terminal.options import MANY, Words

data = typer.Typer(name="data", help="Make data sets to imitate.", no_args_is_help=True)
for _name in registry.names("data"):
    data.command(_name)(registry.load("data", _name))


@data.command()
def gold(
    task: Annotated[str, typer.Argument(metavar="TASK", help="A task whose starts have a gold answer.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The JSONL to write.")],
    words: Words = None,
    n: Annotated[int, typer.Option(min=1, max=10 * MANY, help="How many rows.")] = 1000,
    split: Annotated[str, typer.Option(help="Which split.")] = "train",
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Random seed.")] = 0,
) -> None:
    """Write a task's own worked answers as prompt and response, to imitate (`method: sft`)."""
    from trailmark.data import gold as answers
    from trailmark.tasks import task_options

    rows = answers.make(task, out, task_options(words or []), n, split, seed)
    typer.echo(f"{out}: {rows} rows")


@data.command()
def tokenizer(
    rows: Annotated[Path, typer.Argument(metavar="ROWS", help="A file of rows; every text in them counts.")],
    out: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write, for model.tokenizer.")],
    size: Annotated[int, typer.Option("--size", min=300, max=200_000, help="Most tokens.")] = 1000,
) -> None:
    """Learn a small tokenizer from the texts of a file: bytes and their commonest pieces. For tiny models."""
    from trailmark.data.output_paths import new_folder
    from trailmark.formats.rows import each
    from trailmark.models.tiny import learnt_tokenizer

    def texts(value: Any) -> list[str]:
        if isinstance(value, dict | list):
            return [t for v in (value.values() if isinstance(value, dict) else value) for t in texts(v)]
        return [value] if isinstance(value, str) else []

    found = [t for row in each(rows, lambda row: texts(row.value))[0] for t in row]
    new_folder(out)
    made = learnt_tokenizer(found, size)
    made.save_pretrained(out)
    typer.echo(f"{out}: {len(made)} tokens, from {len(found)} texts")
