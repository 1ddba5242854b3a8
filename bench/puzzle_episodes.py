"""What the answers of the study lpr-puzzle look like: lines, answers that are missing, where steps from an item of the
chain go (on, to its down, or where no clue leads), the commonest letter, and the reward model on held-out states.

    python bench/puzzle_episodes.py runs/studies/lpr-puzzle
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path

from trailmark.runs.store import read_metrics, read_segment, segments
from trailmark.tasks.puzzle.source import puzzle_of


def told(name: str, files: list[Path]) -> str:
    lines, missing, shares, n = 0, 0, [], 0
    ways: Counter[str] = Counter()
    for file in files:
        letters: Counter[str] = Counter()
        episodes = read_segment(file)
        texts = [e.turns[0].text for e in episodes]
        for e, text in zip(episodes, texts):
            p = puzzle_of(e.task)
            for a, b in (tuple(line) for line in text.split("\n") if len(line) == 2 and line[0] in p.earlier):
                ways["on" if b == p.later[a] else "down" if b == p.earlier[a] else "neither"] += 1
            found = re.search(r"Finish\[([A-D])\]", text)
            letters[found[1] if found else ""] += 1
            lines += text.count("\n") + 1
        missing, n = missing + letters.pop("", 0), n + len(texts)
        shares.append(max(letters.values()) / len(texts))
    each = " ".join(f"{s:.2f}" for s in shares)
    went = "".join(f"{ways[way] / sum(ways.values()):>8.2f}" for way in ("on", "down", "neither"))
    return f"{name:<16}{lines / n:>6.2f}{missing / n:>11.3f}{went}   {each}"


def main(out: Path) -> None:
    print("arm              lines  no answer      on    down neither   share of the commonest letter, by seed")
    for arm in sorted(p for p in (out / "runs").iterdir() if p.name != "replaced"):
        seeds = sorted(p for p in arm.iterdir() if p.is_dir())
        print(told(arm.name, [segments(s / "evaluation")[-1] for s in seeds]))
        for how in ("single", "vote", "best"):
            if all((s / f"evaluation/{how}.jsonl").exists() for s in seeds):
                print(told(f"start, {how}", [s / f"evaluation/{how}.jsonl" for s in seeds]))
    print("seed  completions  process pairs  reward model on held-out states  its commonest class")
    for road in sorted(p for p in (out / "before" / "road").iterdir() if p.is_dir()):
        names = ("pairs", "completions", "examples")
        said = {n: json.loads((road / f"stages/{n}-1.json").read_text())["summary"] for n in names}
        classes = [n for k, n in said["examples"].items() if k.startswith("dev class")]
        row = list(read_metrics(road / "prm-1"))[-1]
        print(f"{road.name[5:]:<6}{said['completions']['completions']:>11}{said['pairs']['process pairs']:>15}"
              f"{row['eval/accuracy']:>32.3f}{max(classes) / sum(classes):>21.3f}")  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]))
