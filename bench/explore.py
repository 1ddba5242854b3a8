"""Random play in repositories: steps a second of AutoExplore, resets included, in one process and in two at once.

    python bench/explore.py [--repo FOLDER ...] [--steps 20000] [--repeats 5]

Seconds are those that a process was computing, so that what else the machine does is not counted. Every step draws one
of the listed labels; every episode draws its own leave-out. Without --repo the installed packages `httpx` and `numpy`
are the repositories.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from common import alone

from trailmark.tasks import get_task
from trailmark.tasks.auto_explore.repo import snapshot


def walk(repo: str, steps: int, leaveout: float, shuffle: bool, seed: int) -> float:
    """Seconds of `steps` random steps; the repository is listed before the clock starts."""
    target = random.Random(0).choice(snapshot(repo).files)
    source = get_task("auto-explore", repo=repo, target=target, leaveout=leaveout, shuffle_labels=shuffle)
    draw, world = random.Random(seed), source.make()
    starts = source.tasks("train", 1 + steps // 2, seed)
    began, done = time.process_time(), 0
    for task in starts:
        seen, over = world.reset(task), False
        while not over and done < steps:
            step = world.step(seen.labels[int(draw.random() * len(seen.labels))])
            seen, over, done = step.observation, step.over, done + 1
        if done >= steps:
            break
    return (time.process_time() - began) * steps / done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repo", nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    repos = args.repo or [
        str(Path(s.origin).parent) for n in ("httpx", "numpy") if (s := importlib.util.find_spec(n)) and s.origin
    ]
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        for repo in repos:
            for leaveout, shuffle in ((0.0, False), (0.5, False), (0.5, True)):
                what = f"{Path(repo).name.split('-')[0]}, leave-out {leaveout}{', shuffled labels' if shuffle else ''}"
                for cores in (1, 2):
                    rates = []
                    for k in range(args.repeats):
                        began = [
                            pool.submit(walk, repo, args.steps, leaveout, shuffle, 2 * k + c) for c in range(cores)
                        ]
                        rates.append(sum(args.steps / job.result() for job in began))
                    alone(f"explore/{what}, {cores} core{'s' * (cores > 1)}", statistics.median(rates), "steps/s")


if __name__ == "__main__":
    main()
