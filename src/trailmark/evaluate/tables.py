"""Rows as tables: for the terminal (rich) and for documents (Markdown). Tables show only what is in the rows.

A table that is wider than the screen is written with one line per number, so that no number and no word is ever broken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_COLOURS = {"holds": "green", "reversed": "red", "unclear": "yellow", "one seed": "yellow"}
_DERIVED = ("cost",)  # the reward with another sign: left out of narrow tables


def format_interval(cell: Mapping[str, Any] | None, sign: bool = False, digits: int = 3) -> str:
    """`0.710 [0.660, 0.758]`. A question mark means no interval, a dash no number. The number of failed episodes
    follows."""
    if cell is None or cell.get("value") is None:
        return "-"
    plus = "+" if sign else ""
    value = f"{_plain_zero(cell['value'], digits):{plus}.{digits}f}"
    left = "".join(f" ({cell[kind]} {kind}!)" for kind in ("failed", "invalid") if cell.get(kind))
    if cell.get("low") is None or cell.get("high") is None:
        return f"{value} [?]{left}"
    low, high = (f"{_plain_zero(cell[k], digits):{plus}.{digits}f}" for k in ("low", "high"))
    return f"{value} [{low}, {high}]{left}"


def _plain_zero(value: float, digits: int) -> float:
    return 0.0 if round(value, digits) == 0 else value


def shorten(text: str, room: int) -> str:
    """The text, without its middle if it is longer than `room`: both ends of a path are useful."""
    text, room = str(text), max(room, 5)
    if len(text) <= room:
        return text
    tail = (room - 1) * 2 // 3
    return f"{text[: room - 1 - tail]}…{text[-tail:]}"


def grid(
    head: Sequence[str], rows: Sequence[Sequence[str]], title: str = "", width: int | None = None, left: int = 1
) -> Any:
    """A rich table whose cells are never broken; names in the first column are shortened to fit. The first `left`
    columns are aligned left."""
    from rich.markup import escape
    from rich.table import Table

    if width is not None and rows:
        room = width - sum(max(map(len, column)) + 3 for column in list(zip(head, *rows))[1:]) - 4
        rows = [[shorten(first, room), *rest] for first, *rest in rows]
    whole = sum(max(map(len, column)) + 3 for column in zip(head, *rows)) + 1  # a title may be as wide as its table
    words = " ".join(shorten(word, whole) for word in title.split(" "))  # it is broken between words, never cut
    out = Table(title=escape(words), title_justify="left")
    for i, column in enumerate(head):
        out.add_column(escape(column), justify="left" if i < left else "right", no_wrap=True)
    for row in rows:
        out.add_row(*map(escape, row))
    return out


def _wide(head: Sequence[str], rows: Sequence[Sequence[str]], least: int = 12) -> int:
    """The width that a table needs, with its first column shortened to `least`."""
    columns = [max(map(len, column)) for column in zip(head, *rows)]
    return min(columns[0], least) + sum(columns[1:]) + 3 * len(columns) + 1


def metrics_table(
    named: Sequence[tuple[str, Mapping[str, Any], str]], title: str, width: int | None, count: str = ""
) -> Any:
    """(name, metric -> cell, count) as a table: one line per name or, if that is too wide, one per number."""
    metrics = list(dict.fromkeys(m for _, cells, _ in named for m in cells))
    head = ["", *metrics, *([count] if count else [])]
    rows = [
        [name, *(format_interval(cells.get(m)) for m in metrics), *([n] if count else [])] for name, cells, n in named
    ]
    if width is None or not rows or _wide(head, rows) <= width:
        return grid(head, rows, title, width)
    long = []
    for name, cells, n in named:
        few = [(m, format_interval(cells[m])) for m in metrics if m in cells and m not in _DERIVED]
        few += [(count, n)] if count else []
        long += [["" if i else name, metric, cell] for i, (metric, cell) in enumerate(few)]
    return grid(["", "", "value [95 % interval]"], long, title, width, left=3)


def table(rows: Sequence[Mapping[str, Any]], title: str = "", width: int | None = None) -> Any:
    def count(r: Mapping[str, Any]) -> str:
        left = ("invalid", "failed", "hidden")
        return str(r["scored"]) + "".join(f" + {r[kind]} {kind}" for kind in left if r.get(kind))

    return metrics_table([(str(r["name"]), r["metrics"], count(r)) for r in rows], title, width, "episodes")


def warnings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Warnings beside the numbers, one line for each row that has one."""
    return [f"warning: {shorten(r['name'], 40)}: {r['warning']}." for r in rows if r.get("warning")]


def difference_table(differences: Sequence[Mapping[str, Any]], width: int | None = None) -> list[Any]:
    """A table for each pair."""
    out = []
    for a, b in dict.fromkeys((d["a"], d["b"]) for d in differences):
        mine = [d for d in differences if (d["a"], d["b"]) == (a, b)]
        room = 24 if width is None else max(8, (width - 40) // 2)
        title = f"{shorten(a, room)} - {shorten(b, room)}: differences, paired by start and seed"
        head = ["metric", "difference", "starts", "sign test", "higher"]
        name = {"holds": shorten(a, 16), "reversed": shorten(b, 16), "unclear": "unclear"}
        rows = [
            [d["metric"], format_interval(d, sign=True), str(d["starts"]), f"{d['sign_p']:.2g}", name[d["verdict"]]]
            for d in mine
        ]
        out.append(grid(head, rows, title, width))
    return out


def study_tables(result: Mapping[str, Any], width: int | None = None) -> list[Any]:
    from rich.markup import escape
    from rich.table import Table

    arms = [(arm["name"], {m: arm["values"].get(m) for m in result["measures"]}, "") for arm in result["arms"]]
    rows = metrics_table(arms, result["name"], width)
    claims = Table(title="claims", title_justify="left")
    for column in ("claim", "difference", "verdict"):
        claims.add_column(column, no_wrap=column != "claim")
    for c in result["claims"]:
        claims.add_row(
            escape(c["claim"]), escape(format_interval(c, sign=True)), f"[{_COLOURS[c['verdict']]}]{c['verdict']}[/]"
        )
    return [rows, claims] if result["claims"] else [rows]


def study_markdown(result: Mapping[str, Any]) -> str:
    """The table of a study, and under it the verdicts."""
    safe = lambda text: str(text).replace("|", "\\|")
    names = list(result["measures"])
    lines = [f"| arm | {' | '.join(map(safe, names))} |", f"|---|{'---:|' * len(names)}"]
    for arm in result["arms"]:
        lines.append(f"| {safe(arm['name'])} | {' | '.join(format_interval(arm['values'].get(m)) for m in names)} |")
    if result["claims"]:
        corrected = any("p" in c for c in result["claims"])
        more = ("p, corrected (Holm) | ", "---:|") if corrected else ("", "")
        lines += ["", f"| claim | difference | {more[0]}verdict | interval |", f"|---|---:|{more[1]}---|---|"]
        for c in result["claims"]:
            p = f"{c['p']:.2g} | " if corrected else ""
            found = f"{format_interval(c, sign=True)} | {p}**{c['verdict']}**"
            lines.append(f"| {safe(c['claim'])} | {found} | {safe(c['method'])} |")
    return "\n".join(lines) + "\n"
