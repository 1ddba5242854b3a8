"""Whether process rewards have room on order puzzles: how often outcomes already prefer the sounder answer, and how
far the reward model's pairs of right answers do. An answer is sounder if a larger share of its steps follows from the
clues. ROAD is a run of method lpr.

    python bench/puzzle_room.py ROAD ROAD …
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from itertools import combinations, product
from pathlib import Path

from trailmark.methods.offline import won
from trailmark.methods.preference import by_group
from trailmark.runs.store import read_segment
from trailmark.tasks.puzzle.source import soundness
from trailmark.types import Episode


def compared(pairs: Iterable[tuple[Episode, Episode]]) -> Counter[str]:
    """How many pairs have a sounder, an equally sound and a less sound first answer."""
    said: Counter[str] = Counter()
    for a, b in pairs:
        x, y = soundness(a) or 0.0, soundness(b) or 0.0
        said["sounder" if x > y else "less sound" if x < y else "equal"] += 1
    return said


def line(name: str, said: Counter[str]) -> str:
    n = said.total() or 1
    return f"{name:<40}{said.total():>8}" + "".join(f"{said[k] / n:>12.3f}" for k in ("sounder", "equal", "less sound"))


def main(roads: list[Path]) -> None:
    outcome, right, process = Counter[str](), Counter[str](), Counter[str]()
    for road in roads:
        episodes = read_segment(road / "cleaned-1/all.jsonl")
        known = {e.id: e for e in episodes}
        for group in by_group(episodes).values():
            good, bad = [e for e in group if won(e)], [e for e in group if not won(e)]
            outcome += compared(product(good, bad))
            right += compared(combinations(good, 2))
        rows = [json.loads(x) for x in (road / "pairs-1/pairs.jsonl").read_text().splitlines()]
        process += compared((known[r["chosen"]], known[r["rejected"]]) for r in rows if r["kind"] == "process")
    print(f"{'pairs of one question':<40}{'pairs':>8}{'sounder':>12}{'equal':>12}{'less sound':>12}")
    print(line("right above wrong", outcome))
    print(line("two right ones, in the order written", right))
    print(line("right above right, by the reward model", process))


if __name__ == "__main__":
    main([Path(p) for p in sys.argv[1:]])
