"""How fast answers are checked: plain numbers in this process, formulas in one guarded process.

    python bench/answers.py [--seconds 3]

Every pair is new, so nothing is remembered. Prints one JSON object a line.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator

from common import alone

from trailmark.tasks.math.check import Checker
from trailmark.tasks.math.pool import Pool


def numbers() -> Iterator[tuple[str, str]]:
    """(response, gold): integers, decimals, fractions, thousands, percentages."""
    for k in itertools.count(1):
        yield f"It is {k}.\n#### {k}", str(k)
        yield f"so \\boxed{{\\frac{{{k}}}{{8}}}}", str(k / 8)
        yield f"The answer is {k * 1000:,} dollars.", str(k * 1000)
        yield f"\\boxed{{{k}.50}}", f"{k + 1}.5"


def formulas() -> Iterator[tuple[str, str]]:
    for k in itertools.count(2):
        yield f"\\boxed{{\\frac{{{k}}}{{\\sqrt{{2}}}}}}", f"\\frac{{{k}\\sqrt{{2}}}}{{2}}"
        yield f"\\boxed{{x^2+{2 * k}x+{k * k}}}", f"(x+{k})^2"
        yield f"\\boxed{{{k}\\pi}}", f"{k + 1}\\pi"


def rate(name: str, checker: Checker, pairs: Iterator[tuple[str, str]], seconds: float) -> None:
    checker.check(*next(pairs))
    began, done, right = time.perf_counter(), 0, 0
    while time.perf_counter() - began < seconds:
        right += checker.check(*next(pairs)).right
        done += 1
    per_second = done / (time.perf_counter() - began)
    alone(f"answers/{name}", per_second, "checks/s", f"{right} of {done} judged right")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each of the two")
    seconds = parser.parse_args().seconds
    rate("numeric", Checker(), numbers(), seconds)
    rate("symbolic", Checker(pool=Pool(1)), formulas(), seconds)


if __name__ == "__main__":
    main()
