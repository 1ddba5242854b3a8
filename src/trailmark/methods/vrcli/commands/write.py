"""`trailmark write`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from trailmark import MOST_SEED
from trailmark.terminal.options import ServerOptions, grouped, pairs


@grouped
def write(
    rows: Annotated[Path, typer.Argument(metavar="ROWS", help="Rows of `trailmark data stories`, such as test.jsonl.")],
    variants: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME=[PLANNER,]WRITER …",
            help="Who writes, and who plans before: a run, a checkpoint, a folder, a name on the hub or an address.",
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder to write; the same command resumes an unfinished one.")
    ] = Path("written"),
    n: Annotated[int | None, typer.Option(min=1, help="Only the first rows.")] = None,
    samples: Annotated[int, typer.Option(min=1, max=1000, help="Plans, and texts, of each row.")] = 1,
    plan_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a plan with its reasoning.")] = 2048,
    marker: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="A plan follows it; may be repeated. Default: reward.markers of the run that plans, else In summary: "
            "and the like.",
        ),
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=1, help="Wanted tokens of a text; default: as many as the gold text has.")
    ] = None,
    at_least: Annotated[
        bool, typer.Option("--min/--no-min", help="Write at least half of that; some servers cannot be told.")
    ] = True,
    temperature: Annotated[float, typer.Option(min=0, max=100, help="0: the most likely token.")] = 0.7,
    top_p: Annotated[float, typer.Option(min=1e-6, max=1, help="Sample from the most likely mass.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from so many tokens; 0: all.")] = 20,
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Random seed.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.")] = "auto",
    at_once: Annotated[int, typer.Option(min=1, max=4096, help="Texts at the same time.")] = 8,
    tokenizer: Annotated[
        str, typer.Option(metavar="NAME", help="Counts a gold text for a server; default: four bytes each.")
    ] = "",
    server: ServerOptions = ServerOptions(),
    deadline: Annotated[float, typer.Option(min=0.1, max=86400, help="Seconds for one answer of a server.")] = 600.0,
    failures: Annotated[
        float, typer.Option(min=0, max=1, metavar="SHARE", help="Of the plans, and of the texts, that may fail.")
    ] = 0.0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Reason, then write: each variant makes plans and texts for the rows. B: b=base, BR: br=base,base, SFT: sft=sft,
    RL: rl=rl,base. Then: trailmark improvement, chapters, judge."""
    from trailmark.data.output_paths import writable
    from trailmark.errors import TrailmarkError
    from trailmark.methods.vrcli import written as w
    from trailmark.methods.vrcli.plans import given_markers

    named = [w.read_variant(word) for word in variants]
    if twice := next((v.name for v in named if [x.name for x in named].count(v.name) > 1), None):
        raise TrailmarkError(f"write: two variants are called '{twice}'.")
    writable(out)
    marks = given_markers(marker)
    how = w.How(temperature, top_p, top_k, plan_tokens, length, at_least, samples, seed, marks, tokenizer)
    servers = w.Servers(
        server.served, pairs(server.header or (), "--header"), pairs(server.query or (), "--query"), server.key_env,
        deadline, failures,
    )
    quiet = (lambda line: None) if json else typer.echo
    made = w.write(rows, out, named, how, n, servers, device, at_once, quiet)
    if json:
        from json import dumps

        typer.echo(dumps({"command": "write", "rows": str(rows), "out": str(out), "variants": made}))
    else:
        _show(made, out)


def _show(made: dict[str, Any], out: Path) -> None:
    from trailmark.terminal.output import print_rows

    rows = []
    for name, a in made.items():
        marked = "–" if a.get("markers") is None else f"{100 * a['markers']:.0f} %"
        plans = [str(a["plans"]), marked] if "plans" in a else ["–", "–"]
        texts = [str(a["texts"]), f"{a['words']:.1f}", str(a["cut"])]
        rows.append([name, a["planner"] or "–", a["writer"], *plans, *texts])
    print_rows(["variant", "planner", "writer", "plans", "with a marker", "texts", "words", "cut"], rows, str(out))
