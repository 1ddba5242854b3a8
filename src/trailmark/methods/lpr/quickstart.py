"""`trailmark quickstart --method lpr`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trailmark.methods.quickstart import Results, packaged_recipe


def quickstart(out: Path, seed: int, resume: bool, say: Callable[[str], None]) -> Results:
    """LPR on order puzzles: imitation, Monte-Carlo values, a process reward model, ranked pairs, pDPO."""
    from trailmark.config import resolve
    from trailmark.methods import get_method
    from trailmark.methods.lpr.method import LprMethod
    from trailmark.runs.launch import launch
    from trailmark.runs.store import segments

    say("LPR: imitation, values of states, a reward model of steps, pDPO")
    config = resolve(recipe(out / "lpr", seed), LprMethod.Config)
    launch(get_method("lpr"), config, resume)
    trained = out / "lpr" / "policy-1"
    files = {
        "SFT, one answer": trained / "evaluation/single.jsonl",
        "SFT, most votes of 8": trained / "evaluation/vote.jsonl",
        "SFT, best of 8 by the reward model": trained / "evaluation/best.jsonl",
        "SFT, a right one of 8 (the ceiling)": trained / "evaluation/any.jsonl",
        "pDPO, one answer": segments(trained / "evaluation")[-1],
    }
    return Results(
        files,
        trained,
        title="order puzzles, 200 questions, temperature 1, 95 % intervals; sound: share of true steps",
        main="pDPO, one answer",
        metrics=("success", "sound"),
        read_next="docs/lpr.md, and docs/studies/lpr-puzzle-notes.md",
    )


def recipe(out: Path, seed: int) -> dict[str, Any]:
    raw = packaged_recipe("lpr-puzzle", out, seed)
    final = {"choose": 8, "value": str(out / "prm-1")}
    return {**raw, "preference": {**raw["preference"], "final": final}}
