"""Pipelines: stages that are made in order, each once.

    FOLDER/NAME/               the outputs of a stage; a training stage is an ordinary run
    FOLDER/NAME/stage.json     written last: settings, fingerprints of inputs and outputs, a summary
    FOLDER/NAME.begun.json     settings and inputs of a stage in progress
    FOLDER/replaced/NAME-1/    old outputs, from other settings or inputs

`run_stages` checks each stage in order:

    done       stage.json exists, settings and inputs are the same: the stage is skipped
    killed     begun.json exists: `make` is called again on the folder, which may hold a part of the outputs
    changed    a setting, an input or a file that a setting names has changed: the old outputs are moved away, and the
               stage is made again
    edited     an output was changed by hand: an error names the stage and the file
    busy       another process makes this stage: RunBusy

Settings that do not change what a stage makes (`Stage.unread`) are stored and not compared.

An input is a file (compared by its content), a folder (by its files), a run (by its recipe, metrics and newest
checkpoint) or another stage (by its stage.json). Paths are not part of a fingerprint, so a pipeline may be moved.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trailmark import stopping
from trailmark.errors import RunError, TrailmarkError, shorten
from trailmark.fault_points import point
from trailmark.marked_yaml import parse
from trailmark.plain_files import read_json, read_plain
from trailmark.runs.checkpoints import listed
from trailmark.runs.data_files import known_files
from trailmark.runs.diff import compared
from trailmark.runs.store import atomic_write, cannot_write, file_hash, hold

RECORD = "stage.json"
BEFORE = "recipe.before.yaml"  # the old recipe of a resumed run whose recipe has changed, until its stages are checked
MADE = "recipe.made.yaml"  # the recipe of a training, where settings that do not change it were changed later
# The files that a run writes itself.
TRAINED = ("checkpoints", "metrics.jsonl", "timings.jsonl", "episodes", "evaluation", "annotations")
Summary = Mapping[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Stage:
    """One step of a pipeline. `make(folder)` writes the outputs and returns a summary of JSON values. After a kill it
    is called again and finds what it had written. It must then continue, or write the same files again."""

    name: str
    make: Callable[[Path], Summary | None]
    settings: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, str | Path] = field(default_factory=dict)
    outputs: tuple[str, ...] | None = None  # the outputs: files and folders below the stage's folder; None: all of them
    single: bool = False  # the output is one file, in place of the folder
    grows: tuple[str, ...] = ()  # settings that may change without making the stage again, such as a number of steps
    files: Mapping[str, Path] = field(default_factory=dict)  # files that settings name, by key; they may not exist
    unread: tuple[str, ...] = ()  # settings and inputs that do not change the outputs: stored, and not compared
    # writes changed settings that are not compared into finished outputs, for those who look for them there
    refresh: Callable[[Path], None] | None = None
    strict: bool = False  # a stage in progress goes on only if settings that are not compared are the same, too


@dataclass(frozen=True)
class Layout:
    """Where a stage has its outputs, its record and its notes, relative to the folder of the pipeline."""

    home: str = "{name}"
    record: str = "{name}/" + RECORD
    begun: str = "{name}.begun.json"
    locks: bool = True  # False: the caller has locked the whole folder


class _Place:
    """The files of one stage."""

    def __init__(self, folder: Path, stage: Stage, layout: Layout):
        self.folder, self.stage, self.locks = folder, stage, layout.locks
        self.home = folder / layout.home.format(name=stage.name)
        self.record = folder / layout.record.format(name=stage.name)
        self.begun = folder / layout.begun.format(name=stage.name)
        self.shared = "{name}" not in layout.home  # several stages write into one folder, so each must list its outputs
        self.title = stage.name if self.shared else self.home.relative_to(folder).as_posix().replace("/", "-")

    @contextmanager
    def locked(self) -> Iterator[None]:
        try:
            self.begun.parent.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise cannot_write(self.folder, problem) from problem
        if not self.locks:
            yield
            return
        name = self.begun.name.removesuffix(".begun.json")
        fd = hold(self.begun.with_name(f".{name}.lock"), f"stage '{self.stage.name}' in {self.folder}")
        try:
            for path in (self.begun, self.record):
                for temp in path.parent.glob(f".{path.name}.*.tmp"):  # left by a process that died
                    temp.unlink(missing_ok=True)
            yield
        finally:
            os.close(fd)

    def parts(self) -> list[Path]:
        """The outputs that exist."""
        if self.stage.outputs is None:
            return [self.home] if _has_files(self.home) else []
        return [p for name in self.stage.outputs if _has_files(p := self.home / name)]

    def files(self) -> dict[str, str]:
        """The outputs by name, with their hashes."""
        if self.stage.outputs is None:
            skipped = {self.record.name} if self.record.parent == self.home else set()
            return fingerprint(self.home, skipped)
        return {
            name if not rest else f"{name}/{rest}": value
            for name in self.stage.outputs if _has_files(self.home / name)
            for rest, value in fingerprint(self.home / name).items()
        }  # fmt: skip

    def set_aside(self, shelf: Path) -> None:
        """Move the outputs and the record to `shelf`. (A killed process may have moved some of them already.)"""
        shelf.parent.mkdir(parents=True, exist_ok=True)
        outside = self.record.exists() and (self.shared or self.home not in self.record.parents)
        if self.shared:
            for path in self.parts():
                place = shelf / path.relative_to(self.home)
                place.parent.mkdir(parents=True, exist_ok=True)
                path.rename(place)
                point("stage.moved")
        elif self.home.exists():
            self.home.rename(shelf)
            point("stage.moved")
        if outside:
            self.record.rename(shelf / RECORD if self.shared else shelf.with_name(f"{shelf.name}.{RECORD}"))

    def free_shelf(self) -> Path:
        shelf, k = self.folder / "replaced", 1
        while (shelf / f"{self.title}-{k}").exists():
            k += 1
        return shelf / f"{self.title}-{k}"


def run_stages(
    folder: str | Path, stages: Sequence[Stage], say: Say | None = None, only: Sequence[str] | None = None,
    layout: Layout = Layout(), each: Callable[[str, Summary], None] = lambda name, summary: None,
) -> dict[str, Summary]:  # fmt: skip
    """Make every stage that is not done, in order. Returns the summary of each; `each` gets a summary as soon as it
    exists. `only`: make only these stages, and the ones before them must be done. `say` gets the reason if a stage is
    made again."""
    say = say or (lambda line: print(line, file=sys.stderr, flush=True))
    names = [s.name for s in stages]
    if twice := next((n for n in names if names.count(n) > 1), None):
        raise RunError(f"{folder}: two stages are called '{twice}'.")
    done: dict[str, Summary] = {}
    last = max((names.index(n) for n in only), default=-1) if only is not None else len(names) - 1
    for stage in stages[: last + 1]:
        place = _Place(Path(folder), stage, layout)
        with place.locked():
            if only is not None and stage.name not in only:
                _must_be_done(place, next(n for n in names[names.index(stage.name) :] if n in only))
                continue
            with stopping.noting(f"stage '{place.stage.name}' of {place.folder} is not finished"):
                done[stage.name] = _make(place, say)
        each(stage.name, done[stage.name])
    return done


def stage_state(folder: str | Path, stage: Stage, layout: Layout = Layout()) -> str:
    """For people: done, begun, to do, or what has changed since the stage was made. Nothing is written."""
    place = _Place(Path(folder), stage, layout)
    if not place.record.exists():
        return "begun" if place.begun.exists() else "to do"
    record = _read(place.record)
    try:
        changed = _changes(*_compared(stage, record, _wanted(stage)), stage.grows)
    except RunError as problem:  # an input is not there
        return f"to do again: {problem}"
    return f"to do again: {changed[0]}" if changed else "done"


def _must_be_done(place: _Place, later: str) -> None:
    wanted = _wanted(place.stage)
    record = _record(place)
    if record is None:
        raise RunError(f"{place.folder}: stage '{later}' needs '{place.stage.name}', which is not done yet.")
    _unedited(place, record)
    if changed := _changes(*_compared(place.stage, record, wanted)):
        raise RunError(
            f"{place.folder}: stage '{later}' needs '{place.stage.name}', which was made otherwise "
            f"({changed[0]}): make it again first."
        )


def _wanted(stage: Stage) -> dict[str, Any]:
    files = {key: about["sha256"] for key, about in known_files(stage.files).items()}
    made_from = {"stage": stage.name, "settings": _plain(stage), "inputs": _inputs(stage)}
    return {**made_from, "files": files} if files else made_from


def _make(place: _Place, say: Say) -> Summary:
    stage = place.stage
    wanted = _wanted(stage)
    begun = _read(place.begun) if place.begun.exists() else None
    if begun and (shelf := begun.pop("replaces", None)):  # killed while the old outputs were moved
        place.set_aside(place.folder / shelf)
        _note(place.begun, wanted)
        begun = wanted
    record = _record(place)
    if record is not None:
        if not (begun or {}).get("refreshes"):  # else killed inside `refresh`
            _unedited(place, record)
        old, now = _compared(stage, record, wanted)
        changed = _changes(old, now, stage.grows)
        if not changed:
            if stage.refresh is not None and record["settings"] != wanted["settings"]:
                _note(place.begun, {**wanted, "refreshes": True})
                stage.refresh(place.home)
                return _finish(place, wanted, record["summary"])
            place.begun.unlink(missing_ok=True)
            return record["summary"]
        if _grows(stage, old, now):
            say(f"stage '{stage.name}' goes on: {changed[0]}")
        else:
            _replace(place, wanted, changed[0], say)
    elif begun is not None:
        old, now = (begun, wanted) if stage.strict else _compared(stage, begun, wanted)
        changed = _changes(old, now, stage.grows)
        if changed and place.parts() and not _grows(stage, old, now):
            _replace(place, wanted, changed[0], say)
    elif place.parts() and not (place.shared or stage.strict):
        raise RunError(
            f"stage '{stage.name}' writes to {place.home}, which holds files that it did not make ('{_first(place)}'): "
            "move them away."
        )
    _note(place.begun, wanted)
    point("stage.begun")
    try:
        if not stage.single:
            place.home.mkdir(parents=True, exist_ok=True)
        summary = dict(stage.make(place.home) or {})
    except TrailmarkError:
        if not place.parts():  # an error before the first output leaves nothing behind
            place.begun.unlink(missing_ok=True)
            if not place.shared:
                remove_empty(place.home)
        raise
    point("stage.made")
    return _finish(place, wanted, summary)


def _finish(place: _Place, wanted: Mapping[str, Any], summary: Summary) -> Summary:
    whole = {**wanted, "outputs": place.files(), "summary": dict(summary)}
    place.record.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(place.record, as_json(whole), "stage")
    place.begun.unlink(missing_ok=True)
    return summary


def _record(place: _Place) -> dict[str, Any] | None:
    """The content of stage.json."""
    found = _read(place.record) if place.record.exists() else None
    if found is None or all(k in found for k in ("settings", "inputs", "outputs", "summary")):
        return found
    raise RunError(
        f"{place.record} is no record of a stage: move {_away(place.record)} away, and stage '{place.stage.name}' "
        "is made again."
    )


def _replace(place: _Place, wanted: Mapping[str, Any], why: str, say: Say) -> None:
    shelf = place.free_shelf()
    say(f"stage '{place.stage.name}' is made again: {why}. What was there lies in {shelf}")
    _note(place.begun, {**wanted, "replaces": shelf.relative_to(place.folder).as_posix()})
    point("stage.replaced")
    place.set_aside(shelf)
    _note(place.begun, wanted)


def begun_from(run: Path, stages: Sequence[Stage], say: Say | None = None) -> None:
    """Store which stages a run trains from. If they have changed since the run began, its results are moved to
    RUN/replaced, and the run starts again."""
    note, say = run / "stages" / "used.json", say or (lambda line: print(line, file=sys.stderr, flush=True))
    now = {s.name: fingerprint(run / "stages" / s.name)[RECORD] for s in stages}
    old = _read(note) if note.exists() else now
    shelf = old.pop("replaces", None)
    if shelf is None and old != now:
        other = next(name for name in {**old, **now} if old.get(name) != now.get(name))
        shelf = next(s for k in itertools.count(1) if not (run / (s := f"replaced/run-{k}")).exists())
        say(f"the run begins again: its stage '{other}' is another one. What was there lies in {run / shelf}")
    if shelf is not None:
        _note(note, {**now, "replaces": shelf})
        point("stage.replaced")
        (run / shelf).mkdir(parents=True, exist_ok=True)
        _keep_open(run, run / shelf)
        for name in TRAINED:
            if (run / name).exists():
                (run / name).rename(run / shelf / name)
                point("stage.moved")
        for name in ("episodes", "checkpoints"):
            (run / name).mkdir(exist_ok=True)
    (run / "stages" / BEFORE).unlink(missing_ok=True)
    _note(note, now)


def _keep_open(run: Path, shelf: Path) -> None:
    """Copy what commands need to open the old results as a run: the recipe that they were made with, and the files next
    to it."""
    before = run / "stages" / BEFORE
    recipe = before if before.exists() else run / "recipe.yaml"
    for path, name in ((recipe, "recipe.yaml"), *((run / n, n) for n in ("versions.json", "models.json", "data.json"))):
        if path.is_file() and not (shelf / name).exists():
            atomic_write(shelf / name, path.read_bytes())
    if (run / "judge").is_dir() and not (shelf / "judge").exists():
        shutil.copytree(run / "judge", shelf / "judge")
    for page in ("report.html", "verify.json"):
        if (run / page).exists():
            (run / page).rename(shelf / page)


def _unedited(place: _Place, record: Mapping[str, Any]) -> None:
    now = place.files()
    for name, value in record["outputs"].items():
        if now.get(name) != value:
            file = place.home / name if name else place.home
            what = "was changed after it was made" if name in now else "is gone"
            away = f"{file if place.shared else place.home} and {place.record}"
            if place.home in place.record.parents and not place.shared:
                away = str(place.home)
            raise RunError(
                f"{file} of stage '{place.stage.name}' {what}: put it back as it was, or move {away} away and "
                f"the stage is made again."
            )


def _compared(stage: Stage, old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both records without what the stage does not read."""
    unread = set(stage.unread)
    inputs = lambda record: {name: files for name, files in record["inputs"].items() if name not in unread}
    return tuple({**r, "settings": _without(r["settings"], unread), "inputs": inputs(r)} for r in (old, new))  # type: ignore[return-value]


