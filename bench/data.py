"""Time to the first step and peak memory, over the number of rows of the file that is learnt from.

    python bench/data.py [--quick]

A generator writes the files into a temporary folder. Each case is a training of two steps with a tiny model in a
process of its own. The seconds are those that it computes up to the end of its first step, imports included (on a
quiet machine they equal wall-clock time); the memory is the most that it ever held. Rows of `sft` are questions and
answers of about 50 bytes. Trajectories have 1,000 tokens and a reward. `that might not fit` has a context so small
that each trajectory must be encoded to know that it fits. `answers` train a reward model: an outcome is whether the
trajectory was right; solutions of 60 labelled steps are always encoded, to know where their steps end. 100 rows show
what Python, torch and the model need alone. Each case runs three times.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import alone, commit, one_thread

CONTEXT = 2048
FIRST = "of computing, from the start of the process to the end of its first step"


def questions(n: int) -> Iterator[dict[str, Any]]:
    for i in range(n):
        yield {"prompt": f"What is {i} + {i % 97}?", "response": f"{i + i % 97}"}


def trajectories(n: int) -> Iterator[dict[str, Any]]:
    """One byte is one token of a tiny model. Four trajectories have the same prompt."""
    for i in range(n):
        yield {"prompt": f"{i // 4:098}:", "response": f"{i:09} step " * 60, "reward": i % 2}


def solutions(n: int) -> Iterator[dict[str, Any]]:
    for i in range(n):
        yield {"question": f"{i // 4:098}:", "steps": [f"{i:09} step"] * 60, "labels": [i % 2] * 60}


def write(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    with path.open("w") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")


WRITERS = {"sft": questions, "steps": solutions}
REWARD_MODELS: dict[str, dict[str, Any]] = {
    "outcome": {"kind": "outcome", "format": "trajectories"},
    "steps": {"kind": "classes", "format": "step-labels"},
}


def first_step(folder: Path, case: str, rows: int, context: int = CONTEXT) -> tuple[float, float]:
    """Seconds to the end of the first step, and the peak of memory in MB. `case` is a method or a reward model."""
    data, out = folder / f"{case}-{rows}.jsonl", Path(tempfile.mkdtemp(dir=folder)) / "run"
    if not data.exists():
        write(data, WRITERS.get(case, trajectories)(rows))
    recipe = folder / "recipe.yaml"
    method = "reward_model" if case in REWARD_MODELS else case
    shape = {"layers": 1, "width": 32, "heads": 2, "context": context}
    model = {"name": "tiny", "shape": shape}
    given = {"method": method, "data": str(data), "out": str(out), "model": model, "steps": 2, "batch": 8}
    recipe.write_text(json.dumps({**given, **REWARD_MODELS.get(case, {})}))
    made = subprocess.run([sys.executable, __file__, "--train", str(recipe)], capture_output=True, text=True)
    if made.returncode:
        raise SystemExit(made.stderr)
    told = json.loads(made.stdout.splitlines()[-1])
    return told["first"], told["peak"] / 1e6


def train(recipe: str) -> None:
    """In the process of a case: train, and say when the first step was done and how much memory was ever held."""
    import resource

    from trailmark import methods
    from trailmark.recipe import load_recipe
    from trailmark.runs.launch import launch
    from trailmark.runs.store import Run

    done: list[float] = []
    log = Run.log
    Run.log = lambda self, *a, **k: (done.append(time.process_time()), log(self, *a, **k))[1]  # type: ignore[method-assign]
    config = methods.resolve_recipe(load_recipe(recipe))
    launch(methods.get_method(config.method), config)
    print(json.dumps({"first": done[0], "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rows, to see that it runs")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        return train(args.train)
    one_thread()
    commit()
    small = [100, 1000] if args.quick else [100, 10_000, 100_000, 1_000_000]
    many = 2000 if args.quick else 150_000
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        cases = [("sft", n, CONTEXT, f"sft, {n:,} rows") for n in small]
        cases += [("oreo", n, CONTEXT, f"trajectories, {n:,} of 1,000 tokens") for n in (100, many // 10, many)]
        cases += [("oreo", many // 10, 1002, f"trajectories, {many // 10:,} of 1,000 tokens that might not fit")]
        cases += [("outcome", n, CONTEXT, f"answers, {n:,} outcomes of 1,000 tokens") for n in (100, many // 10, many)]
        cases += [("steps", n, CONTEXT, f"answers, {n:,} of 60 labelled steps") for n in (100, many // 10)]
        for case, rows, context, name in cases:
            found = [first_step(folder, case, rows, context) for _ in range(1 if args.quick else 3)]
            seconds, peaks = ([float(x) for x in column] for column in zip(*found))
            alone(f"data/{name}", seconds, "s", FIRST)
            alone(f"data/{name}, memory", peaks, "MB", "most that the process held")


if __name__ == "__main__":
    main()
