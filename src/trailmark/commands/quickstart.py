"""`trailmark quickstart`: a small example of a whole method, from training to a table and a page.

A method is shown if its folder brings a function of `(out, seed, resume, quiet)` (`PROVIDES["quickstarts"]`). It trains
under `out` and ends with `finish`, which writes the table, the report and what to read next.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from trailmark import MOST_SEED, registry, stopping
from trailmark.errors import RecipeError, RunError, nearest


def quickstart(
    method: Annotated[str, typer.Option(help="The method to show, such as reflect, oreo, lpr or vrcli.")] = "reflect",
    out: Annotated[Path, typer.Option(help="Where the runs go.")] = Path("runs/quickstart"),
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Random seed.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Resume an interrupted quickstart.")] = False,
    quiet: Annotated[bool, typer.Option("--json", help="Print only the JSON line of results.")] = False,
) -> None:
    """Run a whole method at a small size, on two cores, in minutes, and show the results."""
    if method not in (known := registry.names("quickstarts")):
        raise RecipeError(f"there is no quickstart for method '{method}' yet.{nearest(method, known)}")
    if out.exists() and not out.is_dir():
        raise RunError(f"{out} is a file: choose another directory with --out DIR.")
    if out.exists() and any(out.iterdir()) and not resume:
        raise RunError(f"{out} is not empty: go on with --resume, or choose another directory with --out DIR.")
    words = ["trailmark", "quickstart", "--method", method, "--out", str(out), "--seed", str(seed), "--resume"]
    with stopping.noting(lambda: f"go on with: {shlex.join(words)}"):
        registry.load("quickstarts", method)(out, seed, resume, quiet)


def trained(out: Path, seed: int, resume: bool, name: str, folder: str, *words: str) -> Path:
    """A run of a packaged recipe in a folder of the quickstart."""
    from trailmark.methods import get_method, resolve_recipe
    from trailmark.recipe import load_recipe
    from trailmark.runs.launch import launch

    where = out / folder
    given = [*words, *further(folder), f"seed={seed}", f"model.seed={seed}", file("out", where), f"name={folder}"]
    config = resolve_recipe(load_recipe(packaged(name), given))
    launch(get_method(config.method), config, resume and where.exists())
    return where


def packaged(name: str) -> Path:
    """The file of a recipe that comes with the library."""
    return Path(__file__).parent.parent / "recipes" / f"{name}.yaml"


def file(key: str, path: Path) -> str:
    return f"{key}={json.dumps(str(path))}"


def further(folder: str) -> list[str]:
    """Further keys of a run's recipe. A test makes the runs shorter here."""
    return []


def finish(
    out: Path,
    files: Mapping[str, Path],
    shown: Path,
    quiet: bool,
    title: str,
    main: str,
    metrics: Sequence[str] = ("success", "reward"),
    read_next: str = "",
    note: str = "",
) -> None:
    """Write the table for people, the page of the run `shown`, and one JSON line for programs. Each row of the table is
    a file of episodes. `main` is the row whose command is printed, `read_next` names the pages that say more, and
    `note` says what the table shows and what it does not."""
    from trailmark.evaluate.output import finish as show
    from trailmark.evaluate.run import summarise
    from trailmark.evaluate.tables import table, warnings
    from trailmark.report import write_report
    from trailmark.runs.store import atomic_write, read_segment

    rows = [summarise(read_segment(path), name) for name, path in files.items()]
    page = write_report(shown)
    listed = {name: str(path) for name, path in files.items()}
    result = {"command": "quickstart", "rows": rows, "files": listed, "report": str(page)}
    atomic_write(out / "quickstart.json", (json.dumps(result, indent=1) + "\n").encode())
    short = [{**r, "metrics": {k: v for k, v in r["metrics"].items() if k in metrics}} for r in rows]
    words = [
        *([note] if note else []),
        f"The same numbers from the episodes: trailmark eval --episodes {files[main]}",
        f"What happened, and why: {page}",
        *([f"Read next: {read_next}"] if read_next else []),
    ]
    show(result, quiet, lambda width: [table(short, title, width), *warnings(rows), *words])
