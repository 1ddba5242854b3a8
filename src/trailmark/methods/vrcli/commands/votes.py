"""`trailmark votes`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def votes(
    files: Annotated[list[Path], typer.Argument(metavar="FILE…", help="CSV files of pairwise judgements.")],
    dimension: Annotated[str | None, typer.Option(help="Of the strengths and subsets; default: the last one.")] = None,
    prior: Annotated[
        float | None, typer.Option(min=0, help="Votes added to each ordered pair; default: 0, or 0.5 where needed.")
    ] = None,
    metrics: Annotated[Path | None, typer.Option(help="A CSV of automatic metrics: key, cat, val.")] = None,
    compare: Annotated[list[str] | None, typer.Option(help="Systems for a variance test, such as a,b,c.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Preferences, win rates and strengths from pairwise judgements, with intervals."""
    from trailmark.errors import TrailmarkError
    from trailmark.methods.vrcli import pairwise as p
    from trailmark.stats.intervals import t_interval

    result: dict[str, Any] = {"command": "votes", "files": []}
    number = lambda x: None if x != x else x  # JSON knows no "not a number"
    for file in files:
        found = p.read_comparisons(file)
        names, dims = p.systems(found), p.dimensions_of(found)
        main = dimension or dims[-1]
        if main not in dims:
            raise TrailmarkError(f"votes: '{main}' is no dimension of {file}: {', '.join(dims)}")
        pairs = [(a, b) for k, b in enumerate(names) for a in names[k + 1 :]]
        pairs = [(a, b) for a, b in pairs if any(c.options == tuple(sorted((a, b))) for c in found)]
        rows = []
        for first, second in pairs:
            row: dict[str, Any] = {"first": first, "second": second}
            for d in dims:
                s = p.score(found, first, second, d)
                pref, rate = s.preference, s.win_rate
                row[d] = {"wins": s.wins, "losses": s.losses, "ties": s.ties, "preference": number(pref.value),
                          "low": pref.low, "high": pref.high, "win_rate": number(rate.value), "win_rate_low": rate.low,
                          "win_rate_high": rate.high, "p": s.p}  # fmt: skip
            rates = {g: p.score(found, first, second, main, g).win_rate for g in p.subsets_of(found)}
            row["subsets"] = {g: number(r.value) for g, r in rates.items()}
            row["subset_intervals"] = {g: {"low": r.low, "high": r.high, "n": r.n} for g, r in rates.items()}
            rows.append(row)
        strong, used = p.strengths_with_intervals(found, main, prior)
        fit = {n: {"value": i.value, "low": i.low, "high": i.high} for n, i in strong.items()}
        result["files"].append({"file": str(file), "comparisons": len(found), "dimension": main, "pairs": rows,
                                "strengths": fit, "prior": used})  # fmt: skip
    if metrics is not None:
        held = p.read_metrics(metrics)
        means: dict[str, dict[str, float]] = {}
        ends: dict[str, dict[str, list[float | None]]] = {}
        for (system, name), values in held.values.items():
            means.setdefault(system, {})[name] = float(values.mean())
            around = t_interval(values)
            ends.setdefault(system, {})[name] = [around.low, around.high]
        tests = {}
        for words in compare or ():
            some = [w.strip() for w in words.split(",")]
            if missing := [w for w in some if w not in means]:
                raise TrailmarkError(f"votes: {metrics} has no system '{missing[0]}': {', '.join(means)}")
            if len(set(some)) < 2:
                raise TrailmarkError(f"votes: --compare '{words}' names one system: name two or more, such as a,b.")
            shared = [n for n in means[some[0]] if all(n in means[w] for w in some)]
            if few := next((n for n in shared if all(len(held.values[w, n]) < 2 for w in some)), None):
                raise TrailmarkError(f"votes: --compare '{words}': each has one value of '{few}': a test needs more.")
            tests[words] = {n: p.anova([held.values[w, n] for w in some])[1] for n in shared}
        doubled = [list(k) for k in held.doubled]
        result["metrics"] = {"means": means, "intervals": ends, "doubled": doubled, "anova": tests}
    if json:
        from json import dumps

        typer.echo(dumps(result))
    else:
        _show(result)


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    from trailmark.terminal.output import print_table

    console = Console()
    percent = lambda x: "–" if x is None or x != x else f"{100 * x:.1f}"
    around = lambda low, high: "" if low is None else f"\n[{percent(low)}, {percent(high)}]"
    named = lambda: Column("pair", overflow="fold", min_width=10)  # a column keeps its cells: one for each table
    exact = lambda x: "–" if x is None else f"{100 * x:.2f}"
    for f in result["files"]:
        dims = [k for k in f["pairs"][0] if k not in NO_DIMENSION] if f["pairs"] else []
        console.print(f"{f['file']}: % that the first is preferred (wins-losses) [95 % interval]", soft_wrap=True)
        for some in _portions(dims, console.width - 26, 16):
            table = Table(named(), *some)
            for row in f["pairs"]:
                values = [row[d] for d in some]
                cells = [f"{exact(x['preference'])} ({x['wins']}-{x['losses']})" + around(x["low"], x["high"])
                         for x in values]  # fmt: skip
                table.add_row(f"{row['first']} > {row['second']}", *cells)
            print_table(table, console)
        main = f["dimension"]
        groups = list(f["pairs"][0]["subsets"]) if f["pairs"] else []
        console.print(f"{main}: win rates in %, ties counted [95 % interval], and the sign test", soft_wrap=True)
        for k, some in enumerate(_portions(["all", *groups], console.width - 36, 16)):
            table = Table(named(), *some, *(["p"] if k == 0 else []))
            for row in f["pairs"]:
                d, within = row[main], row["subset_intervals"]
                rates = {"all": percent(d["win_rate"]) + around(d["win_rate_low"], d["win_rate_high"])}
                rates |= {g: percent(row["subsets"][g]) + around(x["low"], x["high"]) for g, x in within.items()}
                cells = [rates[g] for g in some] + ([f"{d['p']:.3g}"] if k == 0 else [])
                table.add_row(f"{row['first']} > {row['second']}", *cells)
            print_table(table, console)
        table = Table("system", "strength", "95 % interval", title=f"{main}: Bradley-Terry, prior {f['prior']:g} votes")
        for name, s in sorted(f["strengths"].items(), key=lambda x: -x[1]["value"]):
            ends = "unknown" if s["low"] is None else f"{s['low']:.1f} – {s['high']:.1f}"
            table.add_row(name, f"{s['value']:.1f}", ends)
        print_table(table, console)
    if "metrics" in result:
        means, ends, tests = (result["metrics"][k] for k in ("means", "intervals", "anova"))
        names = dict.fromkeys(n for m in means.values() for n in m)
        half = lambda low, high: "" if low is None else f" ± {(high - low) / 2:.3g}"
        columns = {w: {n: f"{m[n]:.4g}" + half(*ends[w][n]) for n in m} for w, m in means.items()}
        columns |= {f"p {w}": {n: f"{x:.2g}" for n, x in t.items()} for w, t in tests.items()}
        console.print("Means of automatic metrics, ± half of the 95 % interval", soft_wrap=True)
        for some in _portions(list(columns), console.width - max(map(len, names), default=0) - 4, 17):
            table = Table(Column("metric", no_wrap=True), *some)
            for n in names:
                table.add_row(n, *(columns[w].get(n, "–") for w in some))
            print_table(table, console)
        if doubled := result["metrics"]["doubled"]:
            kinds = sorted({name for _, name in doubled})
            console.print(f"warning: {len(doubled)} columns are in the file twice ({', '.join(kinds)}): counted once.")


NO_DIMENSION = ("first", "second", "subsets", "subset_intervals")


def _portions(columns: list[str], room: int, each: int) -> list[list[str]]:
    """Columns in tables that fit a terminal: `room` characters, of which a column takes about `each`."""
    size = max(1, room // each)
    return [columns[k : k + size] for k in range(0, len(columns), size)]
