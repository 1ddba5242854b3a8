"""`trailmark models`."""

from __future__ import annotations

from typing import Annotated

import typer


def models(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the page docs/models.md.")] = False,
) -> None:
    """Check the model families against the installed transformers, each on a tiny random model."""
    from trailmark.models import families
    from trailmark.terminal.output import print_rows

    found = families.table(lambda name: typer.echo(f"checking {name}", err=True))
    if markdown:
        typer.echo(families.markdown(found), nl=False)
        return
    rows = []
    for c in found:
        numbers = ("–", "–") if c.refused else (f"{c.gradient:.1e}", f"{c.logp:.1e}")
        rows.append([c.family, c.layout or "refused", *numbers, c.refused or c.decoding])
    print_rows(["family", "layout", "gradient", "log-probs", "decoding"], rows, "Distance from transformers")
