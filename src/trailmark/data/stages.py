"""A folder of data that is made in stages (`runs/stages.py`). All stages write into one folder:

    DIR/settings.json         what the data are made from, and how
    DIR/reports/STAGE.json    what a stage kept, and what it left out and why
    DIR/stages/STAGE.json     settings, inputs and outputs of a finished stage
    DIR/replaced/STAGE-1/     old outputs of a stage that was made again with other settings
    DIR/answers.jsonl         a teacher's answers, so that nothing is asked twice
    DIR/.lock                 locked while a process works here

The same command resumes where it was stopped. With other options, the stages that depend on them are made again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trailmark.errors import DataError, RunError, TrailmarkError, nearest
from trailmark.plain_files import read_json as plain_json
from trailmark.runs.atomic_files import atomic_write, cannot_write
from trailmark.runs.fingerprints import as_json
from trailmark.runs.stages import Stage, record_of, run_stages
from trailmark.runs.store import Run

OURS = (".lock", "settings.json")  # files that exist before the first stage


@dataclass
class Counts:
    """What a stage kept, by kind, and what it left out, by reason."""

    kept: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)

    def line(self, stage: str) -> str:
        kept = ", ".join(f"{n} {what}" for what, n in self.kept.items()) or "nothing"
        out = "; ".join(f"{n} {why}" for why, n in sorted(self.left_out.items()))
        return f"{stage}: {kept}" + (f" (left out: {out})" if out else "")

    def plain(self) -> dict[str, dict[str, int]]:
        return {"kept": dict(self.kept), "left_out": dict(sorted(self.left_out.items()))}

    @classmethod
    def read(cls, value: Any, path: Path) -> Counts:
        if not isinstance(value, dict) or not all(isinstance(value.get(k), dict) for k in ("kept", "left_out")):
            raise DataError("is no report of a stage: take it away, and the stage is made again.", path)
        return cls(Counter(value["kept"]), Counter(value["left_out"]))


class DataFolder:
    """The open folder with its settings."""

    def __init__(self, out: Path, settings: Mapping[str, Any]):
        self.out, self.settings = out, settings

    def stage(
        self, name: str, make: Callable[[], Counts], outputs: Sequence[str], inputs: Sequence[str] = (),
        keys: Sequence[str] | None = None, files: Mapping[str, str | Path] | None = None,
    ) -> Stage:  # fmt: skip
        """`inputs` are outputs of earlier stages, `files` are files elsewhere, and `keys` are the settings that the
        stage depends on (None: all)."""
        report = self.out / "reports" / f"{name}.json"

        def build(_: Path) -> dict[str, Any]:
            counts = make()
            atomic_write(report, as_json(counts.plain()), "report")
            return counts.plain()

        return Stage(
            name, build, {k: v for k, v in self.settings.items() if keys is None or k in keys},
            {**{n: self.out / n for n in inputs}, **(files or {})}, home=".",
            outputs=(*outputs, f"reports/{name}.json"),
        )  # fmt: skip

    def make(self, stages: Sequence[Stage], wanted: Sequence[str], say: Callable[[str], None]) -> dict[str, Counts]:
        """Run the wanted stages in the order of `stages`. A finished stage is only reported again."""
        counts = lambda name, value: Counts.read(value, record_of(self.out, name))
        each = lambda stage, value: say(counts(stage.name, value).line(stage.name))
        done = run_stages(self.out, stages, say, wanted, each, alone=True)
        if read_json(self.out / "settings.json") != json.loads(as_json(self.settings)):
            atomic_write(self.out / "settings.json", as_json(self.settings), "settings")
        return {name: counts(name, value) for name, value in done.items()}


@contextmanager
def data_folder(
    out: Path, settings: Mapping[str, Any], wanted: Sequence[str] = (), known: Sequence[str] = ()
) -> Iterator[DataFolder]:
    """Open `out` for one process: a new folder, or one with data of the same kind. `wanted` are the stages that a
    person named, of the `known` ones."""
    if odd := [name for name in wanted if name not in known]:
        raise TrailmarkError(f"there is no stage '{odd[0]}'.{nearest(odd[0], known)}")
    run = Run(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        made = out / "settings.json"
        if not made.exists() and (strangers := sorted(p.name for p in out.iterdir() if p.name not in OURS)):
            raise RunError(f"{out} is not empty and holds no data of ours ('{strangers[0]}'): choose another --out.")
        run.lock()  # locking deletes temporary files, so check first that the folder is ours
        if made.exists() and any(p.is_file() and p.name not in OURS for p in out.rglob("*")):
            _same_kind(made, settings["kind"])
        else:
            atomic_write(made, as_json(settings), "settings")
        (out / "reports").mkdir(exist_ok=True)
        yield DataFolder(out, settings)
    except OSError as problem:
        raise cannot_write(out, problem) from problem
    finally:
        run.close()


def _same_kind(made: Path, kind: str) -> None:
    """Raise an error if a folder holds data of another kind."""
    old = read_json(made)
    if not isinstance(old, dict):
        raise DataError("is no settings of a data set.", made)
    if old.get("kind") != kind:
        raise RunError(
            f"{made.parent} was begun with kind {json.dumps(old.get('kind'))}, not {json.dumps(kind)}: go on with the "
            "same options, or choose another --out."
        )


def read_json(path: Path) -> Any:
    try:
        return plain_json(path)
    except OSError as problem:
        raise DataError(f"cannot be read ({problem.strerror}).", path) from None
    except ValueError as problem:
        raise DataError(f"is not JSON: {problem}.", path) from None
