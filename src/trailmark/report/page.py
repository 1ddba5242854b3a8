"""One HTML file: the template with the run's data as JSON inside. It loads nothing, and no text of a model is
markup."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import platform
import re
from collections import Counter
from importlib import resources
from pathlib import Path
from typing import Any

from trailmark import __version__, registry
from trailmark.episodes import evenly
from trailmark.evaluate.run import FailedAs
from trailmark.plain_files import read_json
from trailmark.report import read
from trailmark.report.concerns import concerns
from trailmark.report.episodes import Texts, credit_source, starts, view
from trailmark.report.pieces import run_pieces
from trailmark.report.tables import curves, evaluation_row
from trailmark.runs.annotations import misfits
from trailmark.runs.store import Run
from trailmark.types import Annotation, Episode

ITERATIONS, EPISODES, SIZE = 8, 200, 6_000_000  # limits of a page; SIZE in characters
_VERSIONS = ("torch", "transformers", "tokenizers", "numpy", "peft", "safetensors")


def build(path: str | Path, tokenizer: str | None = None, failed: FailedAs = "apart") -> dict[str, Any]:
    """Everything the page shows, as JSON values."""
    run, lines = Run.open(path), read.LineReader()
    recipe = read.recipe_of(run)
    metrics, timings = lines.metrics(run.metrics_file), lines.metrics(run.timings_file)
    steps = recipe.get("steps") if isinstance(recipe.get("steps"), int) else None
    last = max((r["step"] for r in metrics), default=0)
    state = read.state(run, last, steps)
    files, tests = read.episode_files(run), read.evaluation_files(run, ITERATIONS)
    chosen = evenly(files, ITERATIONS)
    read_in = {f: lines.rows(f, Episode) for f in (*chosen, *tests)}
    notes = {f: read.annotated(f, lines) for f in read_in}  # by file: evaluations during training play the same starts
    wrong = [m for f, episodes in read_in.items() for m in misfits(f, episodes)]
    panels = curves(metrics, timings)
    data: dict[str, Any] = {
        "name": str(recipe.get("name") or run.path.resolve().name),
        "method": str(recipe.get("method", "")),
        "state": state,
        "step": last,
        "steps": steps,
        "curves": panels,
        "recipe": run.recipe,
        "versions": _versions(run),
        "iterations": len(files),
        "checkpoints": [int(p.name) for p in read.checkpoints(run)],
        "evaluation": [evaluation_row(name, read_in[f], failed) for f, name in tests.items()],
    }
    data |= _sources(run, read_in, tests, notes, tokenizer)
    played = [e for f in chosen for e in read_in[f]]
    data["concerns"] = concerns(panels, played, recipe, state, last, lines.broken)
    if wrong:
        more = f" In total, {len(wrong)} annotations do not fit." if len(wrong) > 1 else ""
        data["concerns"] += [{"level": "warn", "text": f"An annotation does not fit: {wrong[0]}{more}"}]
    for name in registry.ours("end_warnings"):
        if warning := registry.load("end_warnings", name)(run.path):
            data["concerns"].append({"level": "warn", "text": f"At the end: {warning}."})
    data["concerns"] += [
        {"level": "warn", "text": f"Evaluation {r['name']}: {r['warning']}."}
        for r in data["evaluation"]
        if "warning" in r
    ]
    return data


def _sources(
    run: Run,
    files: dict[Path, list[Episode]],
    tests: dict[Path, str],
    notes: dict[Path, dict[str, dict[str, list[Annotation]]]],
    tokenizer: str | None,
) -> dict[str, Any]:
    """The episodes of the page by their source. Starts that were played in several sources come first."""
    pieces, texts, sources = run_pieces(run, tokenizer), Texts(), []
    names = starts([e for f in (*tests, *files) for e in files[f]])  # an evaluation has the better name for a start
    often = Counter(n for rows in files.values() for n in {names[e.task.id] for e in rows})
    share = max(4, EPISODES // max(1, len(files)))
    size = 0
    for f, rows in files.items():
        order = sorted(range(len(rows)), key=lambda i: (-often[names[rows[i].task.id]], i))[:share]
        views: list[dict[str, Any]] = []
        for i in sorted(order):
            if size + texts.size > SIZE:
                break
            e = rows[i]
            seen = view(e, pieces, texts, notes[f].get(e.id, {}), f not in tests)
            views.append(seen | {"start": names[e.task.id]})
            size += len(json.dumps(seen))
        label = f"evaluation {tests[f]}" if f in tests else f"iteration {int(f.stem)}"
        source = {"name": label, "test": f in tests, "total": len(rows), "credit": credit_source(rows, notes[f]),
                  "episodes": views}  # fmt: skip
        sources.append(source)
    decoded = any("id" in t for s in sources for e in s["episodes"] for t in e["turns"])
    return {"sources": [s for s in sources if s["episodes"]], "texts": texts.all, "decoded": decoded}


def _versions(run: Run) -> dict[str, Any]:
    """The versions that the run wrote down (versions.json), or those of the machine that writes the page."""
    try:
        stored = read_json(run.path / "versions.json")
        if isinstance(stored, dict):
            return {"of": "the run", "list": {str(k): str(v) for k, v in stored.items()}}
    except (OSError, ValueError):
        pass
    found = {"trailmark": __version__, "python": platform.python_version()}
    for name in _VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"of": "where this page was written", "list": found}


def render(data: dict[str, Any]) -> str:
    """The page. The data holds no `<`, so no text can end its script. The security policy in the head allows only this
    one script, and no request."""
    template = resources.files("trailmark.report").joinpath("page.html").read_text("utf-8")
    script = re.search(r"<script>(.*?)</script>", template, re.DOTALL)
    assert script is not None, "page.html has no script"
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    head, tail = template.replace("SCRIPT_HASH", digest).split("DATA_HERE")
    return head + text + tail
