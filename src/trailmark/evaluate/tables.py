"""Rows as tables: for the terminal (rich) and for documents (Markdown). They say nothing that is not in the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_COLOURS = {"holds": "green", "reversed": "red", "unclear": "yellow"}


def span(cell: Mapping[str, Any] | None, sign: bool = False, digits: int = 3) -> str:
    """`0.710 [0.660, 0.758]`; a question mark where there is no interval, a dash where there is no number."""
    if cell is None or cell.get("value") is None:
        return "-"
    plus = "+" if sign else ""
    value = f"{_plain_zero(cell['value'], digits):{plus}.{digits}f}"
    if cell.get("low") is None or cell.get("high") is None:
        return f"{value} [?]"
    low, high = (f"{_plain_zero(cell[k], digits):{plus}.{digits}f}" for k in ("low", "high"))
    return f"{value} [{low}, {high}]"


def _plain_zero(value: float, digits: int) -> float:
    return 0.0 if round(value, digits) == 0 else value


def table(rows: Sequence[Mapping[str, Any]], title: str = "") -> Any:
    from rich.markup import escape
    from rich.table import Table

    names = list(dict.fromkeys(m for r in rows for m in r["metrics"]))
    out = Table(title=escape(title), title_justify="left")
    out.add_column("", overflow="fold")
    for column in [*names, "episodes"]:
        out.add_column(column, justify="right")
    for r in rows:
        count = str(r["scored"])
        for kind in ("invalid", "failed"):
            count += f" + {r[kind]} {kind}" if r[kind] else ""
        out.add_row(escape(str(r["name"])), *(escape(span(r["metrics"].get(m))) for m in names), count)
    return out


def difference_table(differences: Sequence[Mapping[str, Any]]) -> Any:
    from rich.markup import escape
    from rich.table import Table

    out = Table(title="differences, paired by start and seed", title_justify="left")
    for column in ("", "metric", "difference", "starts", "sign test", "higher"):
        out.add_column(column, justify="left" if column in ("", "metric") else "right")
    for d in differences:
        higher = {"holds": d["a"], "reversed": d["b"], "unclear": "unclear"}[d["verdict"]]
        out.add_row(escape(f"{d['a']} - {d['b']}"), d["metric"], escape(span(d, sign=True)), str(d["starts"]),
                    f"{d['sign_p']:.2g}", escape(higher))  # fmt: skip
    return out


def study_tables(result: Mapping[str, Any]) -> list[Any]:
    from rich.markup import escape
    from rich.table import Table

    rows = Table(title=escape(result["name"]), title_justify="left")
    rows.add_column("arm")
    for measure in result["measures"]:
        rows.add_column(escape(measure), justify="right")
    for arm in result["arms"]:
        rows.add_row(escape(arm["name"]), *(escape(span(arm["values"].get(m))) for m in result["measures"]))
    claims = Table(title="claims", title_justify="left")
    for column in ("claim", "difference", "verdict"):
        claims.add_column(column)
    for c in result["claims"]:
        claims.add_row(escape(c["claim"]), escape(span(c, sign=True)), f"[{_COLOURS[c['verdict']]}]{c['verdict']}[/]")
    return [rows, claims] if result["claims"] else [rows]


def study_markdown(result: Mapping[str, Any]) -> str:
    """The table of a study, and under it the verdicts."""
    safe = lambda text: str(text).replace("|", "\\|")
    names = list(result["measures"])
    lines = [f"| arm | {' | '.join(map(safe, names))} |", f"|---|{'---:|' * len(names)}"]
    for arm in result["arms"]:
        lines.append(f"| {safe(arm['name'])} | {' | '.join(span(arm['values'].get(m)) for m in names)} |")
    if result["claims"]:
        lines += ["", "| claim | difference | verdict | interval |", "|---|---:|---|---|"]
        for c in result["claims"]:
            lines.append(f"| {safe(c['claim'])} | {span(c, sign=True)} | **{c['verdict']}** | {safe(c['method'])} |")
    return "\n".join(lines) + "\n"
