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
    from trailmark.evaluate import pairwise as p

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
            rates = {g: p.score(found, first, second, main, g).win_rate.value for g in p.subsets_of(found)}
            row["subsets"] = {g: number(r) for g, r in rates.items()}
            rows.append(row)
        strong, used = p.strengths_with_intervals(found, main, prior)
        fit = {n: {"value": i.value, "low": i.low, "high": i.high} for n, i in strong.items()}
        result["files"].append({"file": str(file), "comparisons": len(found), "dimension": main, "pairs": rows,
                                "strengths": fit, "prior": used})  # fmt: skip
    if metrics is not None:
        held = p.read_metrics(metrics)
        means: dict[str, dict[str, float]] = {}
        for (system, name), values in held.values.items():
            means.setdefault(system, {})[name] = float(values.mean())
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
        result["metrics"] = {"means": means, "doubled": [list(k) for k in held.doubled], "anova": tests}
    if json:
        from json import dumps

        typer.echo(dumps(result))
    else:
        _show(result)


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    console = Console()
    percent = lambda x: "–" if x is None or x != x else f"{100 * x:.1f}"
    for f in result["files"]:
        dims = [k for k in f["pairs"][0] if k not in ("first", "second", "subsets")] if f["pairs"] else []
        table = Table("pair", *dims, title=f"{f['file']}: % that the first is preferred (wins-losses) [95 % interval]")
        for row in f["pairs"]:
            cells = [
                f"{percent(row[d]['preference'])} ({row[d]['wins']}-{row[d]['losses']})\n"
                f"[{percent(row[d]['low'])}, {percent(row[d]['high'])}]"
                for d in dims
            ]
            table.add_row(f"{row['first']} > {row['second']}", *cells)
        console.print(table)
        main = f["dimension"]
        groups = list(f["pairs"][0]["subsets"]) if f["pairs"] else []
        table = Table("pair", "win rate, ties counted", "sign test p", *groups, title=f"{main}: win rates in %")
        for row in f["pairs"]:
            d = row[main]
            rate = f"{percent(d['win_rate'])} [{percent(d['win_rate_low'])}, {percent(d['win_rate_high'])}]"
            cells = [percent(row["subsets"][g]) for g in groups]
            table.add_row(f"{row['first']} > {row['second']}", rate, f"{d['p']:.3g}", *cells)
        console.print(table)
        table = Table("system", "strength", "95 % interval", title=f"{main}: Bradley-Terry, prior {f['prior']:g} votes")
        for name, s in sorted(f["strengths"].items(), key=lambda x: -x[1]["value"]):
            table.add_row(name, f"{s['value']:.1f}", f"{s['low']:.1f} – {s['high']:.1f}")
        console.print(table)
    if "metrics" in result:
        means, tests = result["metrics"]["means"], result["metrics"]["anova"]
        names = dict.fromkeys(n for m in means.values() for n in m)
        columns = [Column("metric", no_wrap=True), *means, *(f"p {w}" for w in tests)]
        table = Table(*columns, title="Means of automatic metrics")
        for n in names:
            cells = [f"{m[n]:.4g}" if n in m else "–" for m in means.values()]
            table.add_row(n, *cells, *(f"{t[n]:.2g}" if n in t else "–" for t in tests.values()))
        console.print(table)
        if doubled := result["metrics"]["doubled"]:
            kinds = sorted({name for _, name in doubled})
            console.print(f"warning: {len(doubled)} columns are in the file twice ({', '.join(kinds)}): counted once.")
