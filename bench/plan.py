"""Seconds that a plan foretells against those that the run then takes.

    python bench/plan.py [--quick]

Each recipe is planned with its probe and then trained, in one process. `ratio` is seconds foretold to seconds taken,
so 1 is right. Loading is in neither.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from common import commit, one_thread, record

SHAPE = {"layers": 2, "width": 64, "heads": 4, "context": 512}
RECIPES: dict[str, dict[str, Any]] = {
    "taxi, policy gradient": {"method": "policy_gradient", "task": {"name": "taxi"}, "prompts_per_step": 4, "n": 4},
    "arith, policy gradient": {
        "method": "policy_gradient", "task": {"name": "arith"}, "prompts_per_step": 8, "n": 4,
        "sampling": {"max_tokens": 16},
    },
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps, to see that it runs")
    args = parser.parse_args()
    one_thread()
    commit()
    from trailmark import methods
    from trailmark.config import resolve
    from trailmark.plan import make_plan
    from trailmark.runs.launch import launch
    from trailmark.runs.store import read_metrics

    steps, repeats = (4, 1) if args.quick else (40, 3)
    for name, recipe in RECIPES.items():
        found: list[tuple[float, float]] = []
        for k in range(repeats):
            with tempfile.TemporaryDirectory() as folder:
                method = methods.get_method(recipe["method"])
                model = {"name": "tiny", "shape": SHAPE}
                given = {"out": str(Path(folder) / "run"), "steps": steps, "seed": k, "model": model}
                config = resolve({**recipe, **given}, method.Config)
                said = make_plan(config).parts[0].total_seconds or 0.0
                launch(method, config)
                took = sum(t["seconds"] for t in read_metrics(Path(folder) / "run" / "timings.jsonl"))
                found.append((said, took))
        ratios = sorted(a / b for a, b in found)
        said, took = found[len(found) // 2]
        record(f"plan/{name}", said, took, "the run itself", ratios[len(ratios) // 2], "s", repeats,
               [ratios[0], ratios[-1]], f"{steps} steps; the ratio is foretold to taken")  # fmt: skip


if __name__ == "__main__":
    main()
