"""How often the policy of a taxi study takes the move that the reflection names, over all seeds of one arm.

    python bench/followed.py runs/studies/quickstart
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from trailmark.runs.store import read_segment

MOVES = {"south": "0", "north": "1", "east": "2", "west": "3"}


def main(study: Path) -> None:
    for name in ("reflect-sft", "reflect-rl"):
        named = taken = 0
        for file in sorted(study.glob(f"runs/*/seed-*/evaluation/{name}.jsonl")):
            for episode in read_segment(file):
                for said, done in zip(episode.turns, episode.turns[1:]):
                    found = re.findall(r"go (\w+)", said.text) if said.seat == "reflector" else []
                    if found and found[-1] in MOVES and done.seat == "policy":
                        named += 1
                        taken += done.text == MOVES[found[-1]]
        share = f"{taken / named:.3f}" if named else "none"
        print(f"{name}: {named} decisions after a reflection that names a move; {share} take it")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
