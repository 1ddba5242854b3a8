"""Find evaluated episodes on disk, and compare sets of them.

RUN/evaluation/NAME.jsonl      an evaluation of the method under that name
RUN/evaluation/000050.jsonl    the evaluation during training, after step 50
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trailmark.errors import DataError
from trailmark.evaluate.run import METRICS, FailedAs, check_sides, value_of
from trailmark.runs.annotations import named_episodes
from trailmark.runs.episode_json import object_to_json
from trailmark.runs.store import read_recipe, read_segment, segments
from trailmark.stats.intervals import Interval, paired, sign_test
from trailmark.tasks import task_class, task_names
from trailmark.types import Episode

Key = tuple[str, int, int]  # name and seed of the start, seed of the draws


def episode_files(path: str | Path) -> dict[str, list[Path]]:
    """The rows of a path. A file is one row. A folder of named files has one row each; numbered segments are one row
    together. A run has its named evaluations, else the last numbered one, else all its episodes. A folder of runs has
    the rows of each run."""
    path = Path(path)
    if path.is_file():
        return {path.stem: [path]}
    if not path.is_dir():
        raise DataError("there is no such file or folder.", path)
    if (path / "recipe.yaml").is_file():
        found = _in_folder(path / "evaluation")
        numbered = found.pop("evaluation", [])
        if found or numbered:
            return found or {f"evaluation after step {int(numbered[-1].stem)}": numbered[-1:]}
        path = path / "episodes"
    if found := _in_folder(path):
        return found
    inside = sorted(p.parent for p in path.glob("*/recipe.yaml"))
    if not inside:
        raise DataError("holds no episodes (files that end in .jsonl) and no runs.", path)
    return {f"{run.name}/{name}": files for run in inside for name, files in episode_files(run).items()}


def _in_folder(path: Path) -> dict[str, list[Path]]:
    if not path.is_dir():
        return {}
    numbered = segments(path)
    named = named_episodes(path)
    return ({path.name: numbered} if numbered else {}) | {p.stem: [p] for p in named}


def commands_of(files: Sequence[Path]) -> Mapping[str, str]:
    """What the labels mean that no prompt of a run's episodes lists (`TaskSource.commands`), if the run plays a task of
    the library. No other code is imported for it."""
    run = files[0].parent.parent
    if not (run / "recipe.yaml").is_file():
        return {}
    task = read_recipe(run).get("task")
    name = task.get("name") if isinstance(task, dict) else None
    return task_class(name).commands if name in task_names() else {}


def hears_words(episodes: Sequence[Episode]) -> bool:
    """Whether an actor may have seen the words of another seat."""
    pairs = [(a, b) for e in episodes for a, b in zip(e.turns, e.turns[1:])]
    return any(a.action is None and a.text.strip() and b.action is not None and a.seat != b.seat for a, b in pairs)


def read_files(files: Sequence[Path]) -> list[Episode]:
    return [e for f in files for e in read_segment(f)]


class NotEvaluated(DataError):
    """A run without a stored evaluation."""


def is_run(path: Path) -> bool:
    return (path / "recipe.yaml").is_file()


def evaluated(path: str | Path, within: str | None = None) -> tuple[list[Episode], Path]:
    """The one set of episodes of a run or file, and its path. `within` names a file of a run, or only its evaluation
    ("sft" for evaluation/sft.jsonl)."""
    path = Path(path)
    if within is not None and path.is_dir():
        tries = [path / within, path / "evaluation" / f"{within}.jsonl"]
        found = next((p for p in tries if p.is_file()), None)
        if found is None:
            raise DataError(f"holds neither {within} nor evaluation/{within}.jsonl.", path)
        path = found
    if is_run(path) and not _in_folder(path / "evaluation"):
        raise NotEvaluated(
            "holds no evaluation, only the episodes it learned from, if any: train with eval.every, or compare "
            "files that `trailmark eval --out` wrote.",
            path,
        )
    rows = episode_files(path)
    if len(rows) > 1:
        raise DataError(f"holds several evaluations ({', '.join(rows)}): choose one with --episodes NAME.", path)
    (files,) = rows.values()
    return read_files(files), files[-1] if len(files) == 1 else files[0].parent


def by_start(
    episodes: Sequence[Episode],
    metric: str,
    side: str | None = None,
    seat: str | None = None,
    failed: FailedAs = "apart",
) -> dict[Key, float]:
    """The mean of a metric for each start; episodes without the number are left out."""
    check_sides(episodes, side, seat)
    sums: dict[Key, list[float]] = {}
    for e in episodes:
        value = value_of(e, metric, side, seat, failed)
        if value is not None:
            sums.setdefault((e.task.id, e.task.seed, e.seed), []).append(value)
    return {k: float(np.mean(v)) for k, v in sums.items()}


@dataclass(frozen=True)
class Difference:
    """The difference a - b in a metric, over the starts that both played."""

    a: str
    b: str
    metric: str
    interval: Interval
    starts: int
    sign_p: float

    @property
    def verdict(self) -> str:
        return verdict(self.interval)

    def plain(self) -> dict[str, object]:
        return {"a": self.a, "b": self.b, "metric": self.metric, **self.interval.plain(), "starts": self.starts,
                "sign_p": self.sign_p, "verdict": self.verdict}  # fmt: skip


def verdict(interval: Interval) -> str:
    """The verdict on "a is above b", from the interval of a - b: holds, reversed, or unclear."""
    if interval.low is None or interval.high is None:
        return "unclear"
    return "holds" if interval.low > 0 else "reversed" if interval.high < 0 else "unclear"


def check_same_starts(sets: Mapping[str, Sequence[Episode]], common: bool = False) -> set[Key]:
    """The starts that all sets played. Unless `common`, every set must have the same starts. Starts with the same name
    and different content are never the same."""
    names = list(sets)
    keys = {name: {(e.task.id, e.task.seed, e.seed) for e in sets[name]} for name in names}
    shared = set.intersection(*keys.values())
    for name in names[1:]:
        if not common and keys[name] != keys[names[0]]:
            only = len(keys[name] ^ keys[names[0]])
            first = min(keys[name] ^ keys[names[0]])
            raise DataError(
                f"'{names[0]}' and '{name}' were not evaluated on the same starts and seeds: {only} are only in one "
                f"of them, such as '{first[0]}' (seed {first[1]}, draws {first[2]}). Compare the others with --common."
            )
    if not shared:
        raise DataError(f"{' and '.join(repr(n) for n in names)} have no start and seed in common.")
    content: dict[Key, str] = {}
    for name in names:
        for e in sets[name]:
            key = (e.task.id, e.task.seed, e.seed)
            text = object_to_json(e.task.data, f"task '{e.task.id}'")
            if key in shared and content.setdefault(key, text) != text:
                raise DataError(
                    f"start '{e.task.id}' is not the same in '{names[0]}' and '{name}': their tasks differ."
                )
    return shared


def compare(
    sets: Mapping[str, Sequence[Episode]],
    metrics: Sequence[str] = METRICS,
    common: bool = False,
    side: str | None = None,
    seat: str | None = None,
    failed: FailedAs = "apart",
) -> list[Difference]:
    """Each set against the first, metric by metric, paired by start and seed. If one set has no number for a start (for
    example, a play failed), the start is left out of both."""
    shared, (base, *others) = check_same_starts(sets, common), list(sets)
    found = []
    for metric in metrics:
        b = by_start(sets[base], metric, side, seat, failed)
        for name in others:
            a = by_start(sets[name], metric, side, seat, failed)
            if keys := sorted(shared & a.keys() & b.keys()):
                x, y = [a[k] for k in keys], [b[k] for k in keys]
                interval = paired(x, y, [k[0] for k in keys])
                found.append(Difference(name, base, metric, interval, len(keys), sign_test(np.subtract(x, y))))
    return found


def short_names(paths: Sequence[str | Path]) -> list[str]:
    """The shortest ends of paths that differ from each other."""
    parts = [Path(p).with_suffix("").parts if str(p).endswith(".jsonl") else Path(p).parts for p in paths]
    for size in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-size:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{p} ({i})" for i, p in enumerate(map(str, paths), 1)]