def _without(settings: Mapping[str, Any], unread: Collection[str], path: str = "") -> dict[str, Any]:
    """Settings without some keys; a section of which nothing is left goes, too."""
    out = {}
    for key, value in settings.items():
        if f"{path}{key}" in unread:
            continue
        if isinstance(value, dict) and value:
            value = _without(value, unread, f"{path}{key}.")
            if not value:
                continue
        out[key] = value
    return out


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], grows: Sequence[str] = ()) -> list[str]:
    """A sentence for each setting and each input file that differs. Settings with which the stage can simply go on come
    last."""
    keys = sorted(_keys(old["settings"], new["settings"]), key=lambda found: found[0] in grows)
    said = [f"key '{key}' was {_short(a)} and is {_short(b)}" for key, a, b in keys]
    for name in dict.fromkeys([*old["inputs"], *new["inputs"]]):
        before, now = old["inputs"].get(name), new["inputs"].get(name)
        if before is None or now is None:
            said.append(f"input '{name}' is {'new' if before is None else 'no longer used'}")
            continue
        other = sorted(f for f in {*before, *now} if before.get(f) != now.get(f))
        if other == [RECORD]:
            said.append(f"input '{name}' is a stage that was made again")
        elif other:
            said.append(f"input '{name}' has changed" + (f" ({other[0]})" if other[0] else ""))
    return [*said, *(f"the file of key '{key}' has changed" for key in _other_files(old, new))]


