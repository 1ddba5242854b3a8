"""The picture of a study, and its page in the docs. Both are made only from study.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trailmark.errors import DataError
from trailmark.evaluate.tables import format_interval, study_markdown
from trailmark.plain_files import read_json
from trailmark.runs.atomic_files import atomic_write
from trailmark.terminal.pictures import BLUE, GREY, picture

VERDICTS = {"holds": "#2a9d5c", "reversed": "#c8553d", "unclear": "#b08900", "one seed": "#8d99ae"}


def draw(result: Mapping[str, Any], folder: Path) -> None:
    """Draw picture.png and picture.svg: a panel for each measure (a dot is a seed, a bar the interval) and one for the
    claims. The same result gives the same bytes."""
    arms, measures, claims = result["arms"], list(result["measures"]), result["claims"]
    panels = len(measures) + bool(claims)
    size = (1.2 + 3.6 * panels, 1.4 + 0.42 * max(len(arms), len(claims), 2))
    with picture(folder / "picture", size) as figure:
        axes = figure.subplots(1, panels, squeeze=False)[0]
        for ax, measure in zip(axes, measures):
            for y, arm in enumerate(arms):
                cell = arm["values"][measure]
                _bar(ax, y, cell, BLUE)
                ax.plot(cell["seeds"], [y + 0.22] * len(cell["seeds"]), "o", color=GREY, ms=3, alpha=0.8)
            _rows(ax, [a["name"] for a in arms], measure)
        if claims:
            for y, c in enumerate(claims):
                _bar(axes[-1], y, c, VERDICTS[c["verdict"]])
            axes[-1].axvline(0, color="black", lw=0.8)
            _rows(axes[-1], [f"{c['claim']}\n{c['verdict']}" for c in claims], "difference")
        seeds = "one seed" if len(result["seeds"]) == 1 else f"{len(result['seeds'])} seeds"
        figure.suptitle(f"{result['name']}: {seeds}, 95 % intervals", fontsize=10)


def _bar(ax: Any, y: float, cell: Mapping[str, Any], colour: str) -> None:
    if cell["low"] is not None and cell["high"] is not None:
        ax.plot([cell["low"], cell["high"]], [y, y], "-", color=colour, lw=2.5, solid_capstyle="butt")
    ax.plot([cell["value"]], [y], "D", color=colour, ms=5)


def _rows(ax: Any, names: list[str], label: str) -> None:
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set_xlabel(label)
    ax.grid(axis="x", color="#dddddd", lw=0.6)
    ax.set_axisbelow(True)


def read_study(folder: Path) -> dict[str, Any]:
    path = folder / "study.json"
    try:
        return read_json(path)
    except (OSError, ValueError) as e:
        raise DataError(f"cannot be read as the result of a study ({e}).", path) from None


def page(result: Mapping[str, Any], picture: str) -> str:
    """The page: the question, the command, the table, the picture, the verdicts in words, and how it was computed."""
    words = " ".join([Path(result["file"]).stem, *result["overrides"]])
    budget = ", ".join(f"{v:g} {k}" for k, v in result["budget"].items())
    seeds = ", ".join(map(str, result["seeds"]))
    meaning = {
        "holds": "holds: the interval of the difference lies above 0",
        "reversed": "reversed: the interval of the difference lies on the other side of 0",
        "unclear": "unclear: the interval of the difference contains 0",
        "one seed": "one seed: the interval is over starts and says nothing about other seeds",
    }
    out = [f"# {result['name']}", "", result["about"].strip(), "", "```", f"trailmark study {words}", "```", "",
           f"Every arm: {budget}; seeds {seeds}. This page is written by that command with `--docs`.", "",
           study_markdown(result), f"![{result['name']}]({picture})", ""]  # fmt: skip
    for c in result["claims"]:
        known = c["low"] is not None or c["verdict"] == "one seed"
        verdict = meaning[c["verdict"]] if known else "unclear: there is no interval"
        if c["verdict"] != c.get("alone", c["verdict"]):
            verdict = "unclear: the interval alone would decide, but not after the correction for all claims"
        out.append(f"- *{c['claim']}* {verdict} ({format_interval(c, sign=True)}; {c['method']}).")
    out += ["", "## Arms", "", "| arm | recipe | keys set | steps |", "|---|---|---|---|"]
    out += [*map(_arm, result["arms"]), "", *(f"Note: {note}" for note in result["notes"])]
    return "\n".join(out).rstrip() + "\n"


def _arm(a: Mapping[str, Any]) -> str:
    """The row of an arm: how it was trained, or whose runs it reads and which file."""
    if "of" in a:
        file = f"`{a['episodes']}`" if a["episodes"] else "-"
        return f"| {a['name']} | the runs of {a['of']} | {file} | |"
    keys = ", ".join(f"`{k}`" for k in a["set"]).replace("|", "\\|")
    return f"| {a['name']} | {a['recipe']} | {keys or '-'} | {', '.join(map(str, a['steps']))} |"


def write_page(folder: Path, file: Path) -> None:
    """Write the page of the study in `folder`, and its pictures beside it under the page's own name."""
    result = read_study(folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    for kind in ("png", "svg"):
        atomic_write(file.with_suffix(f".{kind}"), (folder / f"picture.{kind}").read_bytes())
    atomic_write(file, page(result, file.with_suffix(".png").name).encode())
