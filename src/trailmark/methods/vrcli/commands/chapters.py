"""`trailmark chapters`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer


def chapters(
    systems: Annotated[list[str], typer.Argument(metavar="NAME=FILE …", help="JSONL of each system: id and text.")],
    rows: Annotated[Path, typer.Option(help="The rows that the texts were written for.")],
    clean: Annotated[bool, typer.Option("--clean/--raw", help="Cut end markers and repetitions first.")] = True,
    windows: Annotated[bool, typer.Option("--windows", help="Also cut where 20 words repeat.")] = False,
    out: Annotated[Path | None, typer.Option(help="A CSV of all numbers, for `trailmark votes --metrics`.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Lengths, repetition and copying of written texts, for each system, with intervals."""
    from trailmark.data.output_paths import new_file
    from trailmark.methods.vrcli import chapters as c
    from trailmark.stats.intervals import mean_of
    from trailmark.tasks.stories.rows import read_rows

    if out is not None:
        new_file(out)
    sections = {row.id: row.sections() for row in read_rows(rows)}
    result: dict[str, Any] = {"command": "chapters", "rows": str(rows), "systems": {}}
    lines = ["key,cat,val"]
    for name, file in named_files(systems, "chapters"):
        texts = read_texts(file, sections)
        found = [(i, c.measures(c.clean(t, windows) if clean else t, sections[i])) for i, t in texts]
        about: dict[str, Any] = {"texts": len(found)}
        for metric in dict.fromkeys(k for _, m in found for k in m):
            mine = [(i, m[metric]) for i, m in found if metric in m]
            about[metric] = mean_of([v for _, v in mine], [i for i, _ in mine]).plain()
            lines += [f"{name},{metric},{v!r}" for _, v in mine]
        result["systems"][name] = about
    if out is not None:
        from trailmark.runs.atomic_files import atomic_write

        atomic_write(out, ("\n".join(lines) + "\n").encode(), "chapters")
    if json:
        from json import dumps

        typer.echo(dumps(result))
    else:
        _show(result)


def named_files(systems: list[str], command: str) -> list[tuple[str, Path]]:
    """NAME=FILE words as names and files."""
    from trailmark.errors import TrailmarkError

    found = {}
    for word in systems:
        name, sign, file = word.partition("=")
        if not sign or not name or not file or "," in name:
            raise TrailmarkError(f"{command}: '{word}' is not NAME=FILE, such as base=base.jsonl.")
        if name in found:
            raise TrailmarkError(f"{command}: two systems are called '{name}'.")
        found[name] = Path(file)
    return list(found.items())


def read_texts(file: Path, known: Mapping[str, Any], empty: bool = False) -> list[tuple[str, str]]:
    """(id, text) of each line. `empty`: a text may be empty. A line may also be an episode, such as `trailmark eval
    --out` writes: its id is that of the task, its text that of the last turn."""
    from trailmark.formats.rows import Row, each

    def one(row: Row) -> tuple[str, str]:
        value = row.fields(_last_turn(row.value), "", ["id", "text"])
        name = str(value["id"])
        if name not in known:
            raise row.bad(f"is '{name}', which is no row of the data.", "id")
        text = row.text(value["text"], "text")
        if not text.strip() and not empty:
            raise row.bad("is empty: there is nothing to measure.", "text")
        return name, text

    return each(file, one)[0]


def _last_turn(value: Any) -> Any:
    """An episode as id and text; anything else as it is."""
    if not isinstance(value, dict) or not {"task", "turns"} <= value.keys() or not value["turns"]:
        return value
    return {"id": value["task"]["id"], "text": value["turns"][-1].get("text", "")}


def _show(result: dict[str, Any]) -> None:
    from trailmark.terminal.output import print_rows

    systems, rows = result["systems"], []
    columns = ["mean [95 % interval]", *(f"{n} ({a['texts']})" for n, a in systems.items())]
    metrics = dict.fromkeys(m for a in systems.values() for m in a if m != "texts")
    for metric in metrics:
        cells = []
        for a in systems.values():
            v = a.get(metric)
            if v is None:
                cells.append("–")
            else:
                ends = "?" if v["low"] is None else f"{v['low']:.4g}, {v['high']:.4g}"
                cells.append(f"{v['value']:.4g} [{ends}]")
        rows.append([metric, *cells])
    print_rows(columns, rows, "Written texts")
