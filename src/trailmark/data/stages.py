"""A folder that is made stage by stage and goes on where it was stopped.

    DIR/settings.json         what the data are made from and how; the same command goes on, another one is refused
    DIR/reports/STAGE.json    what a stage kept, and what it left out and why; written last, so a stage with a report is done
    DIR/answers.jsonl         what a teacher answered, so that nothing is asked twice
    DIR/.lock                 held while a process is at work here

A stage is a function that writes its files and returns its counts. Its files are written whole or not at all, and a stage that
was stopped is made again from the stages before it: by the same settings it writes the same bytes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trailmark.errors import DataError, RunError
from trailmark.runs.store import Run, atomic_write, cannot_write

OURS = (".lock", "settings.json")  # there before anything is made


@dataclass
class Counts:
    """What a stage kept, by kind, and what it left out, by reason."""

    kept: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)

    def line(self, stage: str) -> str:
        kept = ", ".join(f"{n} {what}" for what, n in self.kept.items()) or "nothing"
        out = "; ".join(f"{n} {why}" for why, n in sorted(self.left_out.items()))
        return f"{stage}: {kept}" + (f" (left out: {out})" if out else "")


Stage = Callable[[], Counts]


class Workshop:
    """The folder, opened with its settings."""

    def __init__(self, out: Path):
        self.out, self.reports = out, out / "reports"

    def report(self, stage: str) -> Counts | None:
        """The counts of a stage that is done."""
        path = self.reports / f"{stage}.json"
        if not path.exists():
            return None
        value = read_json(path)
        if not isinstance(value, dict) or not all(isinstance(value.get(k), dict) for k in ("kept", "left_out")):
            raise DataError("is no report of a stage: take it away, and the stage is made again.", path)
        return Counts(Counter(value["kept"]), Counter(value["left_out"]))

    def make(self, stages: Mapping[str, Stage], wanted: Sequence[str], say: Callable[[str], None]) -> dict[str, Counts]:
        """Run the wanted stages in the order of `stages`; one that is done is only told again."""
        done: dict[str, Counts] = {}
        names = list(stages)
        for name in [n for n in names if n in wanted]:
            for before in names[: names.index(name)]:
                if self.report(before) is None:
                    raise RunError(f"{self.out}: stage '{name}' needs '{before}', which is not done yet.")
            counts = self.report(name)
            if counts is None:
                counts = stages[name]()
                value = {"kept": dict(counts.kept), "left_out": dict(sorted(counts.left_out.items()))}
                atomic_write(self.reports / f"{name}.json", as_json(value), "report")
            done[name] = counts
            say(counts.line(name))
        return done


@contextmanager
def workshop(out: Path, settings: Mapping[str, Any]) -> Iterator[Workshop]:
    """Open `out` for one process: new, or made with the same settings. Where nothing was made yet, the settings may change."""
    run = Run(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        made = out / "settings.json"
        if not made.exists() and (strangers := sorted(p.name for p in out.iterdir() if p.name not in OURS)):
            raise RunError(f"{out} is not empty and holds no data of ours ('{strangers[0]}'): choose another --out.")
        run.lock()  # which sweeps: not before it is known that the folder is ours
        if made.exists() and any(p.is_file() and p.name not in OURS for p in out.rglob("*")):
            _same(made, json.loads(as_json(settings)))
        else:
            atomic_write(made, as_json(settings), "settings")
        (out / "reports").mkdir(exist_ok=True)
        yield Workshop(out)
    except OSError as problem:
        raise cannot_write(out, problem) from problem
    finally:
        run.close()


def _same(made: Path, settings: Mapping[str, Any]) -> None:
    old = read_json(made)
    if not isinstance(old, dict):
        raise DataError("is no settings of a data set.", made)
    other = [k for k in sorted({*old, *settings}) if old.get(k) != settings.get(k)]
    if other:
        k = other[0]
        raise RunError(
            f"{made.parent} was begun with {k} {json.dumps(old.get(k))}, not {json.dumps(settings.get(k))}: "
            "go on with the same options, or choose another --out."
        )


def as_json(value: Any) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode()


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as problem:
        raise DataError(f"cannot be read ({problem.strerror}).", path) from None
    except ValueError as problem:
        raise DataError(f"is not JSON: {problem}.", path) from None