def _other_files(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The keys whose file has changed."""
    before, now = old.get("files", {}), new.get("files", {})
    return [key for key in now if before.get(key, now[key]) != now[key]]


_NOTHING = object()


def _keys(a: Any, b: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The keys that differ. If a section exists on one side only, each of its keys is listed."""
    a, b = ({} if x is _NOTHING and isinstance(y, dict) and y else x for x, y in ((a, b), (b, a)))
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys([*a, *b]):
            yield from _keys(a.get(key, _NOTHING), b.get(key, _NOTHING), f"{path}.{key}" if path else key)
    elif json_text(a) != json_text(b):
        yield path, a, b


def _grows(stage: Stage, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether the stage can go on, because only settings differ that may change."""
    keys = {key for key, _, _ in _keys(old["settings"], new["settings"])}
    return bool(keys) and keys <= set(stage.grows) and old["inputs"] == new["inputs"] and not _other_files(old, new)


# --- fingerprints --------------------------------------------------------------------------------------------------


def fingerprint(path: Path, skipped: set[str] | None = None) -> dict[str, str]:
    """Hashes of a file ({"": hash}), a stage, a run or a folder. `skipped` None: a stage is identified by its
    record."""
    if not path.is_dir():
        return {"": file_hash(path)}
    if skipped is None and (path / RECORD).is_file():
        record = _read(path / RECORD)
        return {RECORD: text_hash(json_text({k: record.get(k) for k in ("settings", "inputs", "outputs")}))}
    if (path / "recipe.yaml").is_file():
        return _run_files(path)
    files = [p for p in sorted(path.rglob("*")) if p.is_file() and not _passing(p.relative_to(path))]
    names = {p.relative_to(path).as_posix(): p for p in files}
    return {name: file_hash(p) for name, p in names.items() if name not in (skipped or ())}


def _passing(path: Path) -> bool:
    """Whether a file is temporary: locks, temporary files and half-written checkpoints. All are hidden files."""
    return path.name == ".lock" or any(
        p.startswith(".") and p.endswith((".tmp", ".lock", ".partial")) for p in path.parts
    )


def _run_files(run: Path) -> dict[str, str]:
    """The files that identify a run: the recipe without names and paths, the metrics and the newest checkpoint."""
    file = next(p for name in (MADE, "recipe.yaml") if (p := run / name).is_file())
    recipe = parse(str(read_plain(file), "utf-8"), str(file))[0]
    found = {"recipe.yaml": text_hash(json_text(json.loads(json.dumps(compared(recipe), default=str))))}
    if (run / "metrics.jsonl").is_file():
        found["metrics.jsonl"] = file_hash(run / "metrics.jsonl")
    for last in listed(run / "checkpoints")[-1:]:
        for path in sorted(p for p in last.rglob("*") if p.is_file()):
            found[path.relative_to(run).as_posix()] = file_hash(path)
    return found


def text_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _inputs(stage: Stage) -> dict[str, dict[str, str]]:
    found = {}
    for name, path in stage.inputs.items():
        path = Path(path)
        if not path.exists():
            raise RunError(
                f"stage '{stage.name}' needs {path} as its input '{name}', and there is no such file or folder."
            )
        found[name] = fingerprint(path)
    return found


# --- JSON ----------------------------------------------------------------------------------------------------------


def json_text(value: Any) -> str:
    """JSON that is equal for equal values, whatever the order of their keys."""
    return "" if value is _NOTHING else json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


def as_json(value: Any) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode()


def _plain(stage: Stage) -> Any:
    """The settings as they would be read back from a file."""
    return json.loads(json_text(dict(stage.settings)))


def _note(path: Path, value: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, as_json(value), "begun")


def _read(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except OSError as problem:
        raise RunError(f"{path} cannot be read ({problem.strerror}).") from None
    except ValueError as problem:
        raise RunError(f"{path} is not JSON ({problem}): move {_away(path)} away, and it is made again.") from None
    if not isinstance(found, dict):
        raise RunError(f"{path} is no record of a stage: move {_away(path)} away, and it is made again.")
    return found


def _away(record: Path) -> Path:
    """What to move away so that a stage is made again: its folder if the record is in it, else the record."""
    return record.parent if record.name == RECORD else record


def _short(value: Any) -> str:
    return "not set" if value is _NOTHING else shorten(json.dumps(value, ensure_ascii=False))


def _has_files(path: Path) -> bool:
    return path.is_file() or any(p.is_file() and not _passing(p.relative_to(path)) for p in path.rglob("*"))


def _first(place: _Place) -> str:
    """One of the outputs, for a message; a hidden file only if there is no other."""
    first = place.parts()[0]
    files = [first] if first.is_file() else sorted(p for p in first.rglob("*") if p.is_file())
    return str(min(files, key=lambda p: p.name.startswith(".")).relative_to(place.home))


def remove_empty(folder: Path) -> None:
    """Delete the folder of a pipeline in which nothing was made."""
    if folder.is_dir() and not _has_files(folder):
        shutil.rmtree(folder, ignore_errors=True)
